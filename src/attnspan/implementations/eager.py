"""Eager: the formula itself, over the array-API namespace, for the three libraries.

It writes the scores out, (..., H, L, S), and leaves differentiation to the framework: grad, double
backward, forward mode and vmap all work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from attnspan.arrays import arange
from attnspan.dropout import keep_bits
from attnspan.implementations.base import (
    Implementation,
    finished,
    poisoned_rows,
    prepared,
    scored,
    seen_keys,
    visible,
    weighted,
)
from attnspan.implementations.bounded import bound_with_bias, broadcast, prepared_in_bounds
from attnspan.request import Request
from attnspan.scores.base import of_heads
from attnspan.softmax import softmax_parts
from attnspan.statistics import Statistics, statistics_of

__all__ = ["EAGER", "attend", "look_at", "weights_of"]


@dataclass(frozen=True)
class _Rows:
    """The softmax of some queries: what both the output and the looking need."""

    weights: Any
    lse: Any
    keep: Any
    values: Any
    poisoned: Any


def attend(request: Request) -> Any:
    """Compute the output ``(B, ..., H, L, E)``: softmax of the visible scores, times the values."""
    rows = _rows(request)
    weights = rows.weights
    if request.dropout:
        weights = _dropped(request, weights)
    return finished(request, weighted(request.xp, weights, rows.values), rows.lse, rows.poisoned)


def look_at(request: Request) -> tuple[Any, Statistics]:
    """Give (log-sum-exp, statistics), each ``(..., H, L)``; the first is differentiable."""
    weights, lse = weights_of(request)
    return lse, statistics_of(weights)


def weights_of(request: Request, queries: Any = None, heads: Any = None) -> tuple[Any, Any]:
    """Give (weights before dropout ``(..., H, L, S)``, log-sum-exp ``(..., H, L)``).

    `queries` and `heads`, integer arrays, select: only these are computed.
    """
    request = replace(request, v=request.v[..., :0])
    rows = _rows(request) if queries is None and heads is None else _chosen(request, queries, heads)
    xp, sizes = request.xp, request.sizes
    weights, lse = rows.weights, rows.lse
    if rows.poisoned is not None:
        weights = xp.where(rows.poisoned[..., None], float("nan"), weights)
        weights = weights if rows.keep is None else xp.where(rows.keep, weights, 0.0)
        lse = xp.where(rows.poisoned, float("nan"), lse)
    lead = sizes.lead if heads is None else (*sizes.lead[:-1], heads.shape[0])
    shape = (*lead, weights.shape[-2])
    return xp.broadcast_to(weights, (*shape, sizes.S)), xp.broadcast_to(lse, shape)


def _rows(request: Request) -> _Rows:
    """Score and normalise; excluded and non-finite rows are gone before any product."""
    seen, sizes = visible(request), request.sizes
    keep = seen.keep
    live = None if keep is None else seen_keys(keep, sizes.G)
    ready = prepared(request, seen.sees, live, lambda bad: poisoned_rows(keep, bad, sizes.H))
    weights, lse = softmax_parts(scored(ready.form, request.softcap, seen.bias), keep)
    return _Rows(weights, lse, keep, ready.v, ready.poisoned)


def _chosen(request: Request, queries: Any, heads: Any) -> _Rows:
    """Do the same for some queries and heads: nothing of the size of all pairs is written out."""
    H = request.sizes.H
    request = broadcast(request)
    bound, _ = bound_with_bias(request)
    ready = prepared_in_bounds(request, bound)
    seen, form, poisoned = visible(request, queries), ready.form, ready.poisoned
    keep, bias = seen.keep, seen.bias
    if queries is not None:
        form = form.rows(queries)
        if poisoned is not None and poisoned.shape[-1] > 1:
            poisoned = poisoned[..., queries]
    if heads is not None and form.HEADS:
        form = form.heads(heads, H)
        keep, bias = of_heads(keep, -3, heads, H), of_heads(bias, -3, heads, H)
        poisoned = of_heads(poisoned, -2, heads, H)
    weights, lse = softmax_parts(scored(form, request.softcap, bias), keep)
    if heads is not None and not form.HEADS:  # a function was made for all heads
        weights, lse = of_heads(weights, -3, heads, H), of_heads(lse, -2, heads, H)
        keep, poisoned = of_heads(keep, -3, heads, H), of_heads(poisoned, -2, heads, H)
    return _Rows(weights, lse, keep, ready.v, poisoned)


def _dropped(request: Request, weights: Any) -> Any:
    """Drop weights by the counter's bits and scale the rest."""
    xp, sizes, p = request.xp, request.sizes, request.dropout
    keep = keep_bits((request.low, request.high), arange(sizes.L, request.q), sizes.lead, sizes.S, p)
    return xp.where(keep, weights / (1 - p), 0.0)


def intermediate(request: Request) -> int:
    """Give the bytes of all scores, or of the activations they are summed from."""
    sizes = request.sizes
    pairs = math.prod(sizes.lead) * sizes.L * sizes.S
    return pairs * request.score.width(sizes) * max(int(request.q.dtype.itemsize), 4)


EAGER = Implementation("eager", lambda request: [], attend, intermediate, look_at)
