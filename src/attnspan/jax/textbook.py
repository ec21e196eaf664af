"""The textbook's four modules for flax.nnx: one score each, giving (output, weights)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attnspan.attention import inspect
from attnspan.jax.base import AttentionModule, Learned
from attnspan.masks.valid_lens import combined
from attnspan.scores import Additive, Bilinear, Gaussian, ScaledDot
from attnspan.shapes import check_widths

__all__ = ["AdditiveAttention", "BilinearAttention", "DotProductAttention", "GaussianAttention"]


class _TextbookAttention(AttentionModule):
    """Attention over (queries, keys, values, valid_lens) with the score that `_score` builds."""

    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        valid_lens: Any = None,
        *,
        mask: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend.

        Parameters
        ----------
        queries, keys, values : array
            (B, L, Dq), (B, S, Dk), (B, S, E); with heads (B, H, L, Dq) and so on.
        valid_lens : integer array, optional
            (B,) one per sequence or (B, L) one per query: the keys before it are visible.
        mask : Mask or bool array, optional
            Visible pairs, True = may attend; with `valid_lens` as well, both must agree.

        Returns
        -------
        out : array
            (B, L, E); a query that sees no key gets zeros.
        weights : array
            (B, L, S) before dropout, in the accumulation dtype. Under `jit` they cost nothing
            where they are not used.

        Raises
        ------
        ArgumentError
            For shapes, dtypes, lengths or masks that don't fit each other, and where weights are
            to be dropped without `rngs`.
        """
        keep = combined(valid_lens, mask, heads=queries.ndim > 3)
        record = inspect(queries, keys, values, score=self._score(), mask=keep, **self._dropout())
        return record.out, record.weights()

    def _score(self) -> Any:
        raise NotImplementedError


class DotProductAttention(_TextbookAttention):
    r"""Scaled dot-product attention: softmax(QKᵀ/√D) V [1]_.

    Parameters
    ----------
    dropout : float
        Rate at which weights are dropped while `deterministic` is False.
    rngs : nnx.Rngs, optional
        Its dropout stream; needed only where weights are dropped.

    Raises
    ------
    ArgumentError
        For a rate outside [0, 1]; in a call, where queries and keys have different widths.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> attention = nnx.view(DotProductAttention(dropout=0.5), deterministic=True)
    >>> queries, keys, values = jnp.ones((2, 1, 2)), jnp.ones((2, 10, 2)), jnp.ones((2, 10, 4))
    >>> out, weights = attention(queries, keys, values, jnp.array([2, 6]))
    >>> out.shape, weights[0, 0, :4].tolist()
    ((2, 1, 4), [0.5, 0.5, 0.0, 0.0])
    """

    def __init__(self, dropout: float = 0.0, rngs: nnx.Rngs | nnx.RngStream | None = None) -> None:
        super().__init__(dropout, rngs)

    def _score(self) -> ScaledDot:
        return ScaledDot()


class AdditiveAttention(_TextbookAttention):
    r"""Additive attention: scores w_v·tanh(W_q q + W_k k), for two widths [1]_.

    The (L, S, F) array of hidden units is never made.

    Parameters
    ----------
    query_size, key_size : int
        Widths Dq and Dk.
    num_hiddens : int
        Width F of the hidden layer.
    dropout : float
        Rate at which weights are dropped while `deterministic` is False.
    param_dtype : dtype
        Of the parameters.
    rngs : nnx.Rngs
        Its params and dropout streams.

    Attributes
    ----------
    W_q, W_k, w_v : nnx.Linear
        Without bias; kernels (Dq, F), (Dk, F) and (F, 1).

    Raises
    ------
    ArgumentError
        In a call, where queries or keys have another width than was said.

    References
    ----------
    .. [1] Bahdanau et al., "Neural machine translation by jointly learning to align and translate",
       2015, section A.1.2.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> attention = AdditiveAttention(query_size=20, key_size=2, num_hiddens=8, rngs=nnx.Rngs(0))
    >>> queries, keys, values = jnp.ones((2, 1, 20)), jnp.ones((2, 10, 2)), jnp.ones((2, 10, 4))
    >>> out, weights = attention(queries, keys, values, jnp.array([2, 6]))
    >>> out.shape, weights.shape
    ((2, 1, 4), (2, 1, 10))
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        num_hiddens: int,
        dropout: float = 0.0,
        *,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        check_widths(query_size=query_size, key_size=key_size, num_hiddens=num_hiddens)
        self.W_q = nnx.Linear(query_size, num_hiddens, use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.W_k = nnx.Linear(key_size, num_hiddens, use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.w_v = nnx.Linear(num_hiddens, 1, use_bias=False, param_dtype=param_dtype, rngs=rngs)
        super().__init__(dropout, rngs)

    def _score(self) -> Additive:
        return Additive(self.W_q.kernel[...].T, self.W_k.kernel[...].T, self.w_v.kernel[...][:, 0])


class GaussianAttention(_TextbookAttention):
    r"""Distance attention: scores −‖q − k‖²/(2σ²) [1]_.

    Parameters
    ----------
    bandwidth : float or array, optional
        The width σ; None is σ² = √D, and an array becomes a parameter (nnx.Param).
    dropout : float
        Rate at which weights are dropped while `deterministic` is False.
    rngs : nnx.Rngs, optional
        Its dropout stream; needed only where weights are dropped.

    Raises
    ------
    ArgumentError
        For a bandwidth that is not positive; in a call, where queries and keys have different
        widths.

    References
    ----------
    .. [1] Nadaraya, "On estimating regression", 1964; Watson, "Smooth regression analysis", 1964.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> attention = GaussianAttention(bandwidth=1.0)
    >>> keys = jnp.array([[[0.0], [1.0], [2.0]]])
    >>> out, weights = attention(jnp.zeros((1, 1, 1)), keys, keys)
    >>> [round(float(w), 4) for w in weights[0, 0]]
    [0.5741, 0.3482, 0.0777]
    """

    def __init__(
        self,
        bandwidth: Any = None,
        dropout: float = 0.0,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> None:
        super().__init__(dropout, rngs)
        self.score = Learned(Gaussian(bandwidth))

    def _score(self) -> Any:
        return self.score()


class BilinearAttention(_TextbookAttention):
    r"""Bilinear attention: scores qᵀ M k with a learned matrix, for two widths [1]_.

    Parameters
    ----------
    query_size, key_size : int
        Widths Dq and Dk.
    dropout : float
        Rate at which weights are dropped while `deterministic` is False.
    param_dtype : dtype
        Of the parameters.
    rngs : nnx.Rngs
        Its params and dropout streams.

    Attributes
    ----------
    M : nnx.Param
        (Dq, Dk), drawn with variance 1/(Dq·Dk): inputs of unit variance give scores of unit variance.

    Raises
    ------
    ArgumentError
        In a call, where queries or keys have another width than was said.

    References
    ----------
    .. [1] Luong et al., "Effective approaches to attention-based neural machine translation", 2015,
       equation 8 (general).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> attention = BilinearAttention(query_size=20, key_size=2, rngs=nnx.Rngs(0))
    >>> queries, keys, values = jnp.ones((2, 3, 20)), jnp.ones((2, 6, 2)), jnp.ones((2, 6, 4))
    >>> attention(queries, keys, values)[0].shape
    (2, 3, 4)
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        dropout: float = 0.0,
        *,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        check_widths(query_size=query_size, key_size=key_size)
        draw = nnx.initializers.normal((query_size * key_size) ** -0.5)
        self.M = nnx.Param(draw(rngs.params(), (query_size, key_size), param_dtype))
        super().__init__(dropout, rngs)

    def _score(self) -> Bilinear:
        return Bilinear(self.M[...])
