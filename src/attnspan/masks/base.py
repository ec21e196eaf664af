"""What a mask is: a set of visible (query, key) pairs, as a value that composes.

A new mask is one file: a frozen dataclass with `keep` (its definition, integers in, bool out)
and, where a few intervals a query say the same, `rows`. Everything else is here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from attnspan.arrays import (
    constant,
    is_array,
    xp_of,
)
from attnspan.arrays import namespace as namespace_of
from attnspan.errors import AttnspanError, refusal
from attnspan.masks import bound as algebra
from attnspan.masks import exact
from attnspan.masks.bits import pack
from attnspan.masks.bound import Bound, Frame, frame_of, home_of
from attnspan.masks.parameters import MaskSizes, check_axes, four, offset
from attnspan.masks.spans import Spans
from attnspan.shapes import check_sizes
from attnspan.values import Value, as_array, host

if TYPE_CHECKING:
    from attnspan.masks.sliced import Sliced

__all__ = ["And", "Mask", "Not", "Or", "as_mask"]


class Mask(Value):
    """Abstract base of all masks: a set of visible (query, key) pairs. True = may attend.

    A mask has no length until it is used: `dense`, `spans`, `picture` and the other questions take
    (L, S). Masks combine with ``&``, ``|`` and ``~``; a boolean array may stand where a mask may.
    ``==`` compares structure (arrays by identity), `equals` compares meaning.
    """

    __array_ufunc__: ClassVar[None] = None  # lets NumPy arrays leave `array & mask` to us

    # What a mask says of itself ------------------------------------------------------------

    @abstractmethod
    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        """Tell whether the query at position q sees the key at position k: the definition.

        Parameters
        ----------
        q, k : int or integer array
            Positions; arrays that broadcast, ``(L, 1)`` and ``(1, S)`` for all pairs.
        L, S : int, optional
            The lengths, for masks that speak of them.

        Returns
        -------
        bool or array
            The broadcast of q and k; parameters of one per sequence or head broadcast in front,
            as ``(B|1, H|1, L, S)``.
        """

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any] | None:
        """Give the keys the queries at positions q see as intervals, or None if few don't do.

        `q` is int32 ``(..., L, 1)``; the answer is (start, stop), numbers or integer arrays
        ``(B|1, H|1, L|1, R)``. They may reach beyond [0, S) or be empty; they must not overlap.
        """
        return None

    @property
    def has_length(self) -> bool:
        """Whether this mask was made for one pair of lengths, as arrays of pairs are."""
        return False

    def why_bits(self) -> list[str]:
        """Say which parts of this mask are kept as bits, and why; empty means all are spans."""
        reasons = []
        for value in self._parts():
            reasons += value.why_bits()
        if not self._parts() and type(self).rows is Mask.rows:
            reasons.append(f"{type(self).__name__} is no union of few intervals")
        return reasons

    def check(self, sizes: MaskSizes) -> None:
        """Refuse sizes this mask was not made for."""
        for part in self._parts():
            part.check(sizes)
        for f in fields(self):
            value = getattr(self, f.name)
            if is_array(value):
                check_axes(self, f.name, value, sizes)
            if f.name == "align":  # an alignment left unsaid is found before any compute
                offset(value, sizes.L, sizes.S, self)

    def _parts(self) -> list[Mask]:
        return [v for _, v in self._items() if isinstance(v, Mask)]

    # Binding -------------------------------------------------------------------------------

    def lower(self, frame: Frame) -> Bound:
        """Bind to a frame; arrays must already be in the frame's library."""
        rows = self.rows(frame.q, frame.L, frame.S)
        if rows is not None:
            return algebra.from_rows(*rows, frame)

        def block(i: int, j: int) -> Any:
            part = frame.between(i, j)
            seen = four(self.keep(part.q, part.k, part.L, part.S))
            if seen.shape[-1] != frame.columns:
                seen = frame.xp.broadcast_to(seen, (*seen.shape[:-1], frame.columns))
            return seen

        return Bound(algebra.all_keys(frame), pack(block, frame.rows, frame.columns))

    def bound(self, L: int, S: int, *, like: Any = None, sizes: MaskSizes | None = None) -> Bound:
        """Bind to lengths: intervals and, where they don't say all, bits.

        Parameters
        ----------
        L, S : int
            Queries and keys.
        like : array, optional
            An array whose library and device the answer takes; by default the mask's own.
        sizes : MaskSizes, optional
            Batch and heads too, where they are known, to be checked.

        Returns
        -------
        Bound
            `spans` (start, stop int32 ``(B|1, H|1, L|1, R)``) and `bits` (or None).
        """
        L, S = as_array(L), as_array(S)  # NumPy's integers become Python's
        check_sizes(L, S)
        self.check(sizes or MaskSizes(L, S))
        kind, device = home_of(self, like)
        xp = namespace_of(kind)
        native = self.map_arrays(lambda x: constant(x, xp, device))
        return native.lower(frame_of(L, S, xp, device)).trimmed()

    def visible(self, L: int, S: int, *, like: Any, sizes: MaskSizes, queries: Any = None) -> Any:
        """Write out `keep`, the definition, for the pairs of a call: bool (B|1, H|1, L|1, S|1).

        `queries` selects rows: an integer array or a slice. This is what eager formulas use; kernels
        ask `bound`.
        """
        self.check(sizes)
        kind, device = home_of(self, like)
        xp = namespace_of(kind)
        frame = frame_of(L, S, xp, device)
        q = frame.q if queries is None else frame.q[:, :, queries, :]
        native = self.map_arrays(lambda x: constant(x, xp, device))
        return four(native.keep(q, frame.k, L, S))

    # Questions -----------------------------------------------------------------------------

    def spans(self, L: int, S: int) -> Spans:
        """Give the visible keys of each query as intervals: start, stop int32 (B|1, H|1, L|1, R).

        Raises
        ------
        AttnspanError
            If intervals don't say all (see `why_bits`); `bound` gives intervals and bits.

        Examples
        --------
        >>> from attnspan.masks import Causal, SlidingWindow
        >>> s = (Causal() & SlidingWindow(back=1)).spans(3, 3)
        >>> s.start.ravel().tolist(), s.stop.ravel().tolist()
        ([0, 0, 1], [1, 2, 3])
        """
        bound = self.bound(L, S)
        if bound.bits is not None:
            reasons = "; ".join(self.why_bits())
            raise AttnspanError(f"{self!r} is kept as bits ({reasons}): ask bound(L, S)")
        return bound.spans

    def dense(self, L: int, S: int) -> Any:
        """Write the mask out: bool (B|1, H|1, L, S), True = may attend.

        Examples
        --------
        >>> from attnspan.masks import Causal
        >>> Causal().dense(2, 2)[0, 0].tolist()
        [[True, False], [True, True]]
        """
        seen = self.bound(L, S).dense(L, S)
        xp = xp_of(seen)
        return xp.broadcast_to(seen, (*seen.shape[:2], L, S))

    def empty_rows(self, L: int, S: int) -> Any:
        """Tell which queries see no key: bool (B|1, H|1, L)."""
        return self.bound(L, S).empty_rows(L, S)

    def visible_pairs(self, L: int, S: int) -> int:
        """Count the visible pairs, over the mask's own batch and heads.

        Examples
        --------
        >>> from attnspan.masks import Causal
        >>> Causal().visible_pairs(4, 4)
        10
        """
        return int(self.pairs_per_head(L, S).sum())

    def pairs_per_head(self, L: int, S: int) -> np.ndarray:
        """Count the visible pairs of each of the mask's own batch elements and heads: (B|1, H|1)."""
        return exact.pairs(host(self).bound(L, S), L, S)

    def equals(self, other: Mask, L: int, S: int) -> bool:
        """Tell whether two masks show the same pairs (sizes-1 axes broadcast).

        Examples
        --------
        >>> from attnspan.masks import Causal, SlidingWindow
        >>> Causal().equals(SlidingWindow(back=None, ahead=0), 5, 5)
        True
        """
        return exact.equal(host(self).bound(L, S), host(as_mask(other)).bound(L, S), L, S)

    def as_valid_lens(self, L: int, S: int) -> np.ndarray:
        """Give the one valid length per query that says the same as this mask.

        Returns
        -------
        ndarray
            int32 ``(B|1, H|1, L)``: query i sees the keys before its length.

        Raises
        ------
        AttnspanError
            If some query sees anything but a prefix of the keys; the message names one.

        Examples
        --------
        >>> from attnspan.masks import Causal
        >>> Causal().as_valid_lens(3, 3).ravel().tolist()
        [1, 2, 3]
        """
        return exact.valid_lens(host(self).bound(L, S), L, S)

    def picture(self, L: int, S: int, *, width: int = 64) -> str:
        """Draw the mask in text: queries down, keys across, █ visible, · hidden.

        A mask of more than `width` keys or queries is drawn in cells of several pairs, said in the
        first line: █ all visible, ▒ some, · none.

        Examples
        --------
        >>> from attnspan.masks import Causal
        >>> print(Causal().picture(3, 3))
        █··
        ██·
        ███
        """
        return exact.picture(host(self).bound(L, S), L, S, width)

    def slice(self, L: int, S: int, *, queries: slice = slice(None), keys: slice = slice(None)) -> Sliced:
        """Give the mask of a part of the queries and keys, for another device or a chunk.

        Positions stay those of the whole: a shift and a clip.

        Parameters
        ----------
        L, S : int
            Lengths of the whole.
        queries, keys : slice
            The part, in steps of 1.

        Examples
        --------
        >>> from attnspan.masks import Causal
        >>> print(Causal().slice(4, 4, queries=slice(2, 4)).picture(2, 4))
        ███·
        ████
        """
        from attnspan.masks.sliced import Sliced

        L, S = as_array(L), as_array(S)
        check_sizes(L, S)
        spots = []
        for name, part, n in (("queries", queries, L), ("keys", keys, S)):
            if not isinstance(part, slice):
                raise refusal(name, part, "a slice, such as slice(2, 4)")
            first, last, step = part.indices(n)
            if step != 1:
                raise refusal(name, f"a slice of step {step}", "a slice of step 1")
            spots.append((first, max(first, last)))
        return Sliced(self, (L, S), spots[0], spots[1])

    # Alignment -----------------------------------------------------------------------------

    def with_align(self, align: Any) -> Mask:
        """Fill in the alignment wherever it was left unsaid; a mask's own wins."""
        changes: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "align" and value is None:
                changes["align"] = align
            elif isinstance(value, Mask):
                changes[f.name] = value.with_align(align)
        return replace(self, **changes) if changes else self

    # Operators -----------------------------------------------------------------------------

    def __and__(self, other: Any) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Any) -> Mask:
        return Or(self, as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return And(as_mask(other), self)

    def __ror__(self, other: Any) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise AttnspanError(
            "a mask has no truth value: combine masks with & (both), | (either) and ~ (not) "
            "instead of and, or, not"
        )


@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    """Both masks: ``left & right``."""

    left: Mask
    right: Mask

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return self.left.keep(q, k, L, S) & self.right.keep(q, k, L, S)

    def lower(self, frame: Frame) -> Bound:
        return algebra.both(self.left.lower(frame), self.right.lower(frame), frame)

    def __repr__(self) -> str:
        return f"{_grouped(self.left, Or)} & {_grouped(self.right, (Or, And))}"


@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    """Either mask: ``left | right``."""

    left: Mask
    right: Mask

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return self.left.keep(q, k, L, S) | self.right.keep(q, k, L, S)

    def lower(self, frame: Frame) -> Bound:
        return algebra.either(self.left.lower(frame), self.right.lower(frame), frame)

    def __repr__(self) -> str:
        return f"{self.left!r} | {_grouped(self.right, Or)}"


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """The other pairs: ``~mask``."""

    mask: Mask

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        seen = self.mask.keep(q, k, L, S)
        return not seen if isinstance(seen, bool) else ~seen

    def lower(self, frame: Frame) -> Bound:
        return algebra.negated(self.mask.lower(frame), frame)

    def __repr__(self) -> str:
        return f"~{_grouped(self.mask, (And, Or))}"


def _grouped(mask: Mask, kinds: Any) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def as_mask(x: Any, argument: str = "mask") -> Mask:
    """Take a mask, or a boolean array that stands for one.

    Raises
    ------
    ArgumentError
        For a float array (a bias, or 0/1 numbers), an integer array that is not seen to hold only
        0 and 1 (lengths? document ids?), and anything else.
    """
    from attnspan.masks.dense import Dense

    if isinstance(x, Mask):
        return x
    return Dense(x) if is_array(x) or isinstance(x, (list, tuple)) else _refuse_mask(x, argument)


def _refuse_mask(x: Any, argument: str) -> Mask:
    if isinstance(x, type):
        raise refusal(argument, f"the class {x.__name__}", "a mask", f"write {x.__name__}(...)")
    raise refusal(
        argument,
        x,
        "a mask of attnspan.masks or a boolean array",
        "None means that every query sees every key",
    )
