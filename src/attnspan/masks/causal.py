"""No look into the future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.masks.base import Mask
from attnspan.masks.parameters import checked_align, offset

__all__ = ["Causal"]


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Each query sees the keys up to its own position: k ≤ q + align.

    Parameters
    ----------
    align : {"top_left", "bottom_right"}, int or integer array, optional
        The key position at which query 0 stands; must be said where L ≠ S.

    Raises
    ------
    ArgumentError
        If L ≠ S and the alignment is unsaid.

    Examples
    --------
    >>> print(Causal(align="bottom_right").picture(2, 4))
    ███·
    ████
    """

    align: Any = None

    def _check(self) -> None:
        self._set("align", checked_align(self.align))

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return k <= q + offset(self.align, L, S, self)

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        return 0, q + offset(self.align, L, S, self) + 1
