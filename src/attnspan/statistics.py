"""Statistics of attention weights, one number a query.

The Jacobian of the softmax is diag(p) - p pᵀ. Its norm must not be taken from Σp², Σp³ over all keys,
which cancel for saturated rows. With p the largest weight, n how many keys share it, and R1, R2, R3
the sums of pᵢ, pᵢ², pᵢ³ over the *other* keys, S2 = n·p² + R2:

    ‖J‖² = n·p²·(1 - 2p + S2) + R2 - 2·R3 + S2·R2,   and for n = 1 the bracket is R1² + R2.

With n = 1 all terms are of the size of R1², which underflows long before R1 does, so R1 is taken out first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import stop_gradient, xp_of
from attnspan.values import Value

__all__ = ["Statistics", "statistics_of"]


@dataclass(frozen=True, eq=False, repr=False)
class Statistics(Value):
    """Statistics of the weights of each query, (..., L); 0 where a query sees no key.

    Attributes
    ----------
    entropy : array
        -Σ p log p, in nats.
    effective_keys : array
        exp(entropy).
    max_weight : array
        The largest weight.
    jacobian_norm : array
        The Frobenius norm of diag(p) - p pᵀ.
    """

    entropy: Any
    effective_keys: Any
    max_weight: Any
    jacobian_norm: Any


def statistics_of(weights: Any) -> Statistics:
    """Compute the statistics of weights ``(..., L, S)``; they are not differentiable.

    Examples
    --------
    >>> import numpy as np
    >>> float(statistics_of(np.full((1, 4), 0.25)).effective_keys[0])
    4.0
    """
    p = stop_gradient(weights)
    xp = xp_of(p)
    if p.shape[-1] == 0:
        zero = xp.sum(p, axis=-1)
        return Statistics(zero, zero, zero, zero)
    entropy = -xp.sum(p * xp.log(xp.where(p > 0, p, 1.0)), axis=-1)
    top = xp.max(p, axis=-1, keepdims=True)
    is_top = p == top
    n = xp.astype(xp.sum(xp.astype(is_top, xp.int32), axis=-1), p.dtype)
    rest = xp.where(is_top, 0.0, p)
    top, r1 = top[..., 0], xp.sum(rest, axis=-1)
    unit = xp.where((n == 1) & (r1 > 0), r1, 1.0)
    rest = rest / unit[..., None]
    r1, r2, r3 = (xp.sum(rest**power, axis=-1) for power in (1, 2, 3))
    s2 = n * top * top + unit * unit * r2
    bracket = xp.where(n == 1, r1 * r1 + r2, 1 - 2 * top + s2)
    square = n * top * top * bracket + r2 - 2 * unit * r3 + s2 * r2
    sees = top > 0
    known = top == top  # a row that sees a non-finite key is NaN, and stays so
    norm = unit * xp.sqrt(xp.where(square > 0, square, 0.0))
    return Statistics(
        entropy=entropy,
        effective_keys=xp.where(sees | ~known, xp.exp(entropy), 0.0),
        max_weight=top,
        jacobian_norm=xp.where(known, xp.where(sees, norm, 0.0), float("nan")),
    )
