"""The book's function for PyTorch users; it draws from the global generator, as the book's does."""

from __future__ import annotations

from attnspan.book.frameworks import find
from attnspan.book.statistics import mean_entropy_and_norm

try:
    import torch
except ImportError as error:
    raise find("torch").lacking() from error

__all__ = ["attention_stats"]


def attention_stats(
    d: int, num_keys: int = 64, num_queries: int = 256, scaled: bool = True
) -> tuple[float, float]:
    """Measure how concentrated, and how steep, attention over random keys of width d is.

    Queries, then keys, are standard normal, drawn from PyTorch's global generator: call
    ``torch.manual_seed`` before. Each query has keys of its own.

    Parameters
    ----------
    d : int
        Width of queries and keys.
    num_keys, num_queries : int
        Keys a query, and queries to average over.
    scaled : bool
        Divide the scores by √d.

    Returns
    -------
    (float, float)
        Mean entropy of the weights in nats, and mean Frobenius norm of the softmax Jacobian.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> entropy, norm = attention_stats(4, scaled=False)
    >>> round(entropy, 3), round(norm, 3)
    (2.813, 0.259)
    """
    queries = torch.randn(num_queries, d)
    keys = torch.randn(num_queries, num_keys, d)
    entropy, norm = mean_entropy_and_norm(queries, keys, d**-0.5 if scaled else 1.0)
    return entropy.item(), norm.item()
