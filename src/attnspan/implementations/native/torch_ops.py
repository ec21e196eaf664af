"""The kernel as library operators, for what compilers, exports and dispatch modes trace.

Imported only where something traces. Without a rule of its own an operator's tangent is silently zero, so
both refuse to run where there are any.
"""

from __future__ import annotations

from typing import Any

import torch

from attnspan.arrays import accumulation_dtype
from attnspan.errors import NotSupportedError
from attnspan.implementations.native.problem import Problem
from attnspan.implementations.native.torch import GRADIENTS, backward, forward
from attnspan.implementations.native.torch_functions import mapped_backward, mapped_forward

__all__ = ["dot", "dot_backward"]


@torch.library.custom_op("attnspan::dot", mutates_args=())
def dot(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    align: torch.Tensor | None,
    start: torch.Tensor | None,
    stop: torch.Tensor | None,
    bits: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    draws: int,
    looks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give out, lse, top, inverse, and entropy, max_weight, jacobian_norm, empty unless `looks`."""
    _refuse_forward_mode()
    arrays = (q, k, v, key_bias, bias, slopes, align, start, stop, bits, seed)
    found = forward(Problem(*arrays, scale, softcap, dropout, draws), looks)
    return (*found, *(() if looks else _nothing(q, 3)))


@dot.register_fake
def _(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    dtype = accumulation_dtype(q)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    rows = [q.new_empty(q.shape[:-1], dtype=dtype) for _ in range(6 if rest[-1] else 3)]
    return (out, *rows, *(() if rest[-1] else _nothing(q, 3)))


@torch.library.custom_op("attnspan::dot_backward", mutates_args=())
def dot_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    top: torch.Tensor,
    inverse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    align: torch.Tensor | None,
    start: torch.Tensor | None,
    stop: torch.Tensor | None,
    bits: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    draws: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the gradients of q, k, v, key_bias, bias and slopes; those not wanted hold nothing."""
    _refuse_forward_mode()
    arrays = (q, k, v, key_bias, bias, slopes, align, start, stop, bits, seed)
    problem = Problem(*arrays, scale, softcap, dropout, draws)
    found = backward(problem, out, top, inverse, dout, dlse, wanted)
    return tuple(g if want else _nothing(q, 1)[0] for g, want in zip(found, wanted, strict=True))


@dot_backward.register_fake
def _(dout: Any, dlse: Any, out: Any, top: Any, inverse: Any, *rest: Any) -> Any:
    *_, wanted = rest
    return tuple(
        x.new_empty(x.shape, dtype=out.dtype) if want else _nothing(out, 1)[0]
        for x, want in zip(rest[:GRADIENTS], wanted, strict=True)
    )


def _refuse_forward_mode() -> None:
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotSupportedError(
            "attnspan::dot has no derivative under forward mode, and cannot tell whose tangents there are; "
            'trace attention(..., implementation="eager")'
        )


def _nothing(x: Any, count: int) -> list[Any]:
    return [x.new_empty(0, dtype=accumulation_dtype(x)) for _ in range(count)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *arrays, scale, softcap, dropout, draws, _ = inputs
    ctx.numbers = (scale, softcap, dropout, draws)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays, output[0], *output[2:4])


def _backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
    *arrays, out, top, inverse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:GRADIENTS])
    found: list[Any] = [None] * (len(arrays) + 5)
    if dout is None and dlse is None:
        return tuple(found)
    dout = torch.zeros_like(out) if dout is None else dout
    grads = dot_backward(dout, dlse, out, top, inverse, *arrays, *ctx.numbers, wanted)
    for n, want in enumerate(wanted):
        if want:
            found[n] = grads[n].to(arrays[n].dtype)
    return tuple(found)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise NotSupportedError(
        "attnspan::dot_backward has no derivative: second derivatives are computed outside compilers, "
        'or by implementation="eager"'
    )


dot.register_autograd(_backward, setup_context=_keep)
dot_backward.register_autograd(_no_second)


@dot.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> Any:
    arrays, numbers = arguments[:-5], arguments[-5:]
    found, dims = mapped_forward(
        lambda *x: dot(*x, *numbers)[: 7 if numbers[-1] else 4], info, in_dims[:-5], arrays
    )
    if not numbers[-1]:
        found, dims = (*found, *_nothing(arrays[0], 3)), (*dims, None, None, None)
    return found, dims


@dot_backward.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> Any:
    tensors, numbers, wanted = arguments[:-5], arguments[-5:-1], arguments[-1]

    def call(*merged: Any) -> Any:
        found = dot_backward(*merged, *numbers, wanted)
        return [g for g, want in zip(found, wanted, strict=True) if want]

    found, _ = mapped_backward(call, info, in_dims[:-5], tensors, wanted)
    rest = iter(found)
    every = [next(rest) if want else _nothing(tensors[2], 1)[0] for want in wanted]
    return tuple(every), tuple(0 if want else None for want in wanted)
