"""What torch.compile must not look into."""

from __future__ import annotations

import torch

from attnspan.dropout import row_words

__all__ = ["has_matrix_unit", "opaque", "opaque_row_words"]


@torch.library.custom_op("attnspan::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in a way no compiler fuses: it keeps two computations apart. Gradients pass."""
    return x.clone()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


opaque.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("attnspan::row_words", mutates_args=())
def opaque_row_words(i: torch.Tensor, n: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Draw the two words of each row, (2, *rows).

    Philox uses each word twice a round, so a compiler that inlines expressions writes 2**20 copies
    of its input; here it writes none.
    """
    return torch.stack(row_words(i, n, (low, high)))


@opaque_row_words.register_fake
def _(i: torch.Tensor, n: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return i.new_empty((2, *torch.broadcast_shapes(i.shape, n.shape)))


@torch.compiler.assume_constant_result
def has_matrix_unit() -> bool:
    """Tell whether PyTorch multiplies bfloat16 by AMX on this machine."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))
