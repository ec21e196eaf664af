"""A rule of your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnspan.errors import refusal
from attnspan.masks.base import Mask

__all__ = ["Predicate"]


@dataclass(frozen=True, eq=False, repr=False)
class Predicate(Mask):
    """Each query sees the keys for which fn(q, k) holds.

    Parameters
    ----------
    fn : callable
        Gets integer arrays that broadcast to (L, S), in the array library of the call, and returns
        booleans; use operators (``&``, ``|``, ``<``), not ``and`` and ``or``.
    name : str, optional
        How it prints.

    Examples
    --------
    >>> print(Predicate(lambda q, k: (q + k) % 3 == 0, name="thirds").picture(3, 3))
    █··
    ··█
    ·█·
    """

    fn: Callable[[Any, Any], Any] = field(metadata={"positional": True})
    name: str | None = None

    def _check(self) -> None:
        if not callable(self.fn):
            raise refusal("fn", self.fn, "a function fn(q, k) of integer arrays that returns booleans")

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        seen = self.fn(q, k)
        if not isinstance(seen, bool) and "bool" not in str(getattr(seen, "dtype", "")):
            raise refusal("Predicate.fn", seen, "booleans from fn(q, k)", "compare, as in q - k < 3")
        return seen & (k == k)
