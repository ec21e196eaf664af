"""The PyTorch front end: the textbook's modules, multi-head attention and PyTorch's own function.

``import attnspan.torch as d2l`` gives everything the textbook section asks of its library.
"""

from attnspan.errors import MissingDependencyError

try:
    import array_api_compat  # noqa: F401  (the core needs it for PyTorch arrays)
    import torch.utils._pytree  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f'attnspan.torch needs PyTorch and array-api-compat ({error}): pip install "attnspan[torch]"'
    ) from error

from attnspan.attention import attention, inspect, plan
from attnspan.plots import plot, show_heatmaps
from attnspan.shapes import check_shape
from attnspan.softmax import masked_softmax
from attnspan.torch.drop_in import scaled_dot_product_attention
from attnspan.torch.multihead import MultiHeadAttention
from attnspan.torch.textbook import (
    AdditiveAttention,
    BilinearAttention,
    DotProductAttention,
    GaussianAttention,
)
from attnspan.values import register_pytrees

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "DotProductAttention",
    "GaussianAttention",
    "MultiHeadAttention",
    "attention",
    "check_shape",
    "inspect",
    "masked_softmax",
    "plan",
    "plot",
    "scaled_dot_product_attention",
    "show_heatmaps",
]

register_pytrees()  # values made before their library was imported
