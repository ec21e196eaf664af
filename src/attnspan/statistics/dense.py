"""Statistics of an array of attention weights.

The Jacobian of the softmax is diag(p) - p pᵀ. Its norm must not be taken from Σp², Σp³ over all keys,
which cancel for saturated rows. With p the largest weight, n how many keys share it, and R1, R2, R3
the sums of pᵢ, pᵢ², pᵢ³ over the *other* keys, S2 = n·p² + R2:

    ‖J‖² = n·p²·(1 - 2p + S2) + R2 - 2·R3 + S2·R2,   and for n = 1 the bracket is R1² + R2.

With n = 1 all terms are of the size of R1², which underflows long before R1 does, so R1 is taken out first.

The entropy has the same trap: log p of a weight that is nearly 1 is all rounding. Where the others have
less than half of the weight, p is (1 - R1)/n, and log1p(-R1) keeps the digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import accumulation_dtype, constant, device_of, pinned, stop_gradient, xp_of
from attnspan.values import Value

__all__ = ["Statistics", "column_sums", "jacobian_norm", "mass_on", "mean_distance", "statistics_of"]


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
    xp, p = _accumulated(weights)
    if p.shape[-1] == 0:
        zero = xp.sum(p, axis=-1)
        return Statistics(zero, zero, zero, zero)
    top = xp.max(p, axis=-1, keepdims=True)
    is_top = p == top
    n = xp.astype(xp.sum(xp.astype(is_top, xp.int32), axis=-1), p.dtype)
    rest = xp.where(is_top, 0.0, p)
    top, r1 = top[..., 0], xp.sum(rest, axis=-1)
    sees = top > 0
    known = top == top  # a row that sees a non-finite key is NaN, and stays so
    half = r1 < 0.5
    log_top = xp.log1p(-xp.where(half, r1, 0.0)) - xp.log(xp.where(sees, n, 1.0))
    log_top = xp.where(half, log_top, xp.log(xp.where(sees, top, 1.0)))
    entropy = -n * top * log_top - xp.sum(rest * xp.log(xp.where(rest > 0, rest, 1.0)), axis=-1)
    unit = xp.where((n == 1) & (r1 > 0), r1, 1.0)
    rest = rest / unit[..., None]
    norm = jacobian_norm(xp, n, top, unit, *(xp.sum(rest**power, axis=-1) for power in (1, 2, 3)))
    return statistics_where(xp, sees, known, entropy, top, norm)


def statistics_where(xp: Any, sees: Any, known: Any, entropy: Any, top: Any, norm: Any) -> Statistics:
    """Put 0 where a query sees no key, and NaN where one that it sees is not finite."""

    def placed(x: Any) -> Any:
        return xp.where(known, xp.where(sees, x, 0.0), float("nan"))

    return Statistics(placed(entropy), placed(xp.exp(entropy)), placed(top), placed(norm))


def jacobian_norm(xp: Any, n: Any, top: Any, unit: Any, r1: Any, r2: Any, r3: Any) -> Any:
    """Compute the Frobenius norm of diag(p) - p pᵀ.

    `n` keys share the largest weight `top`; r1, r2, r3 are the sums of the others' weights, their
    squares and cubes, measured in `unit`: R1 itself where n = 1 (and R1 > 0), else 1.
    """
    s2 = n * top * top + unit * unit * r2
    bracket = xp.where(n == 1, r1 * r1 + r2, 1 - 2 * top + s2)
    square = n * top * top * bracket + r2 - 2 * unit * r3 + s2 * r2
    return unit * xp.sqrt(xp.where(square > 0, square, 0.0))


def column_sums(weights: Any) -> Any:
    r"""Sum the weight that each key gets, over the queries.

    .. math:: c_j = \sum_i p_{ij}

    A key that no query sees gets 0; a query that sees no key gives nothing. Not differentiable.

    Parameters
    ----------
    weights : array
        ``(..., L, S)``.

    Returns
    -------
    array
        ``(..., S)``: float64 for float64 and else float32.

    Examples
    --------
    >>> import numpy as np
    >>> column_sums(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [1.5, 0.5]
    """
    xp, p = _accumulated(weights)
    return xp.sum(p, axis=-2)


def mass_on(weights: Any, keys: Any) -> Any:
    r"""Sum the weight that each query puts on a set of keys.

    .. math:: M_i = \sum_j [j \in K]\, p_{ij}

    0 where a query sees no key. Not differentiable.

    Parameters
    ----------
    weights : array
        ``(..., L, S)``.
    keys : bool array
        The set K; broadcasts to ``(..., S)``-shaped sets, ``(S,)``, or one a query, ``(..., L, S)``.

    Returns
    -------
    array
        ``(..., L)``: float64 for float64 and else float32.

    Examples
    --------
    >>> import numpy as np
    >>> mass_on(np.array([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]), np.array([False, True, True])).tolist()
    [0.0, 0.5]
    """
    xp, p = _accumulated(weights)
    return xp.sum(p * xp.astype(constant(keys, xp, device_of(p)), p.dtype), axis=-1)


def mean_distance(weights: Any, positions: Any) -> Any:
    r"""Average how far away the keys are that each query attends to.

    .. math:: d_i = \sum_j p_{ij}\, |t_i - j|

    0 where a query sees no key. Not differentiable.

    Parameters
    ----------
    weights : array
        ``(..., L, S)``.
    positions : integer array
        ``(L,)`` or ``(..., L)``: the key position t at which each query stands, i + align.

    Returns
    -------
    array
        ``(..., L)``: float64 for float64 and else float32.

    Examples
    --------
    >>> import numpy as np
    >>> mean_distance(np.array([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]), np.arange(2)).tolist()
    [0.0, 0.75]
    """
    xp, p = _accumulated(weights)
    on = {} if device_of(p) is None else {"device": p.device}
    distance = xp.abs(constant(positions, xp, device_of(p))[..., None] - xp.arange(p.shape[-1], **on))
    return xp.sum(p * xp.astype(distance, p.dtype), axis=-1)


def _accumulated(weights: Any) -> tuple[Any, Any]:
    """Give the namespace, and the weights in the accumulation dtype, cut off from differentiation."""
    xp = xp_of(weights)
    return xp, pinned(xp.astype(stop_gradient(weights), accumulation_dtype(weights), copy=False))
