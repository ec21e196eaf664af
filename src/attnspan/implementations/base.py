"""What an implementation is, and the steps that all of them share.

An implementation is one file with one record: its name, its reasons against a request (none means
that it can), and the function that attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import constant, device_of, look, stop_gradient, xp_of
from attnspan.biases import ALiBi
from attnspan.masks.bound import frame_of
from attnspan.request import Request, mask_sizes
from attnspan.scores.base import Form, in_dtype, per_head
from attnspan.scores.function import CalledForm, Function
from attnspan.shapes import Sizes, left_aligned
from attnspan.statistics import Statistics

__all__ = [
    "Implementation",
    "Prepared",
    "Visible",
    "any_of_group",
    "dense_bias",
    "either",
    "finished",
    "finite_in",
    "poisoned_rows",
    "prepared",
    "scored",
    "seen_keys",
    "seen_true",
    "usable",
    "visible",
    "weighted",
    "with_middle_axes",
    "without",
    "zeroed",
]


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes
    ----------
    name : str
        What ``implementation=`` calls it.
    reasons_against : callable
        Gives the reasons why it cannot answer a request; none means that it can.
    attend : callable
        Gives the output of a request, in the inner form of shapes.
    intermediate : callable
        Gives the bytes of the largest array it writes out besides the output.
    look : callable, optional
        Gives (log-sum-exp, statistics) of a request; without it another implementation looks.
    attend_and_look : callable, optional
        Gives (output, log-sum-exp, statistics) from one pass, the output as `attend` gives it bit for bit.
    drawbacks : callable, optional
        Gives the reasons why "auto" passes it over though it can answer.
    merits : callable, optional
        Gives the reasons why "auto" takes it, if it can answer, before those that come first.
    """

    name: str
    reasons_against: Callable[[Request], list[str]]
    attend: Callable[[Request], Any]
    intermediate: Callable[[Request], int]
    look: Callable[[Request], tuple[Any, Statistics]] | None = None
    attend_and_look: Callable[[Request], tuple[Any, Any, Statistics]] | None = None
    drawbacks: Callable[[Request], list[str]] | None = None
    merits: Callable[[Request], list[str]] | None = None


@dataclass(frozen=True)
class Prepared:
    """A request without what must not reach a product: excluded and non-finite rows are replaced.

    Attributes
    ----------
    form : Form
        The scores of all pairs.
    v : array
        The values in the accumulation dtype.
    poisoned : bool array or None
        ``(..., H|1, L|1)``: which queries see a key or value that is not finite, or are not themselves.
    """

    form: Form
    v: Any
    poisoned: Any


def prepared(request: Request, sees: Any, live: Any, reach: Callable[[Any], Any]) -> Prepared:
    """Bring a request to a form and values.

    `sees` tells which queries see a key, `live` which keys of each key/value head are seen, both None
    for all; ``reach(bad)`` tells which queries see a bad key ``(..., G, S)``.
    """
    xp, sizes = request.xp, request.sizes
    q, k, v = (xp.astype(x, request.accumulation, copy=False) for x in (request.q, request.k, request.v))
    q, bad_q = without(xp, zeroed(xp, q, sees))
    k, bad_k = without(xp, zeroed(xp, k, live))
    v, bad_v = without(xp, zeroed(xp, v, live))
    poisoned = bad_q
    if sizes.S:
        for bad in (bad_k, bad_v):
            poisoned = poisoned if bad is None else either(poisoned, reach(bad))
    queries = usable(sees, bad_q)
    if isinstance(request.score, Function):
        q, k = _filled(xp, q, queries), _filled(xp, k, usable(live, bad_k))
    return Prepared(request.score.lower(q, k, queries, sizes), v, poisoned if sizes.S else None)


def finished(request: Request, out: Any, lse: Any, poisoned: Any) -> Any:
    """Share with the sink, empty the empty rows, poison the poisoned ones; give q's dtype and all axes."""
    xp, sizes = request.xp, request.sizes
    if request.sink is not None:
        out = out * _share_beside_sink(request, lse)[..., None]
    live = lse != -float("inf")
    if not seen_true(live):  # also keeps a NaN gradient of an empty row from going anywhere
        out = xp.where(live[..., None], out, 0.0)
    if poisoned is not None:
        out = xp.where(poisoned[..., None], float("nan"), out)
    out = xp.broadcast_to(out, (*sizes.lead, sizes.L, sizes.E))
    return xp.astype(out, request.q.dtype, copy=False)


def scored(form: Form, softcap: Any, bias: Any) -> Any:
    """Write out the scores that the softmax takes: finite, capped, with the bias added."""
    s = form.scores()
    xp = xp_of(s)
    if not isinstance(form, CalledForm):
        limits = xp.finfo(s.dtype)
        s = xp.clip(s, limits.min, limits.max)  # finite inputs have finite scores
    if softcap is not None:
        s = _capped(xp, s, softcap)
    return s if bias is None else s + bias


def _capped(xp: Any, s: Any, softcap: Any) -> Any:
    """Softcap · tanh(s / softcap); where s is small beside the cap, that is s to the last bit."""
    limits = xp.finfo(s.dtype)
    if isinstance(softcap, float):
        cap: Any = min(max(softcap, float(limits.tiny)), float(limits.max))
    else:  # clipped, an infinite cap has a finite derivative
        cap = xp.clip(in_dtype(softcap, s), limits.tiny, limits.max)
    return xp.where(xp.abs(s) < cap * float(limits.eps) ** 0.5, s, cap * xp.tanh(s / cap))


@dataclass(frozen=True)
class Visible:
    """Which pairs count, and what is added to them, for some queries of a request.

    Attributes
    ----------
    keep : bool array or None
        ``(B|1, ..., H|1, L|1, S|1)``; None means all.
    bias : array or None
        Finite wherever it excludes nothing; broadcasts to the scores.
    sees : bool array or None
        ``(..., H|1, L|1)``: which queries see a key; None means all.
    """

    keep: Any
    bias: Any
    sees: Any


def visible(request: Request, queries: Any = None) -> Visible:
    """Write out what the mask shows and the bias adds; a bias of -inf excludes."""
    sizes, xp = request.sizes, request.xp
    keep = None
    if request.mask is not None:
        keep = request.mask.visible(
            sizes.L, sizes.S, like=request.q, sizes=mask_sizes(sizes), queries=queries
        )
        keep = with_middle_axes(keep, sizes)
        if sizes.S == 1 or keep.shape[-1] == 1:  # one column may stand for none
            keep = xp.broadcast_to(keep, (*keep.shape[:-1], sizes.S))
    bias = dense_bias(request, queries)
    if bias is not None:
        there = bias != -float("inf")
        keep = there if keep is None else keep & there
        bias = finite_in(xp, xp.where(keep, bias, 0.0), request.accumulation)
    return Visible(keep, bias, None if keep is None else keep.any(-1))


def dense_bias(request: Request, queries: Any = None) -> Any:
    """Write the bias out for some queries, in its own dtype or, if that is narrower, as sums run."""
    bias = request.bias
    if bias is None:
        return None
    sizes, xp = request.sizes, request.xp
    if isinstance(bias, ALiBi):
        device = request.q.device if request.kind == "torch" else None
        frame = frame_of(sizes.L, sizes.S, xp, device)
        q = frame.q if queries is None else frame.q[:, :, queries, :]
        like = xp.astype(request.q[..., :0], request.accumulation, copy=False)
        bias = bias.map_arrays(lambda x: constant(x, xp, device_of(request.q)))
        return with_middle_axes(bias.dense(q, frame.k, sizes.L, sizes.S, like), sizes)
    if queries is not None and bias.shape[-2] > 1:
        bias = bias[..., queries, :]
    return bias if bias.dtype == xp.float64 else xp.astype(bias, request.accumulation, copy=False)


def finite_in(xp: Any, x: Any, dtype: Any) -> Any:
    """Bring a bias to the dtype of the sums: a float64 bias beside float32 stays finite where it is."""
    if x.dtype == dtype:
        return x
    limits = xp.finfo(dtype)
    return (
        xp.astype(xp.clip(x, limits.min, limits.max), dtype) if x.dtype == xp.float64 else xp.astype(x, dtype)
    )


def with_middle_axes(x: Any, sizes: Sizes) -> Any:
    """Line an array (B|1, H|1, ...) of masks and biases up with the axes between B and H."""
    return x.reshape((x.shape[0],) + (1,) * (len(sizes.lead) - 2) + tuple(x.shape[1:]))


def seen_keys(keep: Any, G: int) -> Any:
    """Tell which keys of each key/value head some query sees: ``(..., G|1, S)``."""
    return any_of_group(keep.any(-2), G)


def any_of_group(flags: Any, G: int) -> Any:
    """Unite the flags of query heads that share a key/value head: ``(..., H|1, S)`` to ``(..., G|1, S)``."""
    H, S = flags.shape[-2], flags.shape[-1]
    if H in (1, G):
        return flags
    return flags.reshape((*flags.shape[:-2], G, H // G, S)).any(-2)


def zeroed(xp: Any, x: Any, live: Any) -> Any:
    """Put zeros in the rows of `x` that are not live: what is masked does not exist."""
    if live is None or seen_true(live):
        return x
    return xp.where(live[..., None], x, 0.0)


def without(xp: Any, x: Any) -> tuple[Any, Any]:
    """Split off the rows of `x` that hold a NaN or an infinity: (x with zeros there, which).

    The second is None where all rows are seen to be finite.
    """
    values = look(x)
    if values is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(values.sum()):  # one pass; a sum that overflows only costs the long way
                return x, None
    bad = ~xp.all(xp.isfinite(x), axis=-1)
    return xp.where(bad[..., None], 0.0, x), bad


def usable(sees: Any, bad: Any) -> Any:
    """Tell which queries see a key and are finite, ``(..., H, L)``; None means all."""
    if bad is None:
        return sees
    return ~bad if sees is None else sees & ~bad


def seen_true(x: Any) -> bool:
    """Tell whether a boolean array is seen to be all True."""
    values = look(x)
    return values is not None and bool(values.all())


def either(a: Any, b: Any) -> Any:
    """Unite two flags, of which None is no flag at all."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def poisoned_rows(keep: Any, bad: Any, H: int) -> Any:
    """Tell which queries see a bad key, ``(..., H|1, L|1)``, for bad keys ``(..., G, S)`` or None."""
    if bad is None:
        return None
    bad = per_head(bad[..., None], H)[..., 0][..., None, :]
    return bad.any(-1) if keep is None else (keep & bad).any(-1)


def weighted(xp: Any, weights: Any, v: Any) -> Any:
    """Weights times values where several query heads share a value head: values are not copied."""
    H, G = weights.shape[-3], v.shape[-3]
    if H == G:
        return xp.matmul(weights, v)
    lead, L = weights.shape[:-3], weights.shape[-2]
    out = xp.matmul(weights.reshape((*lead, G, H // G * L, weights.shape[-1])), v)
    return out.reshape((*out.shape[:-3], H, L, v.shape[-1]))


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
