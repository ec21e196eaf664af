"""The kernel's calls for arrays that have an address: NumPy's, and PyTorch's on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnspan import native
from attnspan.errors import ArgumentError
from attnspan.implementations.native.problem import Problem

__all__ = ["Described", "checked", "run_backward", "run_forward"]

Described = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape, and strides in elements."""


def checked(problem: Problem, describe: Callable[[Any], Described]) -> Any:
    """Give the kernel's own record of a problem: shapes, strides and mask are checked here, once."""

    def maybe(x: Any) -> Described | None:
        return None if x is None else describe(x)

    p = problem
    try:
        return native.load().DotProblem(
            str(p.q.dtype).removeprefix("torch."),
            describe(p.q),
            describe(p.k),
            describe(p.v),
            p.scale,
            p.softcap,
            maybe(p.key_bias),
            maybe(p.bias),
            maybe(p.slopes),
            maybe(p.align),
            maybe(p.start),
            maybe(p.stop),
            maybe(p.bits),
            p.dropout,
            maybe(p.seed),
            p.draws,
        )
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def run_forward(record: Any, addresses: list[int]) -> None:
    """Run the forward pass; 0 is none.

    The addresses are those of q, k, v, out, lse, top, inverse, entropy, max_weight, jacobian_norm.
    """
    record.forward(*addresses, native.default_threads(), "auto")


def run_backward(record: Any, arguments: list[Any]) -> None:
    """Run the backward pass; 0 is none.

    The arguments are addresses: q, k, v, out, top, inverse, dq, dk, dv, dkey_bias, dbias, dslopes; of
    dout and dlse, behind `inverse`, all that describes them.
    """
    record.backward(*arguments, native.default_threads(), "auto")
