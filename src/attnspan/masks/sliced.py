"""A part of the queries and keys of another mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.errors import refusal
from attnspan.masks.base import Mask
from attnspan.masks.bound import Bound, Frame
from attnspan.masks.parameters import MaskSizes
from attnspan.masks.spans import make_spans

__all__ = ["Sliced"]


@dataclass(frozen=True, eq=False, repr=False)
class Sliced(Mask):
    """The queries and keys of a part see what they see in the whole: keep(q + q₀, k + k₀).

    Made by `Mask.slice`: for the chunk of queries and keys that another device or step holds.

    Parameters
    ----------
    mask : Mask
        The whole mask.
    whole : tuple of int
        (L, S) of the whole.
    queries, keys : tuple of int
        First and one past the last of the part.

    Examples
    --------
    >>> from attnspan.masks import Causal
    >>> print(Causal().slice(6, 6, queries=slice(2, 4), keys=slice(1, 6)).picture(2, 5))
    ██···
    ███··
    """

    mask: Mask = field(metadata={"positional": True})
    whole: tuple[int, int] = field(metadata={"positional": True})
    queries: tuple[int, int] = field(metadata={"positional": True})
    keys: tuple[int, int] = field(metadata={"positional": True})

    @property
    def has_length(self) -> bool:
        return True

    def check(self, sizes: MaskSizes) -> None:
        L, S = (part[1] - part[0] for part in (self.queries, self.keys))
        if (L, S) != (sizes.L, sizes.S):
            raise refusal(
                "mask",
                f"a slice made for {L} queries and {S} keys",
                f"one for {sizes.L} queries and {sizes.S} keys",
            )
        self.mask.check(MaskSizes(*self.whole, sizes.B, sizes.H))

    def with_align(self, align: Any) -> Mask:
        return self  # positions are those of the whole, where the alignment had to be said

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return self.mask.keep(q + self.queries[0], k + self.keys[0], *self.whole)

    def lower(self, frame: Frame) -> Bound:
        first = self.keys[0]
        outer = Frame(
            frame.xp, frame.device, frame.q + self.queries[0], frame.k + first, *self.whole,
            frame.rows, frame.columns,
        )  # fmt: skip
        inner = self.mask.lower(outer)
        spans = make_spans(inner.spans.start - first, inner.spans.stop - first, frame.S)
        return Bound(spans, inner.bits)

    def why_bits(self) -> list[str]:
        return self.mask.why_bits()
