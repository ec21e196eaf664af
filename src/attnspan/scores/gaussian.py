"""The distance between query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import stop_gradient
from attnspan.scores.base import DotForm, Score, aligned, checked_number, per_head, xp_of
from attnspan.shapes import Sizes

__all__ = ["Gaussian"]


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Score):
    r"""The negative squared distance: a = -‖q - k‖² / (2σ²) [1]_.

    Expanded it is a dot product with a key bias, so the (L, S, D) differences are never formed.
    Queries and keys are first taken relative to a query, so that a large common offset does
    not cancel the digits. There is no square root: the gradient at q = k is 0.

    Parameters
    ----------
    bandwidth : float or array, optional
        σ; None is the textbook exercise's σ² = √D, 1 its equation. A number or 0-d array, ``(B,)``
        one per sequence, ``(B|1, H|1)`` one per head.

    References
    ----------
    .. [1] Nadaraya, "On estimating regression", 1964; Watson, "Smooth regression analysis", 1964.

    Examples
    --------
    >>> import numpy as np
    >>> float(Gaussian(bandwidth=1).pair(np.array([3.0, 4.0]), np.array([0.0, 0.0])))
    -12.5
    """

    bandwidth: Any = None

    def _check(self) -> None:
        if self.bandwidth is not None:
            self._set("bandwidth", checked_number("bandwidth", self.bandwidth, positive=True))

    def _precision(self, like: Any, sizes: Sizes | None = None) -> Any:
        """Give 1/σ², lined up with the scores."""
        if self.bandwidth is None:
            return 1 / math.sqrt(max(like.shape[-1] if sizes is None else sizes.Dq, 1))
        sigma = aligned(self.bandwidth, like, "bandwidth", sizes)
        return 1 / (sigma * sigma)

    def pair(self, q: Any, k: Any) -> Any:
        s = -0.5 * xp_of(q).sum((q - k) * (q - k), axis=-1)
        if self.bandwidth is None:
            return s / math.sqrt(max(q.shape[-1], 1))
        return s * self._precision(s)

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        xp = xp_of(q)
        if not sizes.L:
            return DotForm(q, k)
        origin = _reference(q, live, sizes)
        q = q - per_head(origin, sizes.H)
        k = k - origin
        precision = self._precision(q, sizes)
        key_bias = per_head(-0.5 * xp.sum(k * k, axis=-1)[..., None], sizes.H)[..., 0]
        row = -0.5 * xp.sum(q * q, axis=-1, keepdims=True) * precision
        return DotForm(q, k, precision, key_bias, row[..., 0])


def _reference(q: Any, live: Any, sizes: Sizes) -> Any:
    """Take the first live query of each batch element and head group: one that sees a key and is finite.

    Nothing excluded can reach it: not a padding query, and no key at all. Returns (..., G, 1, D)
    without gradient; zero where there is no such query.
    """
    xp = xp_of(q)
    q = stop_gradient(q)
    lead, rows = q.shape[:-3], sizes.H // sizes.G * sizes.L
    if live is None:
        return q.reshape((*lead, sizes.G, rows, q.shape[-1]))[..., :1, :]
    lead = np.broadcast_shapes(q.shape[:-1], live.shape)[:-2]  # a mask may have more sequences than q
    live = xp.broadcast_to(live, (*lead, sizes.H, sizes.L)).reshape((*lead, sizes.G, rows))
    q = xp.broadcast_to(q, (*lead, sizes.H, sizes.L, q.shape[-1])).reshape((*lead, sizes.G, rows, -1))
    first = xp.argmax(xp.astype(live, xp.int32), axis=-1, keepdims=True)[..., None]
    first = xp.broadcast_to(first, (*first.shape[:-1], q.shape[-1]))
    origin = xp.take_along_axis(q, first, axis=-2)
    return xp.where(xp.any(live, axis=-1)[..., None, None], origin, 0.0)
