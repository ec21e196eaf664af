"""Packed documents said by offsets: intervals by construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.arrays import (
    device_of,
    framework,
    full_like_shape,
    is_array,
    is_integer,
    look,
    search_sorted,
    xp_of,
)
from attnspan.errors import describe, refusal
from attnspan.masks.base import Mask
from attnspan.masks.bound import Bound, Frame
from attnspan.masks.documents import check_each, checked_each, shifted
from attnspan.masks.parameters import MaskSizes
from attnspan.masks.spans import make_spans
from attnspan.values import show

__all__ = ["Packed"]


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Each query sees the keys of its own document: offsets[n] ≤ q, k < offsets[n + 1].

    Made by `Documents.from_lengths` and `Documents.from_offsets`.

    Parameters
    ----------
    offsets, key_offsets : integer array
        ``(N + 1,)`` or ``(B, N + 1)``: document n holds the positions offsets[n] up to
        offsets[n + 1].
    each : Mask, optional
        A mask run inside each document, in its own ranks and counts.
    exact : bool
        Whether the last offset must be the length; else what lies behind is padding.
    """

    offsets: Any = field(metadata={"positional": True})
    key_offsets: Any = None
    each: Mask | None = None
    exact: bool = False

    def _check(self) -> None:
        for name in ("offsets", "key_offsets"):
            x = getattr(self, name)
            if x is None and name == "key_offsets":
                continue
            if not is_array(x) or not is_integer(x) or len(x.shape) not in (1, 2) or not x.shape[-1]:
                raise refusal(name, x, "an integer array (N + 1,) or (B, N + 1)")
            seen = look(x)
            if seen is None or not seen.size:
                continue
            if (seen[..., 0] != 0).any() or (seen[..., 1:] < seen[..., :-1]).any():
                text = str(seen.tolist()) if seen.size < 32 else describe(x)
                raise refusal(name, text, "offsets that start at 0 and do not decrease")
        if self.key_offsets is not None and self.key_offsets.shape[-1] != self.offsets.shape[-1]:
            raise refusal(
                "key_offsets", self.key_offsets, f"as many documents as offsets {describe(self.offsets)}"
            )
        self._set("each", checked_each(self.each, self.key_offsets is not None))

    @property
    def _keys(self) -> Any:
        return self.offsets if self.key_offsets is None else self.key_offsets

    def __repr__(self) -> str:
        parts = []
        for name, x in (("", self.offsets), ("key_", self.key_offsets)):
            if x is not None:
                text = show(x if self.exact else x[..., 1:] - x[..., :-1])
                parts.append(f"{name}{'offsets' if self.exact else 'lengths'}={text}" if name else text)
        if self.each is not None:
            parts.append(f"each={self.each!r}")
        return f"Documents.{'from_offsets' if self.exact else 'from_lengths'}({', '.join(parts)})"

    @property
    def has_length(self) -> bool:
        return True

    def check(self, sizes: MaskSizes) -> None:
        if self.key_offsets is None and sizes.L != sizes.S:
            raise refusal(
                "Documents",
                f"one list of lengths for {sizes.L} queries and {sizes.S} keys",
                "the documents' key lengths too, where the lengths differ",
            )
        for name, x, n in (("offsets", self.offsets, sizes.L), ("key_offsets", self._keys, sizes.S)):
            if len(x.shape) == 2 and sizes.B is not None and x.shape[0] not in (1, sizes.B):
                raise refusal(name, x, f"B = {sizes.B} (or 1) on axis 0")
            seen = look(x)
            if seen is None or not seen.size:
                continue
            ends = seen[..., -1]
            if ends.max() > n or (self.exact and ends.min() != n):
                what = f"documents that end at {n}" if self.exact else f"documents that end at {n} or before"
                worst = int(ends.max() if ends.max() > n else ends.min())
                raise refusal(f"Documents {name}", f"documents that end at {worst}", what)
        check_each(self.each, sizes)

    def with_align(self, align: Any) -> Mask:
        return self  # the alignment of `each` speaks of a document, not of the call

    def why_bits(self) -> list[str]:
        return [] if self.each is None else self.each.why_bits()

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        doc, key_doc = _which(self.offsets, q), _which(self._keys, k)
        last = self.offsets.shape[-1] - 1
        seen = (doc == key_doc) & (doc < last)
        if self.each is None or last == 0:
            return seen
        xp = xp_of(self.offsets)
        doc, key_doc = (xp.clip(x, 0, last - 1) for x in (doc, key_doc))
        first, key_first = _table(self.offsets, doc), _table(self._keys, key_doc)
        count = _table(self.offsets, doc + 1) - first
        key_count = _table(self._keys, doc + 1) - _table(self._keys, doc)
        return seen & self.each.keep(q - first, k - key_first, count, key_count)

    def lower(self, frame: Frame) -> Bound:
        last = self.offsets.shape[-1] - 1
        doc = _which(self.offsets, frame.q)
        inside = doc < last
        if last == 0:
            zero = doc * 0
            return Bound(make_spans(zero, zero, frame.S))
        doc = frame.xp.clip(doc, 0, last - 1)
        first = _table(self._keys, doc)
        count = (_table(self._keys, doc + 1) - first) * inside
        if self.each is None:
            return Bound(make_spans(first, first + count, frame.S))
        begin = _table(self.offsets, doc)
        key_doc = frame.xp.clip(_which(self._keys, frame.k), 0, last - 1)
        part = Frame(
            frame.xp, frame.device, frame.q - begin, frame.k - _table(self._keys, key_doc),
            _table(self.offsets, doc + 1) - begin, count, frame.rows, frame.columns,
        )  # fmt: skip
        return shifted(self.each.lower(part), first, count, frame)


def _which(offsets: Any, at: Any) -> Any:
    """Number the document that holds each position; positions behind the last get its number + 1.

    Gives `(B|1, 1, L, 1)` or `(B|1, 1, 1, S)`, as `at` has them.
    """
    xp = xp_of(offsets)
    if isinstance(at, int):
        at = full_like_shape(xp, device_of(offsets), (1,), at, xp.int32)
    rows = offsets if len(offsets.shape) == 2 else offsets[None, :]
    flat = at.reshape((1, -1))
    wanted = xp.broadcast_to(flat, (rows.shape[0], flat.shape[-1]))
    found = search_sorted(rows[:, 1:], wanted, "right") if rows.shape[-1] > 1 else xp.zeros_like(wanted)
    return found.reshape((rows.shape[0], 1, *((1, 1, *at.shape)[-2:])))


def _table(offsets: Any, doc: Any) -> Any:
    """Look the offsets of documents up; `doc` comes from `_which`, one row a sequence."""
    if len(offsets.shape) == 1:
        return offsets[doc]
    xp = xp_of(offsets)
    B = max(offsets.shape[0], doc.shape[0])
    flat = xp.broadcast_to(doc, (B, *doc.shape[1:])).reshape((B, doc.shape[-2] * doc.shape[-1]))
    rows = xp.broadcast_to(offsets, (B, offsets.shape[-1]))
    at = xp.astype(flat, xp.int64) if framework(flat) == "torch" else flat
    found = xp.take_along_axis(rows, at, axis=-1)
    return found.reshape((B, *doc.shape[1:]))
