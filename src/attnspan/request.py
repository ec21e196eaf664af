"""One attention call, checked: the record that is passed on to planner and implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnspan.arrays import (
    TITLES,
    accumulation_dtype,
    framework,
    is_array,
    is_boolean,
    is_floating,
    look,
    namespace,
)
from attnspan.biases import ALiBi
from attnspan.dropout import is_generator, seed_words
from attnspan.errors import describe, refusal
from attnspan.masks.base import Mask, as_mask
from attnspan.masks.dense import Dense
from attnspan.masks.everything import Everything
from attnspan.masks.parameters import MaskSizes, checked_align
from attnspan.scores import ScaledDot, Score
from attnspan.scores.function import as_function
from attnspan.shapes import Sizes, check_parameter, inner, sizes_of
from attnspan.values import Value

__all__ = ["Request", "request_of"]


@dataclass(frozen=True, eq=False, repr=False)
class Request(Value):
    """Everything one call asked for, in the inner form of shapes.

    Attributes
    ----------
    q, k, v : array
        ``(B, ..., H, L, Dq)``, ``(B, ..., G, S, Dk)``, ``(B, ..., G, S, E)`` in the caller's dtype.
    score : Score
        How well a key matches.
    mask : Mask or None
        Which keys are seen, alignment filled in; None means all.
    bias : array, ALiBi or None
        What is added; an array broadcasts to the scores.
    softcap, sink : number, array or None
        As the caller gave them.
    dropout : float
        The share of weights dropped.
    low, high : int, array or None
        The words of the seed.
    sizes : Sizes
        The letters.
    order : str
        In which order the axes of q, k and v stand in memory, and those of the output are wanted there:
        "BHLD" as they are here, or "BLHD" where they came as ``(B, L, H, D)``. A hint, no more.
    """

    q: Any
    k: Any
    v: Any
    score: Score
    mask: Mask | None
    bias: Any
    softcap: Any
    sink: Any
    dropout: float
    low: Any
    high: Any
    sizes: Sizes
    order: str = "BHLD"

    @property
    def kind(self) -> str:
        """The framework of the call."""
        return framework(self.q) or "numpy"

    @property
    def xp(self) -> Any:
        """The namespace of the call."""
        return namespace(self.kind)

    @property
    def accumulation(self) -> Any:
        """The dtype sums run in."""
        return accumulation_dtype(self.q)


def request_of(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Any = None,
    mask: Any = None,
    bias: Any = None,
    softcap: Any = None,
    sink: Any = None,
    align: Any = None,
    dropout: float = 0.0,
    rng: Any = None,
    draw: bool = True,
) -> Request:
    """Check the arguments of `attnspan.attention` before any compute, and make the record.

    With `draw` False a generator given as `rng` is left as it is, and no seed is kept.
    """
    sizes = sizes_of(q, k, v)
    kind = framework(q) or "numpy"
    dropout = _checked_dropout(dropout, rng, kind)
    align = _checked_align(align, sizes)
    request = Request(
        q=inner(q, sizes.ndim),
        k=inner(k, sizes.ndim),
        v=inner(v, sizes.ndim),
        score=_checked_score(score, sizes, q),
        mask=_checked_mask(mask, align, sizes, q),
        bias=_checked_bias(bias, align, sizes, q),
        softcap=_checked_softcap(softcap, q),
        sink=_checked_sink(sink, sizes, q),
        dropout=dropout,
        low=None,
        high=None,
        sizes=sizes,
    )
    if not dropout:
        return request
    # Last, so that a refused call takes nothing from a generator; nor does a plan.
    low, high = seed_words(rng, kind) if draw or not is_generator(rng, kind) else (0, 0)
    return replace(request, low=low, high=high)


def _checked_score(score: Any, sizes: Sizes, q: Any) -> Score:
    if score is None:
        score = ScaledDot()
    if isinstance(score, type):
        raise refusal("score", f"the class {score.__name__}", "a score", f"write {score.__name__}(...)")
    if isinstance(score, str) or not (isinstance(score, Score) or callable(score)):
        raise refusal("score", score, "a score of attnspan.scores or a function fn(q_tile, k_tile) -> scores")
    if not isinstance(score, Score):
        score = as_function(score)
    score.check(sizes)
    for name, x in score.arrays():
        _check_home(f"{type(score).__name__}.{name}", x, q)
    return score


def _checked_mask(mask: Any, align: Any, sizes: Sizes, q: Any) -> Mask | None:
    if mask is None or type(mask) is Everything:
        return None
    if isinstance(mask, type):
        raise refusal("mask", f"the class {mask.__name__}", "a mask", f"write {mask.__name__}(...)")
    mask = as_mask(mask)
    if align is not None:
        mask = mask.with_align(align)
    for part in mask.values():
        if isinstance(part, Dense):
            axes, wanted = len(part.array.shape), min(sizes.ndim, 4)
            if axes > 2 and axes != wanted:
                fix = "say which axis is meant: mask[:, None] for (B, 1, L, S), mask[None] for (1, H, L, S)"
                raise refusal(
                    "mask",
                    f"{describe(part.array)} beside {sizes.ndim}-D queries {describe(q)}",
                    f"{wanted} axes (B|1, {'H|1, ' if wanted == 4 else ''}L|1, S|1), or two (L, S)",
                    fix if axes == 3 else "",
                )
    mask.check(mask_sizes(sizes))
    return mask


def mask_sizes(sizes: Sizes) -> MaskSizes:
    """Give the sizes a mask is checked against."""
    return MaskSizes(sizes.L, sizes.S, sizes.B, sizes.H)


def _checked_bias(bias: Any, align: Any, sizes: Sizes, q: Any) -> Any:
    if bias is None:
        return None
    if isinstance(bias, ALiBi):
        bias = bias.with_align(align) if align is not None else bias
        bias.check(sizes)
        _check_home("ALiBi.slopes", bias.slopes, q)
        return bias
    if not is_array(bias):
        raise refusal("bias", bias, "a floating-point array that broadcasts to the scores, or ALiBi(slopes)")
    home = framework(q) or "numpy"
    if framework(bias) != home:  # its gradient comes in its own library
        given = f"{TITLES[str(framework(bias))]} {describe(bias)}"
        raise refusal("bias", given, f"an array of {TITLES[home]}, as q is")
    _check_home("bias", bias, q)
    if not is_floating(bias):
        fix = "a boolean array is a mask: pass it as mask=" if is_boolean(bias) else ""
        raise refusal("bias", bias, "a floating-point array that broadcasts to the scores", fix)
    shape = tuple(bias.shape)
    full = (*sizes.lead, sizes.L, sizes.S)
    if sizes.ndim < 4:
        full = (*sizes.lead[: sizes.ndim - 2], sizes.L, sizes.S)
    needed = f"a shape that broadcasts to the scores {full}"
    if len(shape) > 2 and len(shape) != sizes.ndim:
        raise refusal(
            "bias",
            f"{describe(bias)} beside {sizes.ndim}-D queries",
            f"{sizes.ndim} axes or at most two (L, S)",
            "say which axis is meant: bias[:, None] for (B, 1, L, S), bias[None] for (1, H, L, S)",
        )
    tail = full[len(full) - len(shape) :]
    if any(n not in (1, m) for n, m in zip(shape, tail, strict=True)):
        raise refusal("bias", bias, needed)
    if len(shape) < 2:
        bias = bias.reshape((1,) * (2 - len(shape)) + shape)
    if len(bias.shape) == 2:
        return bias.reshape((1,) * (len(sizes.lead)) + tuple(bias.shape))
    return inner(bias, sizes.ndim)


def _checked_align(align: Any, sizes: Sizes) -> Any:
    """Check the alignment of the call, also where nothing in it is positional."""
    align = checked_align(align)
    if is_array(align) and tuple(align.shape):
        check_parameter(tuple(align.shape), "align", sizes)
    return align


def _checked_softcap(softcap: Any, q: Any) -> Any:
    if softcap is None:
        return None
    number = isinstance(softcap, (int, float, np.number)) and not isinstance(softcap, bool)
    if not number and not (is_array(softcap) and tuple(softcap.shape) == () and is_floating(softcap)):
        raise refusal("softcap", softcap, "a positive number or None")
    seen = softcap if number else look(softcap)
    if seen is not None and not seen > 0:
        raise refusal("softcap", softcap, "a positive number or None", "None is no cap")
    if number:
        return None if math.isinf(softcap) else float(softcap)
    _check_home("softcap", softcap, q)
    return softcap


def _checked_sink(sink: Any, sizes: Sizes, q: Any) -> Any:
    if sink is None:
        return None
    number = isinstance(sink, (int, float, np.number)) and not isinstance(sink, bool)
    if not number and not (is_array(sink) and is_floating(sink)):
        raise refusal("sink", sink, "a number, or a floating-point array (B|1, H|1) of logits per head")
    if number:
        return float(sink)
    _check_home("sink", sink, q)
    if tuple(sink.shape):
        check_parameter(tuple(sink.shape), "sink", sizes)
    return sink


def _check_home(argument: str, x: Any, q: Any) -> None:
    """Refuse an array of another framework (NumPy's fit all) or, for PyTorch, on another device."""
    kind, home = str(framework(x)), framework(q) or "numpy"
    if kind not in ("numpy", home):
        raise refusal(argument, f"{TITLES[kind]} {describe(x)}", f"an array of {TITLES[home]}, as q is")
    if kind == home == "torch" and x.device != q.device:
        raise refusal(argument, f"a tensor on {x.device}", f"one on {q.device}, as q is")


def _checked_dropout(dropout: Any, rng: Any, kind: str) -> float:
    number = isinstance(dropout, (int, float, np.number)) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout < 1:
        raise refusal("dropout", dropout, "a number p with 0 <= p < 1")
    if rng is not None and not is_array(rng) and not is_generator(rng, kind):
        seed_words(rng, kind)  # refuses what is no seed, also where nothing is drawn
    if dropout and rng is None:
        raise refusal(
            "rng",
            f"nothing, with dropout={dropout}",
            "a seed whenever dropout acts: an integer, a JAX key or a torch.Generator",
            "at inference pass dropout=0.0",
        )
    return float(dropout)
