"""Native: the compiled dot kernel, for any mask, forward and backward, on the CPU.

Scores, softmax and the sum over values run tile by tile in one pass, so memory beside inputs and outputs
is O(L), and tiles that the mask hides cost nothing. The backward pass recomputes a tile's weights from
what the forward pass kept of each row.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from attnspan import native
from attnspan.arrays import device_of, has_tangent, is_array
from attnspan.errors import AttnspanError
from attnspan.implementations.base import Implementation, finished
from attnspan.implementations.native.problem import Lowered, is_plain, lowered
from attnspan.request import Request
from attnspan.scores import Bilinear, Cosine, Dot, Gaussian, LowRankBilinear, ScaledDot
from attnspan.statistics import Statistics

__all__ = ["NATIVE"]


def _why_missing() -> str | None:
    try:
        native.load()
    except AttnspanError as error:
        return str(error)
    return None


_MISSING = _why_missing()  # asked once: a compiler that traces a call must not trace an import
_SCALAR = _MISSING is None and native.load().kernel_isa() == "scalar"
_WIDEST = native.load().most_width if _MISSING is None else math.inf
_DOT_FORMS = (Dot, ScaledDot, Cosine, Gaussian, Bilinear, LowRankBilinear)


def reasons_against(request: Request) -> list[str]:
    """Say what the kernel cannot do."""
    reasons = [] if _MISSING is None else [_MISSING]
    score, sizes = request.score, request.sizes
    if not sizes.S or not sizes.L:
        reasons.append("there is nothing to attend to" if sizes.L else "there is no query")
    rank = score.W_q.shape[-2] if isinstance(score, LowRankBilinear) else 0
    if max(sizes.Dq, sizes.Dk, sizes.E, rank) > _WIDEST:
        reasons.append(f"its vectors have at most {_WIDEST} numbers")
    if not isinstance(score, _DOT_FORMS):
        reasons.append(f"the score {type(score).__name__} is no dot form")
    scale = getattr(score, "scale", None)
    if isinstance(scale, (int, float)) and math.isinf(scale):
        reasons.append(f"its scale is finite, not {scale}")
    if is_array(request.softcap):
        reasons.append("its softcap is a number, not an array")
    elif request.softcap is not None and isinstance(score, Gaussian):
        reasons.append("it adds what is constant along a row, as Gaussian needs it, behind the softcap")
    device = device_of(request.q)
    if device is not None and device.type != "cpu":
        reasons.append(f"it runs on the CPU, and the arrays are on {device}")
    if any(has_tangent(x) for _, x in request.arrays()):
        reasons.append("it has no derivative under forward mode")
    if not reasons:
        reasons += _front(request.kind).reasons_against(request)
    return reasons


def drawbacks(request: Request) -> list[str]:
    """Say where another implementation is the better choice."""
    if _SCALAR:
        return ["it has no kernel for this machine's vector instructions, and runs its readable scalar twin"]
    return []


def attend(request: Request) -> Any:
    """Compute the output ``(B, ..., H, L, E)``."""
    low = lowered(request)
    return _shaped(request, low, *_front(request.kind).attend(low.problem))


def look_at(request: Request) -> tuple[Any, Statistics]:
    """Give (log-sum-exp, statistics), each ``(..., H, L)``; the first is differentiable."""
    _, lse, stats = attend_and_look(request)
    return lse, stats


def attend_and_look(request: Request) -> tuple[Any, Any, Statistics]:
    """Give (output, log-sum-exp, statistics) from one pass; the output is that of `attend`, bit for bit."""
    xp, lead = request.xp, request.sizes.lead
    low = lowered(request)
    out, lse, stats = _front(request.kind).attend_and_look(low.problem)
    rows = (*lead, request.sizes.L)
    stats = stats.map_arrays(lambda x: x.reshape(rows))
    whole = _whole_lse(request, low, lse)
    if low.poisoned is not None:
        whole = xp.where(low.poisoned, float("nan"), whole)
        stats = stats.map_arrays(lambda x: xp.where(low.poisoned, float("nan"), x))
    return _shaped(request, low, out, lse), whole, stats


def _whole_lse(request: Request, low: Lowered, lse: Any) -> Any:
    lse = lse.reshape((*request.sizes.lead, request.sizes.L))
    if low.row_constant is None:
        return lse
    return lse + request.xp.where(lse == -float("inf"), 0.0, low.row_constant)  # an empty row has no gradient


def _shaped(request: Request, low: Lowered, out: Any, lse: Any) -> Any:
    """Undo the merging of axes, and do what the kernel leaves to us."""
    xp, sizes = request.xp, request.sizes
    out = out.reshape((*sizes.lead, sizes.L, sizes.E))
    if request.sink is not None or low.poisoned is not None:
        return finished(request, out, _whole_lse(request, low, lse), low.poisoned)
    return xp.astype(out, request.q.dtype, copy=False)


def intermediate(request: Request) -> int:
    """Give the bytes kept of each row: the tiles' are constant."""
    sizes = request.sizes
    rows = sizes.L
    for n in sizes.lead:
        rows *= n
    copies = 0 if is_plain(request) else sizes.L * sizes.Dq + sizes.S * sizes.Dk
    return 3 * rows * max(4, int(request.q.dtype.itemsize)) + copies * int(request.q.dtype.itemsize)


def _front(kind: str) -> ModuleType:
    """Give the module that hands a library's arrays to the kernel; each imports its own."""
    if kind == "torch":
        from attnspan.implementations.native import torch

        return torch
    if kind == "jax":
        from attnspan.implementations.native import jax

        return jax
    from attnspan.implementations.native import numpy

    return numpy


NATIVE = Implementation(
    "native", reasons_against, attend, intermediate, look_at, attend_and_look, drawbacks=drawbacks
)
