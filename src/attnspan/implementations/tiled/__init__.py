"""Tiled: any score and any mask at O(L · tile) memory, forward and backward, in the three libraries.

An online softmax over tiles of keys [1]_: no array of all scores stands in memory, and the backward pass
makes each tile's scores once more. Tiles without a visible pair are skipped where that can be known.

References
----------
.. [1] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3; Rabe and
   Staats, "Self-attention does not need O(n²) memory", 2021; Dao et al., "FlashAttention", 2022,
   algorithms 1 and 4.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

from attnspan.arrays import constant, device_of, has_tangent, is_array, is_torch_compiling, stop_gradient
from attnspan.implementations.base import Implementation, finished
from attnspan.implementations.bounded import bound_with_bias, broadcast, prepared_in_bounds
from attnspan.implementations.tiled.problem import Problem, Scoring
from attnspan.request import Request
from attnspan.scores.function import Function
from attnspan.statistics import Statistics

__all__ = ["TILED"]

TILE = (256, 512)
"""Queries and keys of one tile; fewer queries where a score needs more than one number a pair.

A constant, so that what else is in the batch moves nothing.
"""

_LEAST_ROWS = 16
_UNROLLED = 16  # tiles of keys that torch.compile writes out, each a part of its graph


def reasons_against(request: Request) -> list[str]:
    """Say what a walk over tiles cannot do."""
    reasons = []
    sizes = request.sizes
    if not sizes.S or not sizes.L:
        reasons.append("there is nothing to attend to" if sizes.L else "there is no query")
    if any(has_tangent(x) for _, x in request.arrays()):
        reasons.append("it has no derivative under forward mode")
    for name, x in request.score.arrays():
        if "complex" in str(x.dtype):
            reasons.append(f"the score's array {name} is complex")
    if isinstance(request.score, Function) and not reasons:
        found = _loops(request.kind).objection(request)
        if found:
            way_out = "bind the arrays it learns from by name, functools.partial(fn, W=W)"
            reasons.append(f"the score {request.score!r}: {found}; {way_out}")
    return reasons


def attend(request: Request) -> Any:
    """Compute the output ``(B, ..., H, L, E)``."""
    problem, poisoned = _problem(request)
    out, lse = _loops(request.kind).attend(problem, _tile(request))
    return finished(request, out, lse, poisoned)


def look_at(request: Request) -> tuple[Any, Statistics]:
    """Give (log-sum-exp, statistics), each ``(..., H, L)``; the first, differentiable, walks alone."""
    xp, loops = request.xp, _loops(request.kind)
    problem, poisoned = _problem(replace(request, v=request.v[..., :0], dropout=0.0))
    tile = _tile(request)
    _, lse = loops.attend(problem, tile)

    stats = Statistics(*loops.statistics(problem.map_arrays(stop_gradient), tile))
    if poisoned is not None:
        lse = xp.where(poisoned, float("nan"), lse)
        stats = stats.map_arrays(lambda x: xp.where(poisoned, float("nan"), x))
    return lse, stats


def _problem(request: Request) -> tuple[Problem, Any]:
    """Bring a request to what tiles are cut from: the problem, and which queries are poisoned."""
    xp = request.xp
    request = broadcast(request)
    bound, bias = bound_with_bias(request)
    ready = prepared_in_bounds(request, bound)
    softcap = request.softcap
    if is_array(softcap):
        softcap = constant(softcap, xp, device_of(request.q))
    scoring = Scoring(ready.form, softcap, bias)
    low, high = request.low, request.high
    if request.kind == "jax" and request.dropout:  # a number would be compiled in
        low, high = (xp.asarray(word, dtype=xp.uint32) for word in (low, high))
    problem = Problem(scoring, ready.v, bound, low, high, request.dropout, request.sizes)
    return problem, ready.poisoned


def intermediate(request: Request) -> int:
    """Give the bytes of the scores of a tile of all heads, or of the activations they are summed from."""
    sizes, (rows, columns) = request.sizes, _tile(request)
    pairs = math.prod(sizes.lead) * min(rows, sizes.L) * min(columns, sizes.S)
    return pairs * request.score.width(sizes) * max(int(request.q.dtype.itemsize), 4)


def _tile(request: Request) -> tuple[int, int]:
    rows, columns = TILE
    if is_torch_compiling():
        return request.sizes.L, max(columns, -(-request.sizes.S // _UNROLLED))
    return max(min(rows, _LEAST_ROWS), rows // max(1, request.score.width(request.sizes))), columns


def _loops(kind: str) -> ModuleType:
    """Give the loops of a library; each imports its own."""
    if kind == "torch":
        from attnspan.implementations.tiled import torch

        return torch
    if kind == "jax":
        from attnspan.implementations.tiled import jax

        return jax
    from attnspan.implementations.tiled import walk

    return walk


TILED = Implementation("tiled", reasons_against, attend, intermediate, look_at)
