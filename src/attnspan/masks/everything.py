"""All pairs, and none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.masks.base import Mask

__all__ = ["Everything", "Nothing"]


@dataclass(frozen=True, eq=False, repr=False)
class Everything(Mask):
    """Each query sees every key.

    Examples
    --------
    >>> print(Everything().picture(1, 3))
    ███
    """

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return k == k

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        return 0, S


@dataclass(frozen=True, eq=False, repr=False)
class Nothing(Mask):
    """No query sees any key.

    Examples
    --------
    >>> print(Nothing().picture(1, 3))
    ···
    """

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return k != k

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        return 0, 0
