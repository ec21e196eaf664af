"""What an implementation is, and the steps that all of them share.

An implementation is one file with one record: its name, its reasons against a request (none means
that it can), and the function that attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import constant, device_of, look
from attnspan.biases import ALiBi
from attnspan.masks.bound import frame_of
from attnspan.request import Request, mask_sizes
from attnspan.scores.base import per_head

__all__ = [
    "Implementation",
    "Visible",
    "dense_bias",
    "either",
    "poisoned_rows",
    "seen_keys",
    "seen_true",
    "usable",
    "visible",
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
    """

    name: str
    reasons_against: Callable[[Request], list[str]]
    attend: Callable[[Request], Any]


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
        extra = len(sizes.lead) - 2
        keep = keep.reshape((keep.shape[0],) + (1,) * extra + tuple(keep.shape[1:]))
        if sizes.S == 1 or keep.shape[-1] == 1:  # one column may stand for none
            keep = xp.broadcast_to(keep, (*keep.shape[:-1], sizes.S))
    bias = dense_bias(request, queries)
    if bias is not None:
        there = bias != -float("inf")
        keep = there if keep is None else keep & there
        bias = xp.where(keep, bias, 0.0)
        if bias.dtype != request.accumulation:  # a float64 bias beside float32: what is finite stays so
            limits = xp.finfo(request.accumulation)
            bias = xp.astype(xp.clip(bias, limits.min, limits.max), request.accumulation)
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
        bias = bias.dense(q, frame.k, sizes.L, sizes.S, like)
        return bias.reshape((bias.shape[0],) + (1,) * (len(sizes.lead) - 2) + tuple(bias.shape[1:]))
    if queries is not None and bias.shape[-2] > 1:
        bias = bias[..., queries, :]
    return bias if bias.dtype == xp.float64 else xp.astype(bias, request.accumulation, copy=False)


def seen_keys(keep: Any, G: int) -> Any:
    """Tell which keys of each key/value head some query sees: ``(..., G|1, S)``."""
    seen = keep.any(-2)
    H, S = seen.shape[-2], seen.shape[-1]
    if H in (1, G):
        return seen
    return seen.reshape((*seen.shape[:-2], G, H // G, S)).any(-2)


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
