"""The dot product, plain and scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attnspan.scores.base import DotForm, Score, aligned, checked_number, xp_of
from attnspan.shapes import Sizes

__all__ = ["Dot", "ScaledDot"]


@dataclass(frozen=True, eq=False, repr=False)
class Dot(Score):
    r"""The dot product: a = q·k [1]_.

    References
    ----------
    .. [1] Luong et al., "Effective approaches to attention-based neural machine translation", 2015,
       equation 8 (dot).

    Examples
    --------
    >>> import numpy as np
    >>> float(Dot().pair(np.array([1.0, 2.0]), np.array([3.0, 4.0])))
    11.0
    """

    def pair(self, q: Any, k: Any) -> Any:
        return xp_of(q).sum(q * k, axis=-1)

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        return DotForm(q, k)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledDot(Score):
    r"""The scaled dot product: a = scale · q·k, with scale 1/√D unless given [1]_.

    Parameters
    ----------
    scale : float or array, optional
        A number or 0-d array, ``(B,)`` one per sequence, ``(B|1, H|1)`` one per head.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> float(ScaledDot().pair(np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 0.0, 0.0, 1.0])))
    2.5
    """

    scale: Any = None

    def _check(self) -> None:
        if self.scale is not None:
            self._set("scale", checked_number("scale", self.scale))

    def pair(self, q: Any, k: Any) -> Any:
        s = xp_of(q).sum(q * k, axis=-1)
        if self.scale is None:
            return s / math.sqrt(max(q.shape[-1], 1))
        return s * aligned(self.scale, s, "scale")

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        if self.scale is None:
            return DotForm(q, k, 1 / math.sqrt(max(sizes.Dq, 1)))
        return DotForm(q, k, aligned(self.scale, q, "scale", sizes))
