"""Eager: the formula itself, over the array-API namespace, for the three libraries.

It writes the scores out, (..., H, L, S), and leaves differentiation to the framework: grad, double
backward, forward mode and vmap all work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import stop_gradient
from attnspan.dropout import keep_bits
from attnspan.errors import describe, refusal
from attnspan.implementations.base import (
    Implementation,
    Visible,
    either,
    poisoned_rows,
    seen_keys,
    seen_true,
    usable,
    visible,
    without,
    zeroed,
)
from attnspan.request import Request
from attnspan.scores import Score
from attnspan.scores.base import in_dtype, per_head
from attnspan.shapes import inner, left_aligned, outer
from attnspan.softmax import softmax_parts

__all__ = ["EAGER", "attend", "look_at"]


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
    xp, sizes = request.xp, request.sizes
    rows = _rows(request, values=True)
    weights = rows.weights
    if request.dropout:
        weights = _dropped(request, weights)
    out = _weighted(xp, weights, rows.values)
    if request.sink is not None:
        out = out * _share_beside_sink(request, rows.lse)[..., None]
    live = rows.lse != -float("inf")
    if not seen_true(live):  # also keeps a NaN gradient of an empty row from going anywhere
        out = xp.where(live[..., None], out, 0.0)
    if rows.poisoned is not None:
        out = xp.where(rows.poisoned[..., None], float("nan"), out)
    out = xp.broadcast_to(out, (*sizes.lead, sizes.L, sizes.E))
    return xp.astype(out, request.q.dtype, copy=False)


def look_at(request: Request, queries: Any = None) -> tuple[Any, Any]:
    """Give (weights before dropout ``(..., H, L, S)``, log-sum-exp ``(..., H, L)``).

    `queries` selects rows: an integer array or a slice.
    """
    rows = _rows(request, queries)
    xp, sizes = request.xp, request.sizes
    weights, lse = rows.weights, rows.lse
    if rows.poisoned is not None:
        weights = xp.where(rows.poisoned[..., None], float("nan"), weights)
        weights = weights if rows.keep is None else xp.where(rows.keep, weights, 0.0)
        lse = xp.where(rows.poisoned, float("nan"), lse)
    shape = (*sizes.lead, weights.shape[-2])
    return xp.broadcast_to(weights, (*shape, sizes.S)), xp.broadcast_to(lse, shape)


def _rows(request: Request, queries: Any = None, *, values: bool = False) -> _Rows:
    """Score and normalise; excluded and non-finite rows are gone before any product."""
    xp, sizes = request.xp, request.sizes
    seen = visible(request)
    q, k = (xp.astype(x, request.accumulation, copy=False) for x in (request.q, request.k))
    live = None if seen.keep is None else seen_keys(seen.keep, sizes.G)
    q, bad_q = without(xp, zeroed(xp, q, seen.sees))
    k, bad_k = without(xp, zeroed(xp, k, live))
    poisoned = either(bad_q, poisoned_rows(seen.keep, bad_k, sizes.H))
    v = None
    if values:
        v = xp.astype(request.v, request.accumulation, copy=False)
        v, bad_v = without(xp, zeroed(xp, v, live))
        poisoned = either(poisoned, poisoned_rows(seen.keep, bad_v, sizes.H))
    if sizes.S == 0:
        poisoned = None
    queries_alive = usable(seen.sees, bad_q)
    if isinstance(request.score, Score):
        form = request.score.lower(q, k, queries_alive, sizes)
        if queries is not None:
            form = form.rows(queries)
        limits = xp.finfo(request.accumulation)
        s = xp.clip(form.scores(), limits.min, limits.max)  # finite inputs have finite scores
    else:
        q = _filled(xp, q, queries_alive)
        k = per_head(_filled(xp, k, usable(live, bad_k)), sizes.H)
        s = _called(request, q if queries is None else q[..., queries, :], k)
    if queries is not None:
        seen = visible(request, queries)
        poisoned = None if poisoned is None else _picked(poisoned, queries)
    weights, lse = softmax_parts(_capped(request, s, seen), seen.keep)
    return _Rows(weights, lse, seen.keep, v, poisoned)


def _picked(flags: Any, queries: Any) -> Any:
    """Select rows of flags ``(..., L|1)``."""
    return flags if flags.shape[-1] == 1 else flags[..., queries]


def _filled(xp: Any, x: Any, live: Any) -> Any:
    """Put a live row of the same head where a row is not live.

    A function may not take the zeros that stand there: 0 / |0| has a NaN gradient, which would
    reach the live rows of the other side.
    """
    if live is None or seen_true(live) or not x.shape[-2]:
        return x
    lead = np.broadcast_shapes(x.shape[:-1], live.shape)
    x, live = xp.broadcast_to(x, (*lead, x.shape[-1])), xp.broadcast_to(live, lead)
    first = xp.argmax(xp.astype(live, xp.int32), axis=-1, keepdims=True)[..., None]
    first = xp.broadcast_to(first, (*lead[:-1], 1, x.shape[-1]))
    return xp.where(live[..., None], x, xp.take_along_axis(stop_gradient(x), first, axis=-2))


def _capped(request: Request, s: Any, seen: Visible) -> Any:
    """Softcap the scores, then add the bias."""
    xp = request.xp
    if request.softcap is not None:
        cap = in_dtype(request.softcap, s)
        s = cap * xp.tanh(s / cap)
    return s if seen.bias is None else s + seen.bias


def _called(request: Request, q: Any, k: Any) -> Any:
    """Call a score function in the caller's own number of axes."""
    sizes, ndim = request.sizes, request.sizes.ndim
    s = request.score(outer(q, ndim, 2), outer(k, ndim, 2))
    wanted = (*sizes.lead[: max(ndim - 2, 0)], q.shape[-2], sizes.S)
    shape = tuple(getattr(s, "shape", ()))
    fits = len(shape) == len(wanted) and shape[-2:] == wanted[-2:]
    if not fits or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        raise refusal("score", f"a function that returned {describe(s)}", f"scores {wanted}")
    s = request.xp.broadcast_to(s, wanted)
    return request.xp.astype(inner(s, ndim), request.accumulation, copy=False)


def _weighted(xp: Any, weights: Any, v: Any) -> Any:
    """Weights times values where several query heads share a value head: values are not copied."""
    H, G = weights.shape[-3], v.shape[-3]
    if H == G:
        return xp.matmul(weights, v)
    lead, L = weights.shape[:-3], weights.shape[-2]
    out = xp.matmul(weights.reshape((*lead, G, H // G * L, weights.shape[-1])), v)
    return out.reshape((*out.shape[:-3], H, L, v.shape[-1]))


def _dropped(request: Request, weights: Any) -> Any:
    """Drop weights by the counter's bits and scale the rest."""
    xp, sizes, p = request.xp, request.sizes, request.dropout
    on = {"device": request.q.device} if request.kind == "torch" else {}
    keep = keep_bits((request.low, request.high), xp.arange(sizes.L, **on), sizes.lead, sizes.S, p)
    return xp.where(keep, weights / (1 - p), 0.0)


def _share_beside_sink(request: Request, lse: Any) -> Any:
    """Give the keys' share of the denominator, σ(lse - sink), precise where it is tiny."""
    xp = request.xp
    sink = in_dtype(request.sink, lse)
    if getattr(sink, "shape", ()):
        sink = left_aligned(sink, len(lse.shape) + 1, "sink")[..., 0]
    empty = lse == -float("inf")
    lse = xp.where(empty, 0.0, lse)
    limits = xp.finfo(lse.dtype)
    sink = xp.clip(sink + xp.zeros_like(lse), limits.min, limits.max)  # an infinite sink has a meaning too
    top = stop_gradient(xp.maximum(lse, sink))
    keys = xp.exp(lse - top)
    return xp.where(empty, 0.0, keys / (keys + xp.exp(sink - top)))


EAGER = Implementation("eager", lambda request: [], attend)
