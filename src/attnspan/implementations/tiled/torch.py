"""The walk's derivative in PyTorch: recomputed tile by tile from the log-sum-exp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnspan.arrays import as_written, is_torch_compiling, is_transformed
from attnspan.implementations.tiled import walk
from attnspan.implementations.tiled.problem import Back, Problem, one_pair
from attnspan.implementations.tiled.walk import statistics
from attnspan.request import Request

__all__ = ["attend", "objection", "statistics"]


def attend(problem: Problem, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Give (out, log-sum-exp), differentiable as often as one likes."""
    inside = not is_torch_compiling() and torch._C._functorch.maybe_current_level() is not None
    leaves = (problem.v, *problem.scoring.leaves())
    if not torch.is_grad_enabled() or not (inside or any(x.requires_grad for x in leaves)):
        return walk.attend(problem, tile)
    arrays = problem.in_order()
    empty = problem.map_arrays(lambda x: torch.empty(0, dtype=x.dtype))  # holds places, and no tensor
    out, top, log_total = _Tiled.apply(empty, tile, *arrays)
    return out, top + log_total


class _Tiled(torch.autograd.Function):
    """Attention over tiles. What backward does is differentiable itself: no second formula is needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(empty: Problem, tile: tuple[int, int], *arrays: Any) -> Any:
        return walk.settled_rows(_filled(empty, arrays), tile)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.empty, ctx.tile, *arrays = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*arrays, *output)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        *arrays, out, top, log_total = ctx.saved_tensors
        problem = _filled(ctx.empty, arrays)
        # The scoring's arrays come first, then the values; of the rest none has a gradient.
        scoring = problem.scoring.in_order()
        leaves = [n for n, x in enumerate(scoring) if x.is_floating_point()]
        asked = ctx.needs_input_grad[2:]
        wanted = [bool(asked[n]) for n in leaves]
        with as_written(out):
            back = Back.of(out, top, log_total, arrived[0], arrived[2])
            vjp = functools.partial(_vjp, wanted)
            grads, dv = walk.backward(problem, ctx.tile, back, vjp, wanted)
        found: list[Any] = [None] * len(arrays)
        for n, g in zip(leaves, grads, strict=True):
            found[n] = g
        found[len(scoring)] = dv
        return None, None, *found


def _filled(empty: Problem, arrays: Any) -> Problem:
    rest = iter(arrays)
    return empty.map_arrays(lambda _: next(rest))


def _vjp(wanted: list[bool], f: Callable[[Any], Any], leaves: list[Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Give f(leaves) and its pullback to those that are wanted.

    A derivative of the pullback itself is asked for only where a graph is made.
    """
    if not any(wanted):
        return f(leaves), lambda ds: [None] * len(leaves)

    def merged(some: Any) -> list[Any]:
        rest = iter(some)
        return [next(rest) if want else x for want, x in zip(wanted, leaves, strict=True)]

    def spread(grads: Any) -> list[Any]:
        rest = iter(grads)
        return [next(rest) if want else None for want in wanted]

    own = [x for want, x in zip(wanted, leaves, strict=True) if want]
    inside = is_torch_compiling() or torch._C._functorch.maybe_current_level() is not None
    if inside or torch.is_grad_enabled():
        s, pull = torch.func.vjp(lambda *x: f(merged(x)), *own)
        return s, lambda ds: spread(pull(ds))
    own = [x.detach().requires_grad_() for x in own]
    with torch.enable_grad():
        s = f(merged(own))
    if not s.requires_grad:
        return s, lambda ds: spread(torch.zeros_like(x) for x in own)
    return s.detach(), lambda ds: spread(torch.autograd.grad(s, own, ds, materialize_grads=True))


def objection(request: Request) -> str | None:
    """Say why a score function cannot be called in tiles: an array it was not given has a gradient."""

    def own(x: Any) -> Any:
        return x.detach() if isinstance(x, torch.Tensor) else x

    try:
        s = one_pair(request, own).called()
    except Exception:  # it will say so itself when it is called for good
        return None
    if isinstance(s, torch.Tensor) and is_transformed(s):
        return "inside torch.func's transforms it may close over what they trace"
    if isinstance(s, torch.Tensor) and s.requires_grad:
        return "it closes over an array that has a gradient, which would be lost"
    return None
