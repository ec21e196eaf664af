"""Neighbours only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import is_array
from attnspan.errors import refusal
from attnspan.masks.base import Mask
from attnspan.masks.parameters import FAR, checked_align, counted, four, offset
from attnspan.values import as_array

__all__ = ["SlidingWindow"]


@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """Each query sees itself and its neighbours: q + align - back ≤ k ≤ q + align + ahead.

    A window counts *neighbours*: ``back=2, ahead=0`` keeps 3 keys.

    Parameters
    ----------
    back, ahead : int or integer array, or None
        Neighbours before and after the query; None is no limit.
    align : {"top_left", "bottom_right"}, int or integer array, optional
        The key position at which query 0 stands; must be said where L ≠ S.

    Raises
    ------
    ArgumentError
        If a count is negative, or L ≠ S and the alignment is unsaid.

    Examples
    --------
    >>> print(SlidingWindow(back=1).picture(4, 4))
    █···
    ██··
    ·██·
    ··██
    """

    back: Any
    ahead: Any = 0
    align: Any = None

    def _check(self) -> None:
        for name in ("back", "ahead"):
            value = getattr(self, name)
            if value is not None:
                what = "a number of neighbours, 0 or more, or None for no limit"
                self._set(name, counted(name, value, what=what))
        self._set("align", checked_align(self.align))

    @classmethod
    def last(cls, keys: int, *, align: Any = None) -> SlidingWindow:
        """Keep the last `keys` keys, the query's own among them: ``back = keys - 1``.

        Examples
        --------
        >>> SlidingWindow.last(256)
        SlidingWindow(back=255)
        """
        count: Any = as_array(keys)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            given = repr(count) if isinstance(count, str) else count
            raise refusal("keys", given, "1 key or more (the query's own counts)")
        return cls(back=count - 1, align=align)

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        position = q + offset(self.align, L, S, self)
        if self.back is None:
            return (k == k) if self.ahead is None else (k <= position + _count(self.ahead))
        seen = k >= position - _count(self.back)
        return seen if self.ahead is None else seen & (k <= position + _count(self.ahead))

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        position = q + offset(self.align, L, S, self)
        start = 0 if self.back is None else position - _count(self.back)
        stop = S if self.ahead is None else position + _count(self.ahead) + 1
        return start, stop


def _count(n: Any) -> Any:
    return four(n) if is_array(n) else min(n, FAR)
