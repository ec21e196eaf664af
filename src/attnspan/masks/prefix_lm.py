"""A prefix that everybody sees, then causal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.masks.base import Mask
from attnspan.masks.parameters import MaskSizes, checked_align, counted, four, offset, within

__all__ = ["PrefixLM"]


@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Mask):
    """Each query sees the prefix and the keys up to its own position: k < length or k ≤ q + align.

    Parameters
    ----------
    length : int or integer array
        Keys of the prefix; 0 and 1 are causal.
    align : {"top_left", "bottom_right"}, int or integer array, optional
        The key position at which query 0 stands; must be said where L ≠ S.

    Raises
    ------
    ArgumentError
        If a length is seen to lie outside [0, S], or L ≠ S and the alignment is unsaid.

    Examples
    --------
    >>> print(PrefixLM(2).picture(4, 4))
    ██··
    ██··
    ███·
    ████
    """

    length: Any = field(metadata={"positional": True})
    align: Any = None

    def _check(self) -> None:
        self._set("length", counted("length", self.length))
        self._set("align", checked_align(self.align))

    def check(self, sizes: MaskSizes) -> None:
        super().check(sizes)
        within("PrefixLM.length", self.length, sizes.S, "S")

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return (k <= q + offset(self.align, L, S, self)) | (k < four(self.length))

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        own, prefix = q + offset(self.align, L, S, self) + 1, four(self.length)
        # the larger of the two, with operators alone: numbers and arrays alike
        return 0, own + (prefix - own) * (prefix > own)
