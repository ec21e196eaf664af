"""The two frameworks the book is written in: are they here, and how to run in one undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from attnspan.errors import MissingDependencyError, refusal

__all__ = ["FRAMEWORKS", "Framework", "find", "installed", "is_installed"]


@dataclass(frozen=True)
class Framework:
    """One framework: its name here, its name in prose, and the packages it takes."""

    name: str
    label: str
    packages: tuple[str, ...]

    def missing(self) -> list[str]:
        """List the packages that are not installed."""
        return [package for package in self.packages if not is_installed(package)]

    def lacking(self) -> MissingDependencyError:
        """Build the error that names what is missing and how to get it (the caller raises it)."""
        names = " and ".join(self.missing()) or "a package that fails to import"
        return MissingDependencyError(f'{self.label} needs {names}: pip install "attnspan[{self.name}]"')

    @contextmanager
    def sandbox(self) -> Iterator[None]:
        """Run on the CPU, where the book's numbers come from, and put back the random state."""
        if self.missing():
            raise self.lacking()
        with ExitStack() as stack:
            if self.name == "torch":
                import torch

                stack.enter_context(torch.random.fork_rng(devices=[]))
                if torch.get_default_device().type != "cpu":
                    stack.enter_context(torch.device("cpu"))
            else:
                import jax

                stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
            yield

    def array(self, values: Any) -> Any:
        """Make an array of this framework from numbers, nested lists or a NumPy array."""
        if self.name == "torch":
            import torch

            return torch.as_tensor(values)
        import jax.numpy as jnp

        return jnp.asarray(values)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of arrays as this framework's users do: jit in JAX, nothing in PyTorch."""
        if self.name == "torch":
            return function
        from attnspan.book.jax import jit

        return jit(function)

    def draw(self, **draws: Callable[[], Any]) -> Any:
        """Draw an experiment's inputs with the function given for this framework."""
        return self.compiled(draws[self.name])()


FRAMEWORKS = (
    Framework("torch", "PyTorch", ("torch", "array_api_compat")),
    Framework("jax", "JAX", ("jax", "flax")),
)


def is_installed(package: str) -> bool:
    """Tell whether a package is there, without importing it."""
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def find(name: str) -> Framework:
    """Find a framework by name."""
    for framework in FRAMEWORKS:
        if framework.name == name:
            return framework
    raise refusal("framework", name, " or ".join(repr(f.name) for f in FRAMEWORKS))


def installed() -> list[Framework]:
    """List the frameworks whose packages are all there."""
    return [framework for framework in FRAMEWORKS if not framework.missing()]
