"""The book's function for JAX users, and draws whose values no setting of JAX changes."""

from __future__ import annotations

from functools import partial

from attnspan.book.frameworks import find
from attnspan.book.statistics import mean_entropy_and_norm

try:
    import jax
except ImportError as error:
    raise find("jax").lacking() from error

__all__ = ["attention_stats", "jit", "normal", "uniform"]


# What the book compiles runs once or twice: less optimising is faster in all, and the same numbers.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def attention_stats(
    d: int, num_keys: int = 64, num_queries: int = 256, scaled: bool = True, seed: int = 0
) -> tuple[float, float]:
    """Measure how concentrated, and how steep, attention over random keys of width d is.

    Queries and keys are standard normal, from the two halves of ``split(key(seed))``. Each query
    has keys of its own.

    Parameters
    ----------
    d : int
        Width of queries and keys.
    num_keys, num_queries : int
        Keys a query, and queries to average over.
    scaled : bool
        Divide the scores by √d.
    seed : int
        Seed of the draw.

    Returns
    -------
    (float, float)
        Mean entropy of the weights in nats, and mean Frobenius norm of the softmax Jacobian.

    Examples
    --------
    >>> entropy, norm = attention_stats(4, scaled=False)
    >>> round(norm, 3)
    0.258
    """
    queries, keys = _draw(jax.random.key(seed), d, num_keys, num_queries)
    entropy, norm = _measure(queries, keys, d**-0.5 if scaled else 1.0)
    return float(entropy), float(norm)


@partial(jit, static_argnums=(1, 2, 3))
def _draw(key: jax.Array, d: int, num_keys: int, num_queries: int) -> tuple[jax.Array, jax.Array]:
    key_q, key_k = jax.random.split(key)
    return normal(key_q, (num_queries, d)), normal(key_k, (num_queries, num_keys, d))


_measure = jit(mean_entropy_and_norm)


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw standard-normal float32 numbers, also where 64-bit numbers are switched on."""
    return jax.random.normal(key, shape, dtype="float32")


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw float32 numbers from [0, 1), also where 64-bit numbers are switched on."""
    return jax.random.uniform(key, shape, dtype="float32")
