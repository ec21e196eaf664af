"""The walk's derivative in PyTorch: recomputed tile by tile from the log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnspan.arrays import is_torch_compiling, is_transformed
from attnspan.implementations.tiled import walk
from attnspan.implementations.tiled.problem import Back, Problem, one_pair
from attnspan.implementations.tiled.walk import statistics
from attnspan.request import Request

__all__ = ["attend", "closes_over_traced", "statistics"]


def attend(problem: Problem, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Give (out, log-sum-exp), differentiable as often as one likes."""
    leaves = problem.scoring.leaves()
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (problem.v, *leaves)):
        return walk.attend(problem, tile)
    return _Tiled.apply(problem, tile, problem.v, *leaves)


class _Tiled(torch.autograd.Function):
    """Attention over tiles. What backward does is differentiable itself: no second formula is needed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(problem: Problem, tile: tuple[int, int], v: Any, *leaves: Any) -> Any:
        return walk.attend(problem.of(v, leaves), tile)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.problem, ctx.tile, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        v, *leaves, out, lse = ctx.saved_tensors
        problem = ctx.problem.of(v, leaves)
        grads, dv = walk.backward(problem, ctx.tile, Back.of(out, lse, *gradients), _vjp)
        return None, None, dv, *grads


def _vjp(f: Callable[[Any], Any], leaves: list[Any]) -> tuple[Any, Callable[[Any], Any]]:
    """Give f(leaves) and its pullback; a derivative of this one is asked for only where a graph is."""
    if (
        torch.is_grad_enabled()
        or is_torch_compiling()
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return torch.func.vjp(lambda *x: f(x), *leaves)
    own = [x.detach().requires_grad_() for x in leaves]
    with torch.enable_grad():
        s = f(own)
    if not s.requires_grad:
        return s, lambda ds: [torch.zeros_like(x) for x in leaves]

    def pull(ds: Any) -> Any:
        return torch.autograd.grad(s, own, ds, materialize_grads=True)

    return s.detach(), pull


def closes_over_traced(request: Request) -> bool:
    """Tell whether a score function uses tensors it was not given, whose gradients would be lost."""
    like = {"dtype": request.accumulation, "device": request.q.device}
    form = one_pair(request, lambda shape: torch.zeros(shape, **like))
    s = form.called()
    return isinstance(s, torch.Tensor) and bool(s.requires_grad or is_transformed(s))
