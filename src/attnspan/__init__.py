"""attnspan: any score x any mask, in PyTorch, JAX and NumPy, with the same right answer everywhere."""

from attnspan.attention import Inspection, attention, inspect, plan
from attnspan.errors import ArgumentError, AttnspanError, MissingDependencyError, NotSupportedError
from attnspan.planner import Plan
from attnspan.softmax import masked_logsumexp, masked_softmax

__all__ = [
    "ArgumentError",
    "AttnspanError",
    "Inspection",
    "MissingDependencyError",
    "NotSupportedError",
    "Plan",
    "attention",
    "inspect",
    "masked_logsumexp",
    "masked_softmax",
    "plan",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("attnspan")
    raise AttributeError(f"module 'attnspan' has no attribute {name!r}")
