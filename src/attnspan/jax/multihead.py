"""Multi-head attention for flax.nnx with any score, any mask and grouped key/value heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnspan.attention import attention, inspect
from attnspan.errors import refusal
from attnspan.jax.base import AttentionModule, Learned
from attnspan.masks.valid_lens import combined
from attnspan.scores import ScaledDot
from attnspan.shapes import check_split

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(AttentionModule):
    r"""Multi-head attention: head h is attention(X_q W_qʰ, X_k W_kᵍ, X_v W_vᵍ), all joined by W_o [1]_.

    Batch first: (B, L, embed_dim) in and out. Query head h uses key/value head g = h // (H/G) [2]_.

    Parameters
    ----------
    embed_dim : int
        Width of the query and of the output; each of the H heads is embed_dim / H wide.
    num_heads : int
        Query heads H.
    num_kv_heads : int, optional
        Key/value heads G, a divisor of H; None is H, 1 is multi-query attention.
    kdim, vdim : int, optional
        Widths of key and value where they differ from `embed_dim`.
    score : Score or function, optional
        The score of each head, None is ScaledDot(). Its arrays become parameters (nnx.Param).
    dropout : float
        Rate at which weights are dropped while `deterministic` is False.
    bias : bool
        Whether the four projections add a bias.
    param_dtype : dtype
        Of the parameters.
    rngs : nnx.Rngs
        Its params and dropout streams.

    Attributes
    ----------
    W_q, W_k, W_v, W_o : nnx.Linear
        embed_dim → H·D, kdim → G·D, vdim → G·D, H·D → embed_dim.

    Raises
    ------
    ArgumentError
        If the heads don't divide `embed_dim`, or G doesn't divide H.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, section 3.2.2.
    .. [2] Ainslie et al., "GQA: training generalized multi-query transformer models from multi-head
       checkpoints", 2023, section 2.2: grouped heads.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from attnspan.masks import Causal
    >>> attention = MultiHeadAttention(8, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 8))
    >>> attention(x, mask=Causal(), valid_lens=jnp.array([5, 3])).shape
    (2, 5, 8)
    >>> attention.attention_weights(x, mask=Causal()).shape
    (2, 4, 5, 5)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        score: Any = None,
        dropout: float = 0.0,
        bias: bool = True,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_split(embed_dim, num_heads, num_kv_heads)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        kv_width = embed_dim // num_heads * num_kv_heads
        kdim, vdim = (embed_dim if width is None else width for width in (kdim, vdim))

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=param_dtype, rngs=rngs)

        self.W_q = linear(embed_dim, embed_dim)
        self.W_k = linear(kdim, kv_width)
        self.W_v = linear(vdim, kv_width)
        self.W_o = linear(embed_dim, embed_dim)
        self.score = Learned(ScaledDot() if score is None else score)
        super().__init__(dropout, rngs)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        valid_lens: Any = None,
        mask: Any = None,
        align: Any = None,
        score_bias: Any = None,
    ) -> jax.Array:
        """Attend.

        Parameters
        ----------
        query : array
            (B, L, embed_dim).
        key, value : array, optional
            (B, S, kdim) and (B, S, vdim); None is the query, and the key.
        valid_lens : integer array, optional
            (B,) one per sequence or (B, L) one per query: the keys before it are visible.
        mask : Mask or bool array, optional
            Visible pairs, True = may attend; arrays are (L, S) or (B|1, H|1, L|1, S|1).
        align : optional
            Key position of query 0 for masks and biases that don't say it.
        score_bias : array or ALiBi, optional
            Added to the scores: broadcasts to (B, H, L, S).

        Returns
        -------
        array
            (B, L, embed_dim).

        Raises
        ------
        ArgumentError
            For shapes, dtypes, lengths or masks that don't fit each other, and where weights are
            to be dropped without `rngs`.
        """
        key = query if key is None else key
        value = key if value is None else value
        keep = combined(valid_lens, mask, heads=True)
        heads = attention(
            self._heads("query", query, self.W_q, self.num_heads),
            self._heads("key", key, self.W_k, self.num_kv_heads),
            self._heads("value", value, self.W_v, self.num_kv_heads),
            score=self.score(),
            mask=keep,
            align=align,
            bias=score_bias,
            **self._dropout(),
        )
        joined = heads.swapaxes(1, 2)
        out: jax.Array = self.W_o(joined.reshape(*joined.shape[:2], self.embed_dim))
        return out

    def attention_weights(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        *,
        valid_lens: Any = None,
        mask: Any = None,
        align: Any = None,
        score_bias: Any = None,
    ) -> jax.Array:
        """Give the weights that a call with these arguments uses, before dropout: (B, H, L, S)."""
        key = query if key is None else key
        keys = self._heads("key", key, self.W_k, self.num_kv_heads)
        weights: jax.Array = inspect(
            self._heads("query", query, self.W_q, self.num_heads),
            keys,
            jnp.zeros_like(keys[..., :1]),
            score=self.score(),
            mask=combined(valid_lens, mask, heads=True),
            align=align,
            bias=score_bias,
        ).weights()
        return weights

    def _heads(self, name: str, x: jax.Array, layer: nnx.Linear, heads: int) -> jax.Array:
        if x.ndim != 3 or x.shape[-1] != layer.in_features:
            raise refusal(name, x, f"three axes, batch first: (B, length, {layer.in_features})")
        return layer(x).reshape(*x.shape[:2], heads, layer.out_features // heads).swapaxes(1, 2)
