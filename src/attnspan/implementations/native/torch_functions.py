"""The kernel's derivatives outside compilers: functions of autograd, which torch.func's transforms take.

The first derivative is the kernel's backward pass, in a function of its own; the derivative of that is
the one of the formula. Under vmap the mapped axis becomes part of B. Neither has a derivative under
forward mode: PyTorch raises.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attnspan.arrays import as_written
from attnspan.implementations.native.kernel import run_forward
from attnspan.implementations.native.problem import Problem, formula
from attnspan.implementations.native.torch import GRADIENTS, backward, forward

__all__ = ["Again", "Backward", "Forward", "mapped_backward", "mapped_forward"]


class Forward(torch.autograd.Function):
    """The forward pass, of a problem in parts."""

    @staticmethod
    def forward(numbers: Any, looks: bool, *arrays: Any) -> Any:
        return forward(Problem(*arrays, *numbers), looks)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers, _, *arrays = inputs
        out, _, *rest = output
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, out, *rest[:2])

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        *arrays, out, top, inverse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[2 : 2 + GRADIENTS])
        return None, None, *_gradients(ctx.numbers, wanted, dout, dlse, out, top, inverse, arrays)

    @staticmethod
    def vmap(info: Any, in_dims: Any, numbers: Any, looks: bool, *arrays: Any) -> Any:
        return mapped_forward(lambda *x: Forward.apply(numbers, looks, *x), info, in_dims[2:], arrays)


def _gradients(
    numbers: Any, wanted: list[bool], dout: Any, dlse: Any, out: Any, top: Any, inverse: Any, arrays: Any
) -> list[Any]:
    """Give a gradient, or None, for each of a problem's arrays, in its dtype."""
    found: list[Any] = [None] * len(arrays)
    if (dout is None and dlse is None) or not any(wanted):
        return found
    dout = torch.zeros((), dtype=out.dtype).expand(out.shape) if dout is None else dout
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in (dout, dlse)):
        run = _by_formula  # is_grads_batched: a tensor without memory of its own
    elif torch.is_grad_enabled() or torch._C._functorch.maybe_current_level() is not None:
        run = Backward.apply
    else:  # as a function of its own it costs a small call more than the kernel does
        run = Backward.forward
    grads = iter(run(numbers, wanted, dout, dlse, out, top, inverse, *arrays))
    for n, want in enumerate(wanted):
        if want:
            found[n] = next(grads).to(arrays[n].dtype)
    return found


def _by_formula(
    numbers: Any, wanted: list[bool], dout: Any, dlse: Any, out: Any, top: Any, inverse: Any, *arrays: Any
) -> list[Any]:
    """Give what Backward gives, by operations that PyTorch has its own rules for."""
    leaves = [n for n, want in enumerate(wanted) if want]
    with torch.enable_grad(), as_written(arrays[0]):
        own: list[Any] = [x if x is None else x.detach() for x in arrays]
        for n in leaves:
            own[n] = own[n].to(out.dtype).requires_grad_()
        found = formula(Problem(*own, *numbers))
        live = found[1].detach() != -float("inf")
        back = [torch.where(live[..., None], dout.to(out.dtype), 0.0)]
        if dlse is not None:
            back.append(torch.where(live, dlse.to(out.dtype), 0.0))
        grads = torch.autograd.grad(
            found[: len(back)], [own[n] for n in leaves], back, allow_unused=True, materialize_grads=True
        )
    return list(grads)


class Again(torch.autograd.Function):
    """The forward pass of a problem that is known but for q, k and v: its record, other arrays and numbers.

    Written in the older of autograd's two ways, which costs a small call half as much, and which
    torch.func's transforms do not take: they never come here.
    """

    @staticmethod
    def forward(ctx: Any, record: Any, rest: Any, numbers: Any, q: Any, k: Any, v: Any) -> Any:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device="cpu")
        rows = torch.empty((2, *q.shape[:-1]), dtype=dtype, device="cpu")
        top = rows.data_ptr()
        inverse = top + rows.nbytes // 2
        run_forward(
            record, [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, top, inverse, 0, 0, 0]
        )
        ctx.rest, ctx.numbers = rest, numbers  # masks, which no one differentiates or changes
        ctx.save_for_backward(q, k, v, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        q, k, v, out, rows = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[3:], *(False,) * (GRADIENTS - 3)]
        arrays = (q, k, v, *ctx.rest)
        return (
            None,
            None,
            None,
            *_gradients(ctx.numbers, wanted, dout, None, out, rows[0], rows[1], arrays)[:3],
        )


class Backward(torch.autograd.Function):
    """The backward pass: the gradients that are wanted, in the accumulation dtype."""

    @staticmethod
    def forward(
        numbers: Any, wanted: list[bool], dout: Any, dlse: Any, out: Any, top: Any, inverse: Any, *arrays: Any
    ) -> Any:
        found = backward(Problem(*arrays, *numbers), out, top, inverse, dout, dlse, wanted)
        return tuple(g for g in found if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.numbers, ctx.wanted, dout, dlse, _, _, _, *arrays = inputs
        ctx.save_for_backward(dout, dlse, *arrays)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        dout, dlse, *arrays = ctx.saved_tensors
        places = [n for n, x in enumerate(arrays[:GRADIENTS]) if x is not None]
        wanted = [n for n, want in enumerate(ctx.wanted) if want]
        first = [dout] if dlse is None else [dout, dlse]

        def gradients(*given: Any) -> Any:
            """Do what the kernel's backward pass does, in ways that can be differentiated."""
            own = dict(zip(places, given[len(first) :], strict=True))

            def attended(*leaves: Any) -> Any:
                filled = own | dict(zip(wanted, leaves, strict=True))
                whole = [filled.get(n, x) for n, x in enumerate(arrays)]
                return formula(Problem(*whole, *ctx.numbers))

            wide = [own[n].to(dout.dtype) for n in wanted]
            (out, lse), pull = torch.func.vjp(attended, *wide)
            live = lse.detach() != -float("inf")  # what arrives at an empty row may be anything
            back = torch.where(live[..., None], given[0].to(out.dtype), 0.0)
            if dlse is None:
                return pull((back, torch.zeros_like(lse)))
            return pull((back, torch.where(live, given[1].to(lse.dtype), 0.0)))

        with as_written(arrays[0]):
            _, pull = torch.func.vjp(gradients, *first, *(arrays[n] for n in places))
            found = iter(pull(tuple(arrived)))
        ddout = next(found)
        ddlse = None if dlse is None else next(found)
        rest: list[Any] = [None] * len(arrays)
        for n in places:
            rest[n] = next(found)
        return None, None, ddout, ddlse, None, None, None, *rest

    @staticmethod
    def vmap(info: Any, in_dims: Any, numbers: Any, wanted: list[bool], *tensors: Any) -> Any:
        def call(*merged: Any) -> Any:
            return Backward.apply(numbers, wanted, *merged)

        return mapped_backward(call, info, in_dims[2:], tensors, wanted)


def mapped_forward(call: Any, info: Any, dims: Any, arrays: Any) -> Any:
    """Run the forward pass with the mapped axis in front of B, as part of it."""
    n, B = info.batch_size, _batch(arrays[0], dims[0])
    whole = [True] * 3 + [False] * (len(arrays) - 3)
    merged = [_in_front(n, B, *one) for one in zip(arrays, dims, whole, strict=True)]
    found = tuple(x.reshape(n, B, *x.shape[1:]) for x in call(*merged))
    return found, (0,) * len(found)


def mapped_backward(call: Any, info: Any, dims: Any, tensors: Any, wanted: list[bool]) -> Any:
    """Run the backward pass likewise; each element has gradients of its own, also of what they share."""
    n, B = info.batch_size, _batch(tensors[0], dims[0])
    arrays = tensors[5:]
    whole = [True] * (5 + 3) + wanted[3:] + [False] * (len(arrays) - GRADIENTS)
    merged = [_in_front(n, B, *one) for one in zip(tensors, dims, whole, strict=True)]
    shared = [_batch(x, d) < B for x, d, want in zip(arrays, dims[5:], wanted, strict=False) if want]
    found = [x.reshape(n, B, *x.shape[1:]) for x in call(*merged)]
    found = [x.sum(1, keepdim=True) if s else x for x, s in zip(found, shared, strict=True)]
    return tuple(found), (0,) * len(found)


def _batch(x: Any, dim: int | None) -> int:
    """Give the size of B of an array, apart from the mapped axis."""
    return int(math.prod(x.shape[:1]) if dim is None else x.movedim(dim, 0).shape[1])


def _in_front(n: int, B: int, x: Any, dim: int | None, whole: bool) -> Any:
    """Make a mapped axis part of B; what stands for all stays so, unless it must be whole."""
    if x is None or (dim is None and x.shape[0] == 1 and not whole):
        return x
    x = x[None] if dim is None else x.movedim(dim, 0)
    return x.expand(n, B, *x.shape[2:]).reshape(n * B, *x.shape[2:])
