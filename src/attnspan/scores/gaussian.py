"""The distance between query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import as_written, stop_gradient
from attnspan.scores.base import DotForm, Score, aligned, checked_number, per_head, xp_of
from attnspan.shapes import Sizes

__all__ = ["Gaussian"]


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Score):
    r"""The negative squared distance: a = -‖q - k‖² / (2σ²) [1]_.

    Expanded it is a dot product with a key bias, so the (L, S, D) differences are never formed.
    Queries and keys are first taken relative to a query, so that a large common offset does
    not cancel the digits, and in units of σ, so that no σ is
    too small. There is no square root: the gradient at q = k is 0.

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

    def _sigma(self, like: Any, D: int, sizes: Sizes | None = None) -> Any:
        """Give σ, lined up with the scores and no smaller than the dtype's smallest normal number."""
        xp = xp_of(like)
        limits = xp.finfo(like.dtype)
        if self.bandwidth is None:
            return max(D, 1) ** 0.25
        if isinstance(self.bandwidth, (int, float)):
            return min(max(self.bandwidth, float(limits.smallest_normal)), float(limits.max))
        return xp.clip(aligned(self.bandwidth, like, "bandwidth", sizes), limits.smallest_normal, limits.max)

    def pair(self, q: Any, k: Any) -> Any:
        xp = xp_of(q)
        with as_written(q):  # dividing by next to nothing is cut off below
            difference = q - k
            sigma = self._sigma(xp.sum(difference, axis=-1), q.shape[-1])
            difference = difference / (sigma[..., None] if hasattr(sigma, "shape") else sigma)
            most = math.sqrt(float(xp.finfo(difference.dtype).max) / max(q.shape[-1], 1))
            difference = xp.clip(difference, -most, most)
            return -0.5 * xp.sum(difference * difference, axis=-1)

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> DotForm:
        xp = xp_of(q)
        if not sizes.L:
            return DotForm(q, k)
        origin = _reference(q, live, sizes)
        sigma = self._sigma(q, sizes.Dq, sizes)
        q = _in_units(xp, q - per_head(origin, sizes.H), sigma)
        k = k - origin
        if hasattr(sigma, "shape") and len(sigma.shape) > 1 and sigma.shape[-3] > 1:  # keys per head
            k = per_head(k, sizes.H)
        k = _in_units(xp, k, sigma)
        key_bias = per_head(-0.5 * xp.sum(k * k, axis=-1)[..., None], sizes.H)[..., 0]
        return DotForm(q, k, 1.0, key_bias, -0.5 * xp.sum(q * q, axis=-1))


def _in_units(xp: Any, x: Any, sigma: Any) -> Any:
    """Divide by σ, so that no square or product overflows.

    A vector too long for that is shortened to between one half of what fits and all of it, longer ones
    still being longer: two such vectors stay apart, and each stays at no distance from itself.
    """
    D = x.shape[-1]
    if not D:
        return x
    limits = xp.finfo(x.dtype)
    most = float(limits.max)
    half = math.sqrt(most / (32 * D))
    x = xp.clip(x, limits.min, limits.max)
    size = xp.max(xp.abs(stop_gradient(x)), axis=-1, keepdims=True)
    learned = hasattr(sigma, "shape")
    log_sigma = xp.log(stop_gradient(sigma)) if learned else math.log(sigma)
    beyond = xp.log(xp.where(size > 0, size, 1.0)) - log_sigma - math.log(half)  # of the length, e-folds
    far = (beyond > 0) & (size > 0)
    reach = math.log(most) - math.log(float(limits.smallest_normal)) - math.log(half)
    shorter = half / xp.where(far, size, 1.0) * (1 + xp.where(far, beyond, 0.0) / reach)
    return xp.where(far, x * shorter, x / (xp.where(far, 1.0, sigma) if learned else sigma))


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
