"""An identity that torch.compile cannot see through: it keeps two computations apart."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["opaque"]


@torch.library.custom_op("attnspan::opaque", mutates_args=())
def _opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_opaque.register_autograd(lambda ctx, gradient: gradient)


def opaque(x: Any) -> Any:
    """Copy a tensor in a way no compiler fuses; gradients pass."""
    return _opaque(x)
