"""Spans: for each query a few half-open intervals of keys, and their algebra.

Bound form: `start`, `stop` int32 `(B|1, H|1, L|1, R)`, sorted, disjoint, not touching; unused
places are `[S, S)`. R follows from the expression alone, so shapes are static under jit:

=========  ===========================  =============================================
``a & b``  R(a) + R(b) - 1              two sorted disjoint lists cross at most so often
``a | b``  R(a) + R(b)
``~a``     R(a) + 1                     within [0, S)
=========  ===========================  =============================================

All of it is sorting: in disjoint intervals the n-th smallest start belongs to the n-th smallest
stop, so starts and stops may be sorted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import look, xp_of
from attnspan.values import Value

__all__ = ["Spans", "complement", "cover", "intersect", "make_spans", "trimmed", "union"]


@dataclass(frozen=True, eq=False, repr=False)
class Spans(Value):
    """Which keys each query sees, as intervals in the bound form (see the module's text).

    Attributes
    ----------
    start, stop : array
        int32 `(B|1, H|1, L|1, R)`.
    """

    start: Any
    stop: Any

    @property
    def R(self) -> int:
        """Intervals kept per query."""
        return int(self.start.shape[-1])


def make_spans(start: Any, stop: Any, S: Any) -> Spans:
    """Bring raw intervals, disjoint or empty, to the bound form: clip, mark the unused, sort."""
    xp = xp_of(start)
    start, stop = xp.broadcast_arrays(start, stop)
    return _marked(xp.where(start < 0, 0, start), xp.where(stop > S, S, stop), S)


def _marked(start: Any, stop: Any, S: Any) -> Spans:
    """Turn empty intervals into [S, S) and sort."""
    xp = xp_of(start)
    used = start < stop
    start, stop = xp.where(used, start, S), xp.where(used, stop, S)
    if start.shape[-1] > 1:
        start, stop = xp.sort(start, axis=-1), xp.sort(stop, axis=-1)
    return Spans(xp.astype(start, xp.int32, copy=False), xp.astype(stop, xp.int32, copy=False))


def intersect(a: Spans, b: Spans, S: Any) -> Spans:
    """Intersect: of all pairs of intervals at most R(a) + R(b) - 1 are not empty."""
    xp = xp_of(a.start)
    start = xp.maximum(a.start[..., :, None], b.start[..., None, :])
    stop = xp.minimum(a.stop[..., :, None], b.stop[..., None, :])
    flat = (*start.shape[:-2], start.shape[-2] * start.shape[-1])
    both = _marked(start.reshape(flat), stop.reshape(flat), S)
    R = a.R + b.R - 1
    return Spans(both.start[..., :R], both.stop[..., :R])


def union(a: Spans, b: Spans, S: Any) -> Spans:
    """Unite: with starts and stops sorted apart, a gap lies where stop n < start n+1."""
    xp = xp_of(a.start)
    shape = np.broadcast_shapes(a.start.shape[:-1], b.start.shape[:-1])

    def merged(x: Any, y: Any) -> Any:
        parts = [xp.broadcast_to(p, (*shape, p.shape[-1])) for p in (x, y)]
        return xp.sort(xp.concat(parts, axis=-1), axis=-1)

    start, stop = merged(a.start, b.start), merged(a.stop, b.stop)
    gap = stop[..., :-1] < start[..., 1:]
    edge = xp.ones_like(gap[..., :1])
    opens, closes = xp.concat([edge, gap], axis=-1), xp.concat([gap, edge], axis=-1)
    start, stop = xp.where(opens, start, S), xp.where(closes, stop, S)
    return Spans(xp.sort(start, axis=-1), xp.sort(stop, axis=-1))


def complement(a: Spans, S: Any) -> Spans:
    """Complement within [0, S): the gaps before, between and behind the intervals."""
    xp = xp_of(a.start)
    zero = xp.zeros_like(a.start[..., :1])
    start = xp.concat([zero, a.stop], axis=-1)
    stop = xp.concat([a.start, zero + S], axis=-1)
    return make_spans(start, stop, S)


def cover(a: Spans, k: Any) -> Any:
    """Tell for each query and each key position in `k` (..., 1, S) whether an interval holds it."""
    seen = (k >= a.start[..., 0:1]) & (k < a.stop[..., 0:1])
    for r in range(1, a.R):
        seen = seen | ((k >= a.start[..., r : r + 1]) & (k < a.stop[..., r : r + 1]))
    return seen


def trimmed(a: Spans) -> Spans:
    """Drop the places that no query uses, where the values are seen."""
    if a.R == 1:
        return a
    start, stop = look(a.start), look(a.stop)
    if start is None or stop is None:
        return a
    R = max(1, int((start < stop).sum(axis=-1).max(initial=0)))
    return Spans(a.start[..., :R], a.stop[..., :R])
