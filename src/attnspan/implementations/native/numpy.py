"""The kernel for NumPy: forward alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.implementations.native.kernel import Described, checked, run_forward
from attnspan.implementations.native.problem import Problem
from attnspan.request import Request
from attnspan.statistics import Statistics

__all__ = ["attend", "attend_and_look", "reasons_against"]


def reasons_against(request: Request) -> list[str]:
    """Say what stands against NumPy's arrays: nothing."""
    return []


def attend(problem: Problem) -> tuple[Any, Any]:
    """Give (out, log-sum-exp) in the accumulation dtype."""
    out, lse, _ = _run(problem, looks=False)
    return out, lse


def attend_and_look(problem: Problem) -> tuple[Any, Any, Statistics]:
    """Give (out, log-sum-exp, statistics)."""
    out, lse, stats = _run(problem, looks=True)
    entropy, max_weight, jacobian_norm = stats
    effective = np.where(lse == -np.inf, 0.0, np.exp(entropy)).astype(lse.dtype)
    return out, lse, Statistics(entropy, effective, max_weight, jacobian_norm)


def _run(problem: Problem, looks: bool) -> tuple[Any, Any, list[Any]]:
    walkable = problem.map_arrays(_walkable)
    (B, H, L, _), E = problem.q.shape, problem.v.shape[-1]
    out = np.empty((B, H, L, E), problem.accumulation)
    lse = np.empty((B, H, L), problem.accumulation)
    stats = [np.empty_like(lse) for _ in range(3)] if looks else []
    record = checked(walkable, _described)
    inputs = [_address(x) for x in (walkable.q, walkable.k, walkable.v)]
    run_forward(
        record, [*inputs, _address(out), _address(lse), 0, 0, *(map(_address, stats) if looks else (0, 0, 0))]
    )
    return out, lse, stats


def _walkable(x: np.ndarray) -> np.ndarray:
    """Copy an array whose last axis is not dense, or whose strides or address don't fit its elements."""
    fits = x.flags.aligned and all(step % x.itemsize == 0 for step in x.strides)
    return x if fits and (x.shape[-1] <= 1 or x.strides[-1] == x.itemsize) else x.copy()


def _described(x: np.ndarray) -> Described:
    return _address(x), x.shape, tuple(step // x.itemsize for step in x.strides)


def _address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])
