"""The kernel for PyTorch on the CPU, and its derivatives.

Outside compilers an autograd.Function hands over addresses; what a compiler or an export traces is a
library operator. Second derivatives are those of the formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnspan.arrays import as_written, is_torch_compiling
from attnspan.implementations.native.kernel import Described, checked, run_backward, run_forward
from attnspan.implementations.native.problem import Problem, formula
from attnspan.request import Request
from attnspan.statistics import Statistics

__all__ = ["attend", "attend_and_look", "backward", "forward", "reasons_against"]

_GRADIENTS = ("q", "k", "v", "key_bias", "bias", "slopes")
"""The arrays of a problem that have one, in the order of its fields; they come first among them."""


def reasons_against(request: Request) -> list[str]:
    """Say what stands against PyTorch's tensors."""
    if any(isinstance(x, torch.Tensor) and x.layout != torch.strided for _, x in request.arrays()):
        return ["it takes dense tensors"]
    return []


def attend(problem: Problem) -> tuple[Any, Any]:
    """Give (out, log-sum-exp) in the accumulation dtype, differentiable in reverse as often as one likes."""
    if is_torch_compiling():
        from attnspan.implementations.native.torch_ops import traced

        return traced(problem)
    if not _is_differentiated(problem):
        out, lse, *_ = forward(problem)
        return out, lse
    out, lse, _, _ = _Native.apply(_places(problem), *problem.in_order())
    return out, lse


def attend_and_look(problem: Problem) -> tuple[Any, Any, Statistics]:
    """Give (out, log-sum-exp, statistics); the last are not differentiable."""
    if is_torch_compiling():
        from attnspan.implementations.native.torch_ops import traced, traced_statistics

        return (*traced(problem), _statistics(*traced_statistics(problem)))
    if _is_differentiated(problem):
        out, lse, _, _, *stats = _Looking.apply(_places(problem), *problem.in_order())
    else:
        out, lse, _, _, *stats = forward(problem, looks=True)
    return out, lse, _statistics(*stats)


def _statistics(entropy: Any, max_weight: Any, jacobian_norm: Any) -> Statistics:
    effective = torch.where(max_weight == 0, 0.0, entropy.exp())
    return Statistics(entropy, effective, max_weight, jacobian_norm)


def _is_differentiated(problem: Problem) -> bool:
    if not torch.is_grad_enabled():
        return False
    inside = torch._C._functorch.maybe_current_level() is not None
    return inside or any(x.requires_grad for x in problem.in_order())


def forward(problem: Problem, looks: bool = False) -> tuple[Any, ...]:
    """Run the forward pass: out, lse, top, inverse, and with `looks` entropy, max_weight, jacobian_norm."""
    problem = problem.map_arrays(_walkable)
    (B, H, L, _), E = problem.q.shape, problem.v.shape[-1]
    dtype = problem.accumulation
    out = torch.empty((B, H, L, E), dtype=dtype)
    rows = [torch.empty((B, H, L), dtype=dtype) for _ in range(6 if looks else 3)]
    addresses = [x.data_ptr() for x in (problem.q, problem.k, problem.v, out, *rows)]
    run_forward(checked(problem, _described), addresses + [0] * (10 - len(addresses)))
    return out, *rows


def backward(
    problem: Problem, out: Any, top: Any, inverse: Any, dout: Any, dlse: Any, wanted: list[bool]
) -> list[Any]:
    """Run the backward pass: the gradients of q, k, v, key_bias, bias and slopes, None where not wanted.

    They come in the accumulation dtype, and in the shape of what they belong to.
    """
    problem = problem.map_arrays(_walkable)
    p, dtype = problem, problem.accumulation
    (B, H, L, _), S = p.q.shape, p.k.shape[-2]
    dout = dout.resolve_neg().to(dtype)
    dlse = None if dlse is None else dlse.resolve_neg().to(dtype)[..., None]
    want = dict(zip(_GRADIENTS, wanted, strict=True))
    one_row = p.bias is not None and p.bias.shape[-2] == 1  # summed over queries as a key bias is
    empty = lambda x: torch.empty(x.shape, dtype=dtype)  # noqa: E731
    zeros = lambda shape: torch.zeros(shape, dtype=dtype)  # noqa: E731
    dq = dk = dv = dkeys = dbias = dslopes = None
    if want["q"] or want["k"]:
        dq, dk = empty(p.q), zeros(p.k.shape)
    if want["v"]:
        dv = zeros(p.v.shape)
    if want["key_bias"] or (want["bias"] and one_row):
        dkeys = zeros((B, H, 1, S))
    if want["bias"] and not one_row:
        dbias = zeros(p.bias.shape)
    if want["slopes"]:
        dslopes = torch.empty((B, H, L, 1), dtype=dtype)
    found = [0 if x is None else x.data_ptr() for x in (dq, dk, dv, dkeys, dbias, dslopes)]
    kept = [x.data_ptr() for x in (p.q, p.k, p.v, out, top, inverse)]
    back = [_described(dout), None if dlse is None else _described(dlse)]
    run_backward(checked(p, _described), [*kept, *back, *found])
    keys = lambda x: None if dkeys is None else dkeys.sum_to_size(x.shape)  # noqa: E731
    return [
        dq if want["q"] else None,
        dk if want["k"] else None,
        dv,
        keys(p.key_bias) if want["key_bias"] else None,
        (keys(p.bias) if one_row else dbias) if want["bias"] else None,
        None if dslopes is None else dslopes.sum_to_size(p.slopes.shape),
    ]


def second(problem: Problem, dout: Any, dlse: Any, wanted: list[bool]) -> list[Any]:
    """Give the same gradients by the formula, differentiable themselves."""
    inputs = [getattr(problem, name) for name in _GRADIENTS]
    own = [x.view_as(x) if want else x for x, want in zip(inputs, wanted, strict=True)]
    out, lse = formula(replace(problem, **dict(zip(_GRADIENTS, own, strict=True))))
    live = lse.detach() != -float("inf")  # what arrives at an empty row may be anything
    dout = torch.where(live[..., None], dout, 0.0)
    dlse = torch.zeros_like(lse) if dlse is None else torch.where(live, dlse, 0.0)
    lse = torch.where(live, lse, 0.0)
    leaves = [x for x, want in zip(own, wanted, strict=True) if want]
    grads = iter(
        torch.autograd.grad((out, lse), leaves, (dout, dlse), create_graph=True, materialize_grads=True)
    )
    return [next(grads) if want else None for want in wanted]


class _Native(torch.autograd.Function):
    """The kernel; its arguments are the places of a problem's arrays, and the arrays."""

    looks = False

    @classmethod
    def forward(cls, places: Problem, *arrays: Any) -> Any:
        return forward(_filled(places, arrays), cls.looks)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.places, *arrays = inputs
        out, _, top, inverse, *stats = output
        ctx.mark_non_differentiable(top, inverse, *stats)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, out, top, inverse)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        *arrays, out, top, inverse = ctx.saved_tensors
        problem = _filled(ctx.places, arrays)
        found: list[Any] = [None] * len(arrays)
        if dout is None and dlse is None:
            return None, *found
        dout = torch.zeros_like(out) if dout is None else dout
        given = [name for name in _GRADIENTS if getattr(problem, name) is not None]
        asked = dict(zip(given, ctx.needs_input_grad[1:], strict=False))
        wanted = [asked.get(name, False) for name in _GRADIENTS]
        with as_written(out):
            if torch.is_grad_enabled():
                grads = second(problem, dout, dlse, wanted)
            else:
                grads = _Back.apply(ctx.places, wanted, dout, dlse, out, top, inverse, *arrays)
        by_name = dict(zip(_GRADIENTS, grads, strict=True))
        for n, name in enumerate(given):
            g = by_name[name]
            found[n] = g if g is None else g.to(arrays[n].dtype)
        return None, *found

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, places: Problem, *arrays: Any) -> Any:
        merged, restore = _in_front(info.batch_size, in_dims[1:], arrays)
        found = cls.apply(places, *merged)
        return tuple(map(restore, found)), (0,) * len(found)


class _Looking(_Native):
    """The kernel with statistics."""

    looks = True


class _Back(torch.autograd.Function):
    """The backward pass as an operation of its own, for vmap: it is never differentiated itself."""

    @staticmethod
    def forward(places: Problem, wanted: list[bool], dout: Any, dlse: Any, out: Any, top: Any, inverse: Any,
                *arrays: Any) -> Any:  # fmt: skip
        return tuple(backward(_filled(places, arrays), out, top, inverse, dout, dlse, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, places: Problem, wanted: list[bool], *tensors: Any) -> Any:
        # Each element of the batch has gradients of its own, also of what they share.
        whole = [None if x is None else x if d is not None else x.expand(info.batch_size, *x.shape)
                 for x, d in zip(tensors, in_dims[2:], strict=True)]  # fmt: skip
        dims = [0 if d is None else d for d in in_dims[2:]]
        merged, restore = _in_front(info.batch_size, dims, whole, always=True)
        found = _Back.apply(places, wanted, *merged)
        return tuple(None if g is None else restore(g) for g in found), tuple(
            None if g is None else 0 for g in found
        )


def _in_front(n: int, dims: Any, arrays: Any, always: bool = False) -> tuple[list[Any], Any]:
    """Make a mapped axis part of B; gives what undoes it."""
    moved = [x if d is None or x is None else x.movedim(d, 0) for x, d in zip(arrays, dims, strict=True)]
    B = max(x.shape[0 if d is None else 1] for x, d in zip(moved, dims, strict=True) if x is not None)
    merged = []
    for x, d in zip(moved, dims, strict=True):
        if x is None or (d is None and x.shape[0] == 1 and not always):
            merged.append(x)
            continue
        x = x if d is not None else x[None]
        merged.append(x.expand(n, B, *x.shape[2:]).reshape(n * B, *x.shape[2:]))
    return merged, lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:])


def _places(problem: Problem) -> Problem:
    """Hold the places of a problem's arrays, and no array."""
    return problem.map_arrays(lambda x: torch.empty(0, dtype=x.dtype))


def _filled(places: Problem, arrays: Any) -> Problem:
    rest = iter(arrays)
    return places.map_arrays(lambda _: next(rest))


def _walkable(x: Any) -> Any:
    x = x.detach().resolve_neg()
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _described(x: Any) -> Described:
    return x.data_ptr(), tuple(x.shape), x.stride()
