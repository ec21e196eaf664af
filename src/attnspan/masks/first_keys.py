"""Keys that everybody sees: attention sinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.masks.base import Mask
from attnspan.masks.parameters import FAR, counted, four

__all__ = ["FirstKeys"]


@dataclass(frozen=True, eq=False, repr=False)
class FirstKeys(Mask):
    """Each query sees the first keys: k < count.

    Meant for ``|``: ``(SlidingWindow(back=255) | FirstKeys(4)) & Causal()`` keeps four sink keys in
    sight [1]_.

    Parameters
    ----------
    count : int or integer array
        How many keys; more than S is all of them.

    References
    ----------
    .. [1] Xiao et al., "Efficient streaming language models with attention sinks", 2023.

    Examples
    --------
    >>> from attnspan.masks import Causal, SlidingWindow
    >>> print(((SlidingWindow(back=1) | FirstKeys(1)) & Causal()).picture(4, 4))
    █···
    ██··
    ███·
    █·██
    """

    count: Any = field(metadata={"positional": True})

    def _check(self) -> None:
        self._set("count", counted("count", self.count))

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        return k < self._count

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        return 0, self._count

    @property
    def _count(self) -> Any:
        return min(self.count, FAR) if isinstance(self.count, int) else four(self.count)
