"""jax.nn's attention function, with attnspan underneath."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp

from attnspan.attention import attended, inspected
from attnspan.errors import NotSupportedError, refusal
from attnspan.masks import Causal, Dense, Mask, SlidingWindow, ValidLens
from attnspan.request import request_of
from attnspan.scores import ScaledDot

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    r"""Compute softmax(scale·QKᵀ + bias) V with the signature and meaning of jax.nn's function [1]_.

    It can stand wherever ``jax.nn.dot_product_attention`` stands. Two differences: a query that
    may see no key gets zeros (and residual −inf) instead of the mean of all values; and every
    argument counts, alone or beside others.

    Parameters
    ----------
    query, key, value : array
        (B, L, H, D), (B, S, G, D), (B, S, G, E), heads next to last; without B for one sequence.
        Query head h uses key/value head h // (H/G).
    bias : array, optional
        Added to the scores; broadcasts to (B, H, L, S).
    mask : bool array, optional
        True = may attend; broadcasts to (B, H, L, S).
    scale : float, optional
        Factor of the scores; None is 1/√D.
    is_causal : bool
        Query i sees keys 0 … i, anchored at the top left corner whatever L and S are.
    query_seq_lengths, key_value_seq_lengths : integer array, optional
        (B,) valid queries and keys, either or both; the rest is padding.
    local_window_size : int or (int, int), optional
        How many neighbours before and after itself a query sees; one number is both.
    implementation : str, optional
        None chooses, "xla" writes the scores out as jax.nn does, and attnspan's own names are
        themselves. There is no "cudnn".
    return_residual : bool
        Also give the log-sum-exp of each row's scores, (B, L, H), cut off from differentiation.

    Returns
    -------
    array or (array, array)
        (B, L, H, E), and the residual in query's dtype if asked for.

    Raises
    ------
    ArgumentError
        For a mask that is not boolean, a negative window, and shapes or dtypes that don't fit.
    NotSupportedError
        For an implementation that is not there, or cannot do what was asked.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1; the interface is jax.nn's.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.arange(4.0).reshape(4, 1, 1)
    >>> dot_product_attention(0 * x, x, x, is_causal=True, local_window_size=(1, 0)).ravel()
    Array([0. , 0.5, 1.5, 2.5], dtype=float32)
    """
    q, k, v = (_four(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    name = _named(implementation)
    request = request_of(
        *(x.swapaxes(1, 2) for x in (q, k, v)),
        score=ScaledDot(scale),
        mask=_mask(mask, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size, q, k),
        bias=None if bias is None else _lined_up("bias", bias),
    )
    request = replace(request, order="BLHD")  # a kernel that takes it so undoes the swap, which costs nothing
    alone = all(jnp.ndim(x) == 3 for x in (query, key, value))
    if not return_residual:
        out = attended(request, name).swapaxes(1, 2)
        return out[0] if alone else out
    record = inspected(request, name)
    out = record.out.swapaxes(1, 2)
    residual = jax.lax.stop_gradient(record.lse.swapaxes(1, 2)).astype(out.dtype)
    return (out[0], residual[0]) if alone else (out, residual)


def _four(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise refusal(name, x, "(B, length, heads, width), or three axes without B")
    return x if x.ndim == 4 else x[None]


def _lined_up(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim > 4:
        raise refusal(name, x, "at most four axes, broadcasting to (B, H, L, S)")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _mask(
    mask: Any, is_causal: bool, query_lens: Any, key_lens: Any, window: Any, q: jax.Array, k: jax.Array
) -> Mask | None:
    """Give the AND of all that was said, None if nothing was."""
    parts: list[Mask] = []
    if is_causal:
        parts.append(Causal(align="top_left"))
    if window is not None:
        back, ahead = (window, window) if isinstance(window, int) else window
        parts.append(SlidingWindow(back=back, ahead=ahead, align="top_left"))
    if query_lens is not None or key_lens is not None:
        L, S = q.shape[1], k.shape[1]
        keys = S if key_lens is None else _lengths("key_value_seq_lengths", key_lens, S)
        queries = None if query_lens is None else _lengths("query_seq_lengths", query_lens, L)
        parts.append(ValidLens(keys, query_lens=queries))
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise refusal("mask", mask, "a boolean array (True = may attend)", "a float array is a bias")
        parts.append(Dense(_lined_up("mask", mask)))
    return reduce(and_, parts) if parts else None


def _lengths(name: str, lens: Any, most: int) -> jax.Array:
    """Take one length per sequence; what lies beyond the array ends with it, as in jax.nn."""
    lens = jnp.asarray(lens)
    if lens.ndim != 1 or not jnp.issubdtype(lens.dtype, jnp.integer):
        raise refusal(name, lens, "an integer array (B,)")
    return jnp.clip(lens, 0, most)


def _named(implementation: str | None) -> str:
    if implementation == "cudnn":
        raise NotSupportedError(
            'implementation="cudnn": attnspan has no cuDNN path; leave it unsaid, or call '
            "jax.nn.dot_product_attention"
        )
    return {None: "auto", "xla": "eager"}.get(implementation, str(implementation))
