"""The angle between query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import stop_gradient
from attnspan.scores.base import DotForm, Score, aligned, checked_number, xp_of
from attnspan.shapes import Sizes

__all__ = ["Cosine"]


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Score):
    r"""The cosine of the angle: a = scale · q·k / (‖q‖ ‖k‖) [1]_; 0 where either is zero.

    Parameters
    ----------
    scale : float or array
        A number or 0-d array, ``(B,)`` one per sequence, ``(B|1, H|1)`` one per head.

    References
    ----------
    .. [1] Graves et al., "Neural Turing machines", 2014, equation 6.

    Examples
    --------
    >>> import numpy as np
    >>> float(Cosine().pair(np.array([3.0, 0.0]), np.array([4.0, 3.0])))
    0.8
    """

    scale: Any = 1.0

    def _check(self) -> None:
        self._set("scale", checked_number("scale", self.scale))

    def pair(self, q: Any, k: Any) -> Any:
        s = xp_of(q).sum(_unit(q) * _unit(k), axis=-1)
        return s * aligned(self.scale, s, "scale")

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        return DotForm(_unit(q), _unit(k), aligned(self.scale, q, "scale", sizes))


def _unit(x: Any) -> Any:
    """Scale to length 1, zero staying zero with gradient zero; no square can overflow."""
    if not x.shape[-1]:
        return x
    xp = xp_of(x)
    largest = xp.max(xp.abs(stop_gradient(x)), axis=-1, keepdims=True)
    x = x / xp.where(largest > 0, largest, 1.0)
    square = xp.sum(x * x, axis=-1, keepdims=True)
    return xp.where(square > 0, x / xp.sqrt(xp.where(square > 0, square, 1.0)), 0.0)
