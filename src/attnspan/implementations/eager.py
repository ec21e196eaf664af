"""Eager: the formula itself, over the array-API namespace, for the three libraries.

It writes the scores out, (..., H, L, S), and leaves differentiation to the framework: grad, double
backward, forward mode and vmap all work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import stop_gradient
from attnspan.dropout import keep_bits
from attnspan.errors import refusal
from attnspan.implementations.base import (
    Implementation,
    Visible,
    either,
    poisoned_rows,
    seen_keys,
    seen_true,
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
    seen = visible(request, queries)
    q = request.q if queries is None else request.q[..., queries, :]
    q, k = (xp.astype(x, request.accumulation, copy=False) for x in (q, request.k))
    sees = seen.sees
    live = None if seen.keep is None else seen_keys(seen.keep, sizes.G)
    q, bad_q = without(xp, zeroed(xp, q, sees))
    k, bad_k = without(xp, zeroed(xp, k, live))
    poisoned = either(bad_q, poisoned_rows(seen.keep, bad_k, sizes.H))
    v = None
    if values:
        v = xp.astype(request.v, request.accumulation, copy=False)
        v, bad_v = without(xp, zeroed(xp, v, live))
        poisoned = either(poisoned, poisoned_rows(seen.keep, bad_v, sizes.H))
    if sizes.S == 0:
        poisoned = None
    weights, lse = softmax_parts(_scores(request, q, k, seen), seen.keep)
    return _Rows(weights, lse, seen.keep, v, poisoned)


def _scores(request: Request, q: Any, k: Any, seen: Visible) -> Any:
    """Score all pairs, then softcap, then bias."""
    sizes, xp = request.sizes, request.xp
    if isinstance(request.score, Score):
        s = request.score.lower(q, k, seen.sees, sizes).scores()
    else:
        s = _called(request.score, q, per_head(k, sizes.H), sizes.ndim)
    if request.softcap is not None:
        cap = in_dtype(request.softcap, s)
        s = cap * xp.tanh(s / cap)
    return s if seen.bias is None else s + seen.bias


def _called(fn: Any, q: Any, k: Any, ndim: int) -> Any:
    """Call a score function in the caller's own number of axes."""
    q, k = outer(q, ndim, 2), outer(k, ndim, 2)
    s = fn(q, k)
    wanted = (*q.shape[:-1], k.shape[-2])
    if tuple(getattr(s, "shape", ())) != wanted and not _same_lead(s, wanted):
        raise refusal("score", f"a function that returned {getattr(s, 'shape', s)}", f"scores {wanted}")
    return inner(s, ndim)


def _same_lead(s: Any, wanted: tuple[int, ...]) -> bool:
    """Tell whether scores have the right last two axes and leading axes that broadcast."""
    shape = tuple(getattr(s, "shape", ()))
    return (
        len(shape) == len(wanted)
        and shape[-2:] == wanted[-2:]
        and all(n == m or m == 1 for n, m in zip(shape[:-2], wanted[:-2], strict=True))
    )


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
