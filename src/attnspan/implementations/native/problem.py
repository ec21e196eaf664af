"""What the dot kernel is given, made from a request, and the formula it computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnspan.arrays import arange, constant, device_of, framework, is_array, xp_of
from attnspan.biases import ALiBi
from attnspan.dropout import keys_kept, row_words
from attnspan.implementations.base import any_of_group, scored, weighted, zeroed
from attnspan.implementations.bounded import bound_mask, bound_with_bias, broadcast, prepared_in_bounds
from attnspan.masks.bits import Bits
from attnspan.masks.bound import Bound
from attnspan.masks.parameters import offset
from attnspan.masks.spans import Spans
from attnspan.request import Request
from attnspan.scores import Dot, ScaledDot
from attnspan.scores.base import DotForm, in_dtype, per_head
from attnspan.softmax import softmax_parts
from attnspan.values import Value

__all__ = ["Lowered", "Problem", "formula", "is_plain", "lowered"]


@dataclass(frozen=True, eq=False, repr=False)
class Problem(Value):
    """One call of the kernel. Between B and H there are no other axes: they are part of B.

    Attributes
    ----------
    q, k, v : array
        ``(B, H, L, D)``, ``(B, G, S, D)``, ``(B, G, S, E)``, one dtype.
    key_bias : array or None
        ``(B|1, H|1, 1, S)``: added to the scaled product, within the softcap.
    bias : array or None
        ``(B|1, H|1, L|1, S)``: added behind the softcap; -inf excludes.
    slopes, align : array or None
        ``(1, H, 1, 1)`` and int32 ``(B|1, H|1, 1, 1)``, of ALiBi.
    start, stop, bits : array or None
        The mask in the bound form.
    seed : array or None
        ``(B|1, 1, 1, 2)`` words of 32 bits (int32 in PyTorch, with the same bits).
    scale, softcap, dropout : float
        A softcap of 0 is none.
    draws : int
        Row (b, h) draws its dropout as number (b mod draws)·H + h.
    order : str
        As `attnspan.request.Request` has it.
    """

    q: Any
    k: Any
    v: Any
    key_bias: Any
    bias: Any
    slopes: Any
    align: Any
    start: Any
    stop: Any
    bits: Any
    seed: Any
    scale: float
    softcap: float
    dropout: float
    draws: int
    order: str = "BHLD"

    @property
    def accumulation(self) -> Any:
        """The dtype that sums run in, and that everything but q, k and v has."""
        xp = xp_of(self.q)
        return xp.float64 if self.q.dtype == xp.float64 else xp.float32


@dataclass(frozen=True, eq=False, repr=False)
class Lowered(Value):
    """A problem, and what is left to do behind it.

    Attributes
    ----------
    problem : Problem
        What the kernel computes.
    row_constant : array or None
        ``(..., H, L)``: what log-sum-exp lacks.
    poisoned : bool array or None
        Which queries become NaN, where the kernel no longer sees why.
    """

    problem: Problem
    row_constant: Any
    poisoned: Any


def is_plain(request: Request) -> bool:
    """Tell whether q, k and v can go to the kernel as they are: it looks out for what is excluded itself."""
    score, bias = request.score, request.bias
    if type(score) is ScaledDot:
        score_fits = score.scale is None or _fits(score.scale)
    else:
        score_fits = type(score) is Dot
    # Beside float32 scores a float64 bias is cut to their range first, and -inf with it.
    return score_fits and not (is_array(bias) and bias.dtype == request.xp.float64 != request.accumulation)


def lowered(request: Request) -> Lowered:
    """Bring a request to the kernel's terms."""
    xp, sizes = request.xp, request.sizes
    request = broadcast(request)
    row_constant = poisoned = key_bias = None
    scale: Any
    if is_plain(request):
        q, k, v = request.q, request.k, request.v
        scale = getattr(request.score, "scale", 1.0)
        scale = 1 / math.sqrt(max(sizes.Dq, 1)) if scale is None else scale
        bound, bias = bound_mask(request), request.bias
    else:
        bound, bias = bound_with_bias(request)
        # The kernel looks out for bad values itself: they poison outputs, and leave weights as they are.
        ready = prepared_in_bounds(replace(request, v=request.v[..., :0]), bound)
        form, poisoned = ready.form, ready.poisoned
        v = xp.astype(request.v, request.accumulation, copy=False)
        assert isinstance(form, DotForm)
        q, k, scale, row_constant = form.q, form.k, form.scale, form.row_constant
        if form.key_bias is not None:
            key_bias = (form.key_bias * in_dtype(_per_key(scale), q))[..., None, :]
        if not _fits(scale):
            q, scale = q * in_dtype(scale, q), 1.0
        k = xp.broadcast_to(k, (*sizes.lead[:-1], *k.shape[-3:]))
        q = xp.broadcast_to(q, (*sizes.lead, *q.shape[-2:]))
        if k.shape[-3] != v.shape[-3]:  # weights of the score made a key per head
            v = per_head(v, k.shape[-3])
    merge = lambda x: _merged(x, sizes.lead)  # noqa: E731
    slopes = align = seed = None
    if isinstance(bias, ALiBi):
        slopes, align, bias = *_alibi(request, bias), None
    if bias is not None:
        bias = xp.astype(bias, request.accumulation, copy=False)
        rows = sizes.L if request.softcap is not None else bias.shape[-2]
        bias = xp.broadcast_to(bias, (*bias.shape[:-2], rows, sizes.S))
    if request.dropout:
        seed = _seed(request)
    problem = Problem(
        q=merge(q),
        k=merge(k),
        v=merge(v),
        key_bias=merge(key_bias),
        bias=merge(bias),
        slopes=merge(slopes),
        align=merge(align),
        start=merge(bound.spans.start if bound else None),
        stop=merge(bound.spans.stop if bound else None),
        bits=merge(bound.bits.words if bound and bound.bits else None),
        seed=seed,
        scale=float(scale),
        softcap=_softcap(request),
        dropout=request.dropout,
        draws=math.prod(sizes.lead[:-1]),
        order=request.order,
    )
    return Lowered(problem, row_constant, poisoned)


def formula(problem: Problem) -> tuple[Any, Any]:
    """Give (out, log-sum-exp) by the formula itself, which the library can differentiate in every way."""
    p, xp = problem, xp_of(problem.q)
    B, H, L, _ = p.q.shape
    S, dtype = p.k.shape[-2], p.accumulation
    q, k, v = (xp.astype(x, dtype, copy=False) for x in (p.q, p.k, p.v))
    keep, bias = None, p.bias
    if p.start is not None:
        keep = Bound(Spans(p.start, p.stop), None if p.bits is None else Bits(p.bits)).dense(L, S)
    if bias is not None:
        there = bias != -float("inf")
        keep = there if keep is None else keep & there
        bias = xp.where(keep, bias, 0.0)
    if p.slopes is not None:
        i, j = arange(L, p.q, xp.int32)[:, None], arange(S, p.q, xp.int32)
        away = -p.slopes * xp.astype(abs(i + p.align - j), dtype)
        bias = away if bias is None else bias + away
    sees = None if keep is None else keep.any(-1)
    if keep is not None:
        live = any_of_group(keep.any(-2), k.shape[-3])
        q, k, v = zeroed(xp, q, sees), zeroed(xp, k, live), zeroed(xp, v, live)
    key_bias = None if p.key_bias is None else p.key_bias[..., 0, :]
    weights, lse = softmax_parts(
        scored(DotForm(q * p.scale, k, 1.0, key_bias), p.softcap or None, bias), keep
    )
    if p.dropout:
        wide = xp.int64 if framework(p.q) == "torch" else xp.uint32
        b, h = (xp.astype(arange(n, p.q), wide) for n in (B, H))
        n = ((b % p.draws) * H)[:, None, None] + h[:, None]
        words = xp.astype(p.seed, wide)
        words = words & 0xFFFFFFFF if wide == getattr(xp, "int64", None) else words
        rows = row_words(xp.astype(arange(L, p.q), wide), n, (words[..., 0], words[..., 1]))
        weights = xp.where(keys_kept(rows, arange(S, p.q), p.dropout), weights / (1 - p.dropout), 0.0)
    out = weighted(xp, xp.broadcast_to(weights, (B, H, L, S)), v)
    if sees is not None:
        out = xp.where(sees[..., None], out, 0.0)
    return out, xp.broadcast_to(lse, (B, H, L))


def _softcap(request: Request) -> float:
    """Give the softcap within the range of the sums' dtype, 0 for none."""
    if request.softcap is None:
        return 0.0
    limits = request.xp.finfo(request.accumulation)
    return min(max(float(request.softcap), float(limits.tiny)), float(limits.max) / 2)


def _fits(scale: Any) -> bool:
    """Tell whether a scale is a number as the kernel takes it; others are multiplied into the queries."""
    return isinstance(scale, (int, float)) and abs(scale) < 1e30  # False for NaN


def _per_key(scale: Any) -> Any:
    return scale[..., 0] if is_array(scale) and len(scale.shape) > 1 else scale


def _merged(x: Any, lead: tuple[int, ...]) -> Any:
    """Make one axis of B and the axes between B and H: (B, ..., H, m, n) to (B', H, m, n)."""
    if x is None or len(x.shape) == 4:
        return x
    first = x.shape[:-3]
    if any(n != 1 for n in first):
        x = xp_of(x).broadcast_to(x, (*lead[:-1], *x.shape[-3:]))
    return x.reshape((math.prod(x.shape[:-3]), *x.shape[-3:]))


def _alibi(request: Request, bias: ALiBi) -> tuple[Any, Any]:
    """Give the slopes and the alignment as arrays with all axes of the scores."""
    xp, sizes, device = request.xp, request.sizes, device_of(request.q)
    middle = (1,) * (len(sizes.lead) - 2)
    slopes = constant(bias.slopes, xp, device)
    slopes = xp.astype(slopes, request.accumulation, copy=False).reshape((1, *middle, -1, 1, 1))
    align = offset(bias.align, sizes.L, sizes.S, bias)
    if is_array(align):
        align = xp.astype(constant(align, xp, device), xp.int32)
        align = align.reshape((align.shape[0], *middle, *align.shape[1:]))
    else:
        on = {} if device is None else {"device": device}
        align = xp.full((1, *middle, 1, 1, 1), int(align), dtype=xp.int32, **on)
    return slopes, align


def _seed(request: Request) -> Any:
    """Give the two words of the seed as an array, (1, 1, 1, 2)."""
    xp, words = request.xp, (request.low, request.high)
    if request.kind == "jax":
        return xp.stack([xp.asarray(word, dtype=xp.uint32) for word in words]).reshape((1, 1, 1, 2))
    if request.kind == "torch":
        if any(is_array(word) for word in words):
            return xp.stack([xp.asarray(word) for word in words]).to(xp.int32).reshape((1, 1, 1, 2))
        return xp.asarray(np.array(words, np.uint32).view(np.int32)).reshape((1, 1, 1, 2))
    return np.array(words, np.uint32).reshape((1, 1, 1, 2))
