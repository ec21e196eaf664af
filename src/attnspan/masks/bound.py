"""A mask bound to lengths: spans to skip by, bits inside, and the algebra of the pair.

A query sees a key if an interval of `spans` holds it and, where there are `bits`, its bit is set.
An AND keeps both parts; `|` and `~` over bits give bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import TITLES, device_of, framework, full_like_shape, xp_of
from attnspan.errors import refusal
from attnspan.masks import spans as algebra
from attnspan.masks.bits import Bits, pack
from attnspan.masks.spans import Spans
from attnspan.values import Value

__all__ = ["Bound", "Frame", "all_keys", "both", "either", "frame_of", "from_rows", "home_of", "negated"]


@dataclass(frozen=True)
class Frame:
    """Where a mask is asked: positions and lengths, in the array library of the call.

    Attributes
    ----------
    q : array
        int32 `(B|1, 1, L, 1)`: positions of the queries.
    k : array
        int32 `(B|1, 1, 1, S)`: positions of the keys.
    L, S : int or array
        The lengths; inside `Documents(each=...)` each query has its own: int32 `(B|1, 1, L, 1)`.
    rows, columns : int
        The lengths of the whole call, always numbers.
    """

    xp: Any
    device: Any
    q: Any
    k: Any
    L: Any
    S: Any
    rows: int
    columns: int

    def between(self, i: int, j: int) -> Frame:
        """Narrow to the queries i to j."""

        def cut(x: Any) -> Any:
            return x[..., i:j, :] if getattr(x, "ndim", 0) == 4 else x

        return Frame(self.xp, self.device, cut(self.q), self.k, cut(self.L), cut(self.S), j - i, self.columns)


def frame_of(L: int, S: int, xp: Any, device: Any) -> Frame:
    """Make the frame of a whole call: queries 0 to L, keys 0 to S."""
    on = {} if device is None else {"device": device}
    q = xp.arange(L, dtype=xp.int32, **on).reshape((1, 1, L, 1))
    k = xp.arange(S, dtype=xp.int32, **on).reshape((1, 1, 1, S))
    return Frame(xp, device, q, k, L, S, L, S)


@dataclass(frozen=True, eq=False, repr=False)
class Bound(Value):
    """Which keys each query sees, for given L and S.

    Attributes
    ----------
    spans : Spans
        Intervals in the bound form.
    bits : Bits or None
        One bit a pair, where intervals don't say all.
    """

    spans: Spans
    bits: Bits | None = None

    def trimmed(self) -> Bound:
        """Drop the intervals that no query uses, where the values are seen."""
        return Bound(algebra.trimmed(self.spans), self.bits)

    def dense(self, L: int, S: int, queries: Any = None) -> Any:
        """Write out bool `(B|1, H|1, L|1, S)`, or only the rows that `queries` selects."""
        spans = self.spans
        if queries is not None and spans.start.shape[-2] > 1:
            spans = Spans(spans.start[..., queries, :], spans.stop[..., queries, :])
        xp = xp_of(spans.start)
        k = frame_of(0, S, xp, spans.start.device if xp.__name__.endswith("torch") else None).k
        seen = algebra.cover(spans, k)
        return seen if self.bits is None else seen & self.bits.dense(S, queries)

    def empty_rows(self, L: int, S: int) -> Any:
        """Tell which queries see no key: bool `(B|1, H|1, L)`."""
        xp = xp_of(self.spans.start)
        if self.bits is None:
            empty = ~xp.any(self.spans.start < self.spans.stop, axis=-1)
        else:
            empty = ~xp.any(self.dense(L, S), axis=-1)
        return xp.broadcast_to(empty, (*empty.shape[:-1], L))


def _as_bits(bound: Bound, frame: Frame) -> Bits:
    """Write a bound mask as bits alone."""

    def rows(i: int, j: int) -> Any:
        spans = bound.spans
        if spans.start.shape[-2] > 1:
            spans = Spans(spans.start[..., i:j, :], spans.stop[..., i:j, :])
        seen = algebra.cover(spans, frame.k)
        if bound.bits is None:
            return seen
        return seen & bound.bits.dense(frame.columns, slice(i, j))

    return pack(rows, frame.rows, frame.columns)


def both(a: Bound, b: Bound, frame: Frame) -> Bound:
    """AND of two bound masks: intervals meet, bits meet."""
    _agree(a, b)
    spans = algebra.intersect(a.spans, b.spans, frame.S)
    if a.bits is None or b.bits is None:
        return Bound(spans, a.bits or b.bits)
    return Bound(spans, a.bits & b.bits)


def either(a: Bound, b: Bound, frame: Frame) -> Bound:
    """OR of two bound masks: intervals where both are intervals, else bits."""
    _agree(a, b)
    if a.bits is None and b.bits is None:
        return Bound(algebra.union(a.spans, b.spans, frame.S))
    words = _as_bits(a, frame).words | _as_bits(b, frame).words
    return Bound(all_keys(frame), Bits(words))


def _agree(a: Bound, b: Bound) -> None:
    """Refuse parts made for batches or heads that differ."""
    for axis, letter in enumerate("BH"):
        for x in (a.spans.start, *([a.bits.words] if a.bits else [])):
            for y in (b.spans.start, *([b.bits.words] if b.bits else [])):
                n, m = x.shape[axis], y.shape[axis]
                if n != m and n != 1 and m != 1:
                    given = f"parts for {letter} = {n} and {letter} = {m}"
                    raise refusal("mask", given, f"parts that agree on axis {axis}, or are 1 there")


def negated(a: Bound, frame: Frame) -> Bound:
    """NOT of a bound mask, within [0, S)."""
    if a.bits is None:
        return Bound(algebra.complement(a.spans, frame.S))
    return Bound(all_keys(frame), Bits(~_as_bits(a, frame).words))


def from_rows(start: Any, stop: Any, frame: Frame) -> Bound:
    """Bind the intervals a mask gave for `frame`'s queries."""
    xp = frame.xp
    if framework(start) is None:
        start = full_like_shape(xp, frame.device, (1, 1, 1, 1), start, xp.int32)
    if framework(stop) is None:
        stop = full_like_shape(xp, frame.device, (1, 1, 1, 1), stop, xp.int32)
    return Bound(algebra.make_spans(start, stop, frame.S))


def all_keys(frame: Frame) -> Spans:
    """Give the spans of a mask that hides nothing."""
    zero = full_like_shape(frame.xp, frame.device, (1, 1, 1, 1), 0, frame.xp.int32)
    return algebra.make_spans(zero, zero + frame.S, frame.S)


def home_of(mask: Value, like: Any) -> tuple[str, Any]:
    """Find the array library and device a mask is bound in, and refuse a mixture."""
    kinds = {framework(x) for _, x in mask.arrays()} - {"numpy"}
    if like is not None:
        home = framework(like) or "numpy"
        if kinds - {home}:
            others = " and ".join(sorted(TITLES[str(kind)] for kind in kinds))
            raise refusal(
                "mask",
                f"arrays of {others} beside {TITLES[home]} queries",
                "NumPy arrays" if home == "numpy" else f"arrays of {TITLES[home]} or NumPy",
            )
        device = device_of(like)
        for name, x in mask.arrays():
            if home == "torch" and framework(x) == "torch" and x.device != device and x.device.type != "cpu":
                raise refusal("mask", f"{name} on {x.device}, q on {device}", "one device")
        return home, device
    if len(kinds) > 1:
        others = " and ".join(sorted(TITLES[str(kind)] for kind in kinds))
        raise refusal("mask", f"arrays of {others}", "arrays of one framework")
    home = str(kinds.pop()) if kinds else "numpy"
    for _, x in mask.arrays():
        if framework(x) == "torch":
            return home, x.device
    return home, None
