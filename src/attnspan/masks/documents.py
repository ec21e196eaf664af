"""Packed documents: the same id sees the same id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnspan.arrays import (
    arange,
    constant,
    cumulative_max,
    cumulative_sum,
    device_of,
    is_array,
    is_integer,
    look,
    search_sorted,
    xp_of,
)
from attnspan.errors import describe, refusal
from attnspan.masks.base import Mask
from attnspan.masks.bound import Bound, Frame
from attnspan.masks.parameters import MaskSizes
from attnspan.masks.spans import make_spans
from attnspan.shapes import LIMIT
from attnspan.values import as_array

__all__ = ["Documents"]


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Each query sees the keys of its own document: ids[q] = key_ids[k] ≥ 0.

    A negative id is padding, which sees nothing and is seen by nothing. Where each document is
    one run of keys, the mask is one interval a query; a document that returns, or ids whose values
    are not seen (traced), are kept as bits unless ``contiguous=True`` says that each is one run.

    Parameters
    ----------
    ids : integer array
        ``(L,)`` or ``(B, L)``: the document of each query.
    key_ids : integer array, optional
        ``(S,)`` or ``(B, S)``: the document of each key; by default `ids`. Needed where L ≠ S.
    each : Mask, optional
        A mask run inside each document, in the document's own ranks and counts (its alignment
        speaks of the document; with `key_ids` it must be said).
    contiguous : bool, optional
        Whether each document is one run of keys; None looks where values are seen.

    Raises
    ------
    ArgumentError
        If the ids are no integers, were made for other lengths, or are seen to return although
        ``contiguous=True``.

    Examples
    --------
    >>> from attnspan.masks import Causal
    >>> print((Documents([0, 0, 1, 1]) & Causal()).picture(4, 4))
    █···
    ██··
    ··█·
    ··██
    >>> Documents.from_lengths([2, 2]).equals(Documents([0, 0, 1, 1]), 4, 4)
    True
    """

    ids: Any = field(metadata={"positional": True})
    key_ids: Any = None
    each: Mask | None = None
    contiguous: bool | None = None

    def _check(self) -> None:
        for name in ("ids", "key_ids"):
            value = as_array(getattr(self, name))
            if value is None and name == "key_ids":
                continue
            if not is_array(value) or not is_integer(value) or len(value.shape) not in (1, 2):
                raise refusal(f"Documents.{name}", value, "an integer array (L,) or (B, L)")
            seen = look(value)
            if seen is not None and seen.size and max(-int(seen.min()), int(seen.max())) >= 2**31:
                raise refusal(
                    f"Documents.{name}",
                    f"{describe(value)} with values from {seen.min()} to {seen.max()}",
                    "ids that fit int32",
                    "number the documents: np.unique(ids, return_inverse=True)[1]",
                )
            self._set(name, value)
        self._set("each", checked_each(self.each, self.key_ids is not None))
        if self.contiguous not in (None, True, False) or not isinstance(self.contiguous, (bool, type(None))):
            raise refusal("contiguous", repr(self.contiguous), "True, False or None")
        if self.contiguous is None:
            keys = look(self._keys)
            if keys is not None:
                self._set("contiguous", _one_run_each(keys))
                object.__setattr__(self, "_decided", True)
        elif self.contiguous:
            keys = look(self._keys)
            if keys is not None and not _one_run_each(keys):
                raise refusal(
                    "contiguous",
                    "True, for documents that return after another document",
                    "documents that are one run of keys each",
                    "leave it out: such masks are kept as bits",
                )

    @property
    def _keys(self) -> Any:
        return self.ids if self.key_ids is None else self.key_ids

    @classmethod
    def from_lengths(cls, lengths: Any, key_lengths: Any = None, each: Mask | None = None) -> Mask:
        """Make the mask of documents that stand one after the other, by their lengths.

        The positions behind the last document are padding. Stays intervals when traced.

        Parameters
        ----------
        lengths, key_lengths : integer array
            ``(N,)`` or ``(B, N)``: queries, and keys where they differ, of each document.
        each : Mask, optional
            A mask run inside each document.
        """
        from attnspan.masks.packed import Packed

        return Packed(_offsets(lengths, "lengths"), _offsets(key_lengths, "key_lengths"), each)

    @classmethod
    def from_offsets(cls, offsets: Any, key_offsets: Any = None, each: Mask | None = None) -> Mask:
        """Make the mask of documents that stand one after the other, by where they start.

        Parameters
        ----------
        offsets, key_offsets : integer array
            ``(N + 1,)`` or ``(B, N + 1)``: starts at 0, does not decrease, ends at L (at S).
        each : Mask, optional
            A mask run inside each document.
        """
        from attnspan.masks.packed import Packed

        return Packed(as_array(offsets), as_array(key_offsets), each, exact=True)

    def __repr__(self) -> str:
        if not self.__dict__.get("_decided"):
            return super().__repr__()
        plain = Documents.__new__(Documents)
        for name, value in (*self._items(), ("contiguous", None)):
            object.__setattr__(plain, name, value)
        return Mask.__repr__(plain)

    @property
    def has_length(self) -> bool:
        return True

    def check(self, sizes: MaskSizes) -> None:
        if self.key_ids is None and sizes.L != sizes.S:
            raise refusal(
                "Documents",
                f"ids {describe(self.ids)} for {sizes.L} queries and {sizes.S} keys",
                "key_ids= where the lengths differ",
            )
        for name, x, n in (("ids", self.ids, sizes.L), ("key_ids", self._keys, sizes.S)):
            if x.shape[-1] != n:
                raise refusal(f"Documents.{name}", x, f"one id per position, {n} of them")
            if len(x.shape) == 2 and sizes.B is not None and x.shape[0] not in (1, sizes.B):
                raise refusal(f"Documents.{name}", x, f"B = {sizes.B} (or 1) on axis 0")
        check_each(self.each, sizes)

    def with_align(self, align: Any) -> Mask:
        return self  # the alignment of `each` speaks of a document, not of the call

    def why_bits(self) -> list[str]:
        if self.contiguous:
            return [] if self.each is None else self.each.why_bits()
        if self.contiguous is None:
            return ["Documents: ids are not seen (traced); contiguous=True would keep intervals"]
        return ["Documents: a document returns after another"]

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        ids, key_ids = _gather(self.ids, q), _gather(self._keys, k)
        seen = (ids == key_ids) & (ids >= 0)
        if self.each is None:
            return seen
        rank, count = _ranks(self.ids, self.ids)
        key_rank, _ = _ranks(self._keys, self._keys)
        _, key_count = _ranks(self.ids, self._keys)
        inside = self.each.keep(
            _gather(rank, q), _gather(key_rank, k), _gather(count, q), _gather(key_count, q)
        )
        return seen & inside

    def lower(self, frame: Frame) -> Bound:
        if not self.contiguous:
            return super().lower(frame)
        if self.key_ids is None:
            own_first, own_count = _own_runs(self.ids)
            first, count = _gather(own_first, frame.q), _gather(own_count, frame.q)
        else:
            first, count = _runs(_gather(self.ids, frame.q), self._keys)
        if self.each is None:
            return Bound(make_spans(first, first + count, frame.S))
        rank, own = _ranks(self.ids, self.ids)
        key_rank, _ = _ranks(self._keys, self._keys)
        part = Frame(
            frame.xp, frame.device, _gather(rank, frame.q), _gather(key_rank, frame.k),
            _gather(own, frame.q), count, frame.rows, frame.columns,
        )  # fmt: skip
        return shifted(self.each.lower(part), first, count, frame)


def shifted(inner: Bound, first: Any, count: Any, frame: Frame) -> Bound:
    """Move a document's own spans to where the document starts; outside it nothing is seen."""
    start, stop = inner.spans.start, inner.spans.stop
    hidden = (start >= stop) | (count <= 0)
    xp = frame.xp
    start, stop = xp.where(hidden, 0, start + first), xp.where(hidden, 0, stop + first)
    return Bound(make_spans(start, stop, frame.S), inner.bits)


def checked_each(each: Any, two_lengths: bool) -> Mask | None:
    """Check the mask run inside each document, and say its alignment where only one is possible."""
    if each is None:
        return None
    if not isinstance(each, Mask):
        raise refusal("each", each, "a mask, such as Causal()")
    fixed = [m for m in each.values() if getattr(m, "has_length", False)]
    if fixed:
        name = type(fixed[0]).__name__
        raise refusal(
            "each", repr(each), f"a mask that fits every document, not one made for lengths ({name})"
        )
    unsaid = [m for m in each.values() if hasattr(m, "align") and m.align is None]
    if two_lengths and unsaid:
        raise refusal(
            "each",
            repr(each),
            "its alignment said: with key lengths of their own, documents have L != S",
            f'write {type(unsaid[0]).__name__}(align="bottom_right") or "top_left"',
        )
    return each if two_lengths else each.with_align("top_left")


def check_each(each: Mask | None, sizes: MaskSizes) -> None:
    """Refuse an inner mask of other batches or heads; a document may be shorter than its lengths."""
    if each is not None:
        each.check(MaskSizes(LIMIT, LIMIT, sizes.B, sizes.H))


def _offsets(lengths: Any, name: str) -> Any:
    lengths = as_array(lengths)
    if lengths is None:
        return None
    if not is_array(lengths) or not is_integer(lengths) or len(lengths.shape) not in (1, 2):
        raise refusal(name, lengths, "an integer array (N,) or (B, N)")
    seen = look(lengths)
    if seen is not None and seen.size and seen.min() < 0:
        raise refusal(name, f"{describe(lengths)} holding {seen.min()}", "lengths of 0 or more")
    xp = xp_of(lengths)
    lengths = constant(lengths, xp, device_of(lengths))  # wide enough for their sum
    zero = xp.zeros_like(lengths[..., :1]) if lengths.shape[-1] else xp.zeros_like(lengths)
    if not lengths.shape[-1]:
        return np.zeros(1, np.int32)
    return xp.concat([zero, cumulative_sum(lengths)], axis=-1)


def _gather(table: Any, at: Any) -> Any:
    """Look positions up in a table (N,) or (B, N), lined up with (B, H, L, S)."""
    if isinstance(at, int):
        return table[..., at].reshape(-1, 1, 1, 1) if len(table.shape) == 2 else table[at]
    if len(table.shape) == 1:
        return table[at]
    rows, columns = (at.shape[-2], at.shape[-1]) if len(at.shape) >= 2 else (1, at.shape[0])
    return table[:, at.reshape(-1)].reshape((table.shape[0], 1, rows, columns))


def _one_run_each(ids: np.ndarray) -> bool:
    """Tell whether no document returns, in every sequence."""
    ids = np.atleast_2d(ids)
    if not ids.shape[-1]:
        return True
    begins = np.concatenate([np.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    for row, first in zip(ids, begins, strict=True):
        heads = row[first & (row >= 0)]
        if heads.size != np.unique(heads).size:
            return False
    return True


def _sorted(ids: Any) -> tuple[Any, Any, Any]:
    xp = xp_of(ids)
    rows = ids if len(ids.shape) == 2 else ids[None, :]
    order = xp.argsort(rows, axis=-1, stable=True)
    return xp, order, xp.take_along_axis(rows, order, axis=-1)


def _own_runs(ids: Any) -> tuple[Any, Any]:
    """Find where each position's run of one id starts, and how long it is (0 for padding)."""
    xp = xp_of(ids)
    N = ids.shape[-1]
    spot = arange(N, ids, xp.int32)
    edge = xp.ones_like(ids[..., :1], dtype=xp.bool)
    changes = ids[..., 1:] != ids[..., :-1]
    begins = xp.concat([edge, changes], axis=-1)[..., :N]
    ends = xp.concat([changes, edge], axis=-1)[..., :N]
    first = cumulative_max(xp.where(begins, spot, 0))
    left = cumulative_max(xp.where(xp.flip(ends, axis=-1), spot, 0))
    stop = N - xp.flip(left, axis=-1)
    return first, (stop - first) * (ids >= 0)


def _runs(ids: Any, keys: Any) -> tuple[Any, Any]:
    """Find the first key and the number of keys of each query's document, as (B|1, 1, L, 1)."""
    xp, order, ordered = _sorted(keys)
    rows = ids.shape[0] if len(ids.shape) == 4 else 1
    B = max(rows, ordered.shape[0])
    wanted = xp.broadcast_to(ids.reshape((rows, ids.shape[-2])), (B, ids.shape[-2]))
    order, ordered = (xp.broadcast_to(x, (B, x.shape[-1])) for x in (order, ordered))
    if ordered.shape[-1] == 0:
        zero = xp.zeros_like(wanted)[:, None, :, None]
        return zero, zero
    low, high = (search_sorted(ordered, wanted, side) for side in ("left", "right"))
    last = ordered.shape[-1] - 1
    first = xp.take_along_axis(order, xp.astype(xp.clip(low, 0, last), order.dtype), axis=-1)
    count = xp.where(wanted >= 0, high - low, 0)
    return xp.astype(first, xp.int32)[:, None, :, None], count[:, None, :, None]


def _ranks(ids: Any, others: Any) -> tuple[Any, Any]:
    """Rank each position within its own document, and count that document's places in `others`.

    Both tables are (N,) or (B, N) like `ids`.
    """
    xp, order, ordered = _sorted(ids)
    rows = ids if len(ids.shape) == 2 else ids[None, :]
    if not rows.shape[-1]:
        return ids, ids
    place = xp.argsort(order, axis=-1, stable=True)
    rank = xp.astype(place, xp.int32) - search_sorted(ordered, rows, "left")
    _, _, pool = _sorted(others)
    B = max(rows.shape[0], pool.shape[0])
    pool = xp.broadcast_to(pool, (B, pool.shape[-1]))
    wanted = xp.broadcast_to(rows, (B, rows.shape[-1]))
    count = search_sorted(pool, wanted, "right") - search_sorted(pool, wanted, "left")
    if len(ids.shape) == 1 and B == 1:
        return rank[0], count[0]
    return (rank[0] if len(ids.shape) == 1 else rank), count
