r"""Dropout bits from a counter: the same in every framework, tiling and thread count.

Once a row, (r1, r2, ·, ·) = Philox4x32-10 [1]_ with counter (query i, n, 0, 0) and the seed's two
words as key; n numbers the leading axes of the output in row-major order. Then per key j, modulo
2³²::

    x = r1 ^ (j * 0x9E3779B9); x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x ^= r2
    x *= 0x846ca68b; x ^= x >> 16;  keep = x >= floor(p * 2**32)

A word is uint32 in NumPy and JAX, and int64 masked to 32 bits in PyTorch, whose unsigned types lack
operators.

References
----------
.. [1] Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from attnspan.arrays import (
    arange,
    as_written,
    framework,
    is_array,
    is_integer,
    is_torch_compiling,
    namespace,
    xp_of,
)
from attnspan.errors import refusal

__all__ = ["is_generator", "keep_bits", "keys_kept", "row_draws", "row_words", "seed_words"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def seed_words(rng: Any, kind: str) -> tuple[Any, Any]:
    """Turn what the caller gave as `rng` into the two words of a seed, low word first.

    Parameters
    ----------
    rng : int, 0-d integer array, JAX key or torch.Generator
        Integers count modulo 2⁶⁴; a generator is drawn from once.
    kind : str
        The framework of the call.
    """
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        seed = int(rng) % 2**64
        return seed & _MASK, seed >> 32
    home = framework(rng)
    if home == "jax" and kind == "jax":
        return _jax_words(rng)
    if home == "numpy" and is_integer(rng) and rng.shape == ():
        return seed_words(int(rng), kind)
    if home == "torch" and kind == "torch" and is_integer(rng) and tuple(rng.shape) == ():
        seed = rng.long()
        return seed & _MASK, (seed >> 32) & _MASK
    if is_generator(rng, kind):
        torch = sys.modules["torch"]
        drawn = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, generator=rng, device=rng.device)
        return drawn & _MASK, (drawn >> 32) & _MASK
    raise refusal(
        "rng",
        rng,
        "an integer, a 0-d integer array, a JAX key (for JAX arrays) or a torch.Generator (for PyTorch)",
    )


def is_generator(rng: Any, kind: str) -> bool:
    """Tell whether `rng` is a torch.Generator, whose state moves when it is drawn from."""
    return kind == "torch" and isinstance(rng, sys.modules["torch"].Generator)


def _jax_words(rng: Any) -> tuple[Any, Any]:
    jax = sys.modules["jax"]
    jnp = jax.numpy
    if jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.shape != ():
            raise refusal("rng", rng, "one key", "split keys are used one a call")
        data = jax.random.key_data(rng)
        data = data if data.shape == (2,) else jax.random.bits(rng, (2,), "uint32")
        return data[1], data[0]
    if rng.dtype == jnp.uint32 and rng.shape == (2,):  # a raw key, as of jax.random.PRNGKey
        return rng[1], rng[0]
    if not is_integer(rng) or rng.shape != ():
        raise refusal("rng", rng, "a JAX key or a 0-d integer array")
    low = rng.astype(jnp.uint32)
    if rng.dtype.itemsize == 8:
        return low, (rng >> 32).astype(jnp.uint32)
    return low, jnp.where(rng < 0, jnp.uint32(_MASK), jnp.uint32(0))


def keep_bits(words: tuple[Any, Any], queries: Any, lead: tuple[int, ...], S: int, p: float) -> Any:
    """Draw which weights stay.

    Parameters
    ----------
    words : tuple
        From `seed_words`.
    queries : array
        ``(L,)``: positions of the queries; its library and device are the answer's.
    lead : tuple of int
        The leading axes of the output.
    S : int
        Keys.
    p : float
        The share dropped, 0 ≤ p < 1.

    Returns
    -------
    bool array
        ``(*lead, L, S)``, True = keep.
    """
    return keys_kept(row_draws(words, queries, lead), arange(S, queries), p)


def row_draws(words: tuple[Any, Any], queries: Any, lead: tuple[int, ...]) -> tuple[Any, Any]:
    """Draw what the rows of `keep_bits` need once: two words a row, ``(*lead, L)``."""
    kind = framework(queries) or "numpy"
    xp = namespace(kind)
    wide = xp.int64 if kind == "torch" else xp.uint32
    n = xp.astype(arange(math.prod(lead), queries), wide).reshape((*lead, 1))
    i = xp.astype(queries, wide)
    with as_written(queries):  # NumPy warns of scalars that wrap, as they are meant to
        if kind == "torch" and is_torch_compiling():
            from attnspan.torch_ops import opaque_row_words

            device = queries.device
            low, high = (w if is_array(w) else xp.full((), w, dtype=wide, device=device) for w in words)
            r1, r2 = opaque_row_words(i, n, low, high)
            return r1, r2
        return row_words(i, n, words)


def keys_kept(rows: tuple[Any, Any], keys: Any, p: float) -> Any:
    """Draw which weights stay, ``(*lead, L, S)``, for rows of `row_draws` and positions of keys ``(S,)``."""
    r1, r2 = rows
    keys = xp_of(keys).astype(keys, r1.dtype)
    with as_written(keys):
        x = r1[..., None] ^ _times(keys, 0x9E3779B9)
        x = _times(x ^ (x >> 16), 0x7FEB352D)
        x = _times((x ^ (x >> 15)) ^ r2[..., None], 0x846CA68B)
        return (x ^ (x >> 16)) >= _word(int(p * 2**32), x)


def row_words(i: Any, n: Any, words: tuple[Any, Any]) -> tuple[Any, Any]:
    """Draw the first two words of Philox4x32-10 for counters (i, n, 0, 0)."""
    c0, c1 = i + n * 0, n + i * 0
    c2 = c3 = c0 * 0
    k0, k1 = (_word(w, c0) for w in words)
    for _ in range(10):
        high0, low0 = _high(c0, _MULTIPLIERS[0]), _times(c0, _MULTIPLIERS[0])
        high1, low1 = _high(c2, _MULTIPLIERS[1]), _times(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (_masked(k + _word(weyl, c0)) for k, weyl in zip((k0, k1), _WEYL, strict=True))
    return c0, c1


def _word(c: Any, like: Any) -> Any:
    """Bring a constant or a seed word to the kind of word that `like` holds."""
    kind = framework(like)
    if kind == "torch":
        return c
    xp = namespace(kind or "numpy")
    return xp.asarray(c, dtype=xp.uint32) if framework(c) is None else c.astype(xp.uint32)


def _masked(x: Any) -> Any:
    """Cut to 32 bits, where words are kept in 64."""
    return x & _MASK if framework(x) == "torch" or isinstance(x, int) else x


def _times(a: Any, c: int) -> Any:
    """Give the low word of a product."""
    return _masked(a * _word(c, a))


def _high(a: Any, c: int) -> Any:
    """Give the high word of a 32 x 32 bit product by halves, so that 32-bit words are enough."""
    half = _word(0xFFFF, a)
    low, high = a & half, a >> 16
    c_low, c_high = _word(c & 0xFFFF, a), _word(c >> 16, a)
    cross1, cross2 = high * c_low, low * c_high
    middle = (low * c_low >> 16) + (cross1 & half) + (cross2 & half)
    return high * c_high + (cross1 >> 16) + (cross2 >> 16) + (middle >> 16)
