"""The mean entropy of attention weights, and how steep the softmax is there."""

from __future__ import annotations

from typing import Any

import attnspan as asp
from attnspan.scores import ScaledDot

__all__ = ["mean_entropy_and_norm"]


def mean_entropy_and_norm(queries: Any, keys: Any, scale: Any) -> tuple[Any, Any]:
    """Average two statistics of the weights over queries that each have keys of their own.

    The Frobenius norm of the softmax Jacobian diag(α) − ααᵀ never needs that matrix, for its
    square is Σα² − 2Σα³ + (Σα²)²; `attnspan.inspect` streams it along with the entropy.

    Parameters
    ----------
    queries : array (L, D)
        One query a row.
    keys : array (L, S, D)
        The keys of each.
    scale : float or 0-d array
        What the scores are multiplied by: 1, or 1/√D.

    Returns
    -------
    (0-d array, 0-d array)
        Mean entropy in nats, and mean norm.
    """
    # Each query is a batch element with one query, for its keys are its own; the value is unused.
    seen = asp.inspect(queries[:, None, :], keys, keys[..., :1], score=ScaledDot(scale))
    return seen.stats.entropy.mean(), seen.stats.jacobian_norm.mean()
