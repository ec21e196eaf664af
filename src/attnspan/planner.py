"""The planner: asks each implementation for its reasons against, and says what it chose and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnspan.arrays import is_torch_compiling, look
from attnspan.errors import NotSupportedError, describe, refusal
from attnspan.implementations import IMPLEMENTATIONS, Implementation
from attnspan.masks.base import Mask
from attnspan.request import Request
from attnspan.scores import Additive
from attnspan.statistics import Statistics

__all__ = ["Cost", "Plan", "choose", "looker", "plan_of"]


@dataclass(frozen=True)
class Cost:
    """What one call costs.

    Attributes
    ----------
    pairs : int or None
        Visible pairs over batch and heads; None where the mask's values are not seen.
    operations : int or None
        Floating-point operations these pairs need.
    bytes : int
        Bytes of q, k, v and the output.
    intermediate : int
        Bytes of the largest array the chosen implementation writes out besides.
    """

    pairs: int | None
    operations: int | None
    bytes: int
    intermediate: int


@dataclass(frozen=True)
class Plan:
    """EXPLAIN for attention: what runs, what was refused and why, and what it costs.

    Attributes
    ----------
    implementation : str
        What runs.
    because : tuple of str
        Why "auto" takes it before others that could, if there is more to say than its place.
    refused : tuple of (str, tuple of str)
        The implementations that cannot, each with its reasons.
    passed_over : tuple of (str, tuple of str)
        Those that "auto" does not choose though they could, each with its reasons.
    request : str
        Sizes, dtype and framework in words.
    score, mask : str
        As they print.
    mask_form : str
        How the mask is kept: intervals, or bits and why.
    cost : Cost
        Operations, bytes, visible pairs.
    """

    implementation: str
    because: tuple[str, ...]
    refused: tuple[tuple[str, tuple[str, ...]], ...]
    passed_over: tuple[tuple[str, tuple[str, ...]], ...]
    request: str
    score: str
    mask: str
    mask_form: str
    cost: Cost

    def __str__(self) -> str:
        cost = self.cost
        lines = [
            f"attention   {self.request}",
            f"score       {self.score}",
            f"mask        {self.mask}",
            f"            {self.mask_form}",
            f"runs        {': '.join((self.implementation, *self.because))}",
        ]
        for name, reasons in self.refused:
            lines.append(f"refused     {name}: {'; '.join(reasons)}")
        for name, reasons in self.passed_over:
            lines.append(f"passed over {name}: {'; '.join(reasons)}")
        pairs = "unknown (the mask is traced)" if cost.pairs is None else f"{cost.pairs:,}"
        work = "unknown" if cost.operations is None else f"{cost.operations:,}"
        lines.append(f"cost        {pairs} visible pairs, {work} operations")
        lines.append(f"            {cost.bytes:,} bytes in and out, {cost.intermediate:,} bytes between")
        return "\n".join(lines)


def choose(request: Request, name: str) -> Implementation:
    """Pick the implementation of a request: the named one or none, or the first that can and should.

    Raises
    ------
    ArgumentError
        If no implementation has that name.
    NotSupportedError
        If the named one cannot; all its reasons are listed.
    """
    if name == "auto":
        for one in sorted(IMPLEMENTATIONS, key=lambda one: not _merits(one, request)):
            if not one.reasons_against(request) and not _drawbacks(one, request):
                return one
    for one in IMPLEMENTATIONS:
        if one.name == name:
            reasons = one.reasons_against(request)
            if reasons:
                raise NotSupportedError(
                    f"implementation={name!r} cannot do this: {'; '.join(reasons)}; "
                    'implementation="auto" chooses one that can'
                )
            return one
    known = ", ".join(repr(one.name) for one in IMPLEMENTATIONS)
    raise refusal("implementation", repr(name), f"'auto' or one of {known}")


def _drawbacks(one: Implementation, request: Request) -> list[str]:
    return [] if one.drawbacks is None else one.drawbacks(request)


def _merits(one: Implementation, request: Request) -> list[str]:
    return [] if one.merits is None else one.merits(request)


def looker(request: Request, chosen: Implementation) -> Callable[[Request], tuple[Any, Statistics]]:
    """Give what finds log-sum-exp and statistics beside the output of the chosen implementation."""
    for one in (chosen, *IMPLEMENTATIONS):
        if one.look is not None and not one.reasons_against(request):
            return one.look
    raise AssertionError("eager looks at everything")


def plan_of(request: Request, name: str) -> Plan:
    """Explain what a request would run."""
    chosen = choose(request, name)
    refused, passed_over = [], []
    for one in IMPLEMENTATIONS:
        reasons = one.reasons_against(request)
        if reasons:
            refused.append((one.name, tuple(reasons)))
        elif one is not chosen and _drawbacks(one, request):
            passed_over.append((one.name, tuple(_drawbacks(one, request))))
    score, mask = request.score, request.mask
    if is_torch_compiling():  # the compiler cannot trace how values print
        score_shown, shown = type(score).__name__, f"{type(mask).__name__}, traced"
    else:
        score_shown, shown = repr(score), repr(mask)
    if mask is None:
        shown = "none: every query sees every key"
    return Plan(
        implementation=chosen.name,
        because=tuple(_merits(chosen, request)) if name == "auto" else (),
        refused=tuple(refused),
        passed_over=tuple(passed_over),
        request=f"{request.sizes} {describe(request.q).split('[')[0]} {request.kind}",
        score=score_shown,
        mask=shown,
        mask_form=_mask_form(mask),
        cost=_cost(request, chosen),
    )


def _mask_form(mask: Mask | None) -> str:
    if mask is None:
        return "one interval a query"
    reasons = mask.why_bits()
    return f"kept as bits: {'; '.join(reasons)}" if reasons else "kept as intervals, O(L) memory"


def _cost(request: Request, chosen: Implementation) -> Cost:
    sizes = request.sizes
    calls = math.prod(sizes.lead)
    pairs: Any = calls * sizes.L * sizes.S
    if request.mask is not None:
        pairs = _visible_pairs(request)
    width = sizes.Dq + sizes.E
    if isinstance(request.score, Additive):
        width = 2 * request.score.w_v.shape[-1] + sizes.E
    item = request.q.dtype.itemsize
    out = calls * sizes.L * sizes.E
    moved = sum(math.prod(x.shape) for x in (request.q, request.k, request.v)) + out
    return Cost(
        pairs, None if pairs is None else 2 * pairs * width, moved * item, chosen.intermediate(request)
    )


def _visible_pairs(request: Request) -> int | None:
    """Count the visible pairs over the call's batch and heads, where the mask's values are seen."""
    mask, sizes = request.mask, request.sizes
    assert mask is not None
    if is_torch_compiling() or any(look(x) is None for _, x in mask.arrays()):
        return None
    counts = mask.pairs_per_head(sizes.L, sizes.S)
    return int(counts.sum()) * (math.prod(sizes.lead) // max(1, counts.shape[0] * counts.shape[1]))
