"""The textbook's four modules: one score each, called as ``module(queries, keys, values, valid_lens)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnspan.masks.valid_lens import combined
from attnspan.scores import Additive, Bilinear, Gaussian, ScaledDot
from attnspan.shapes import check_widths
from attnspan.torch.base import AttentionModule, Learned

__all__ = ["AdditiveAttention", "BilinearAttention", "DotProductAttention", "GaussianAttention"]


class _TextbookAttention(AttentionModule):
    """Attention over (queries, keys, values, valid_lens) with the score that `_score` builds."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, mask: Any = None
    ) -> Tensor:
        """Attend.

        Parameters
        ----------
        queries, keys, values : Tensor
            (B, L, Dq), (B, S, Dk), (B, S, E); with heads (B, H, L, Dq) and so on.
        valid_lens : integer array, optional
            (B,) one per sequence or (B, L) one per query: the keys before it are visible.
        mask : Mask or bool array, optional
            Visible pairs, True = may attend; with `valid_lens` as well, both must agree.

        Returns
        -------
        Tensor
            (B, L, E); a query that sees no key gets zeros.

        Raises
        ------
        ArgumentError
            For shapes, dtypes, lengths or masks that don't fit each other.
        """
        keep = combined(valid_lens, mask, heads=queries.ndim > 3)
        return self._attend(queries, keys, values, self._score(), mask=keep)

    def _score(self) -> Any:
        raise NotImplementedError


class DotProductAttention(_TextbookAttention):
    r"""Scaled dot-product attention: softmax(QKᵀ/√D) V [1]_.

    Parameters
    ----------
    dropout : float
        Rate at which weights are dropped, in training mode only.

    Raises
    ------
    ArgumentError
        In forward, where queries and keys have different widths.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1.

    Examples
    --------
    >>> import torch
    >>> attention = DotProductAttention(dropout=0.5).eval()
    >>> queries, keys, values = torch.ones(2, 1, 2), torch.ones(2, 10, 2), torch.ones(2, 10, 4)
    >>> attention(queries, keys, values, torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    >>> attention.attention_weights[0, 0, :4]
    tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)

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
        Rate at which weights are dropped, in training mode only.

    Attributes
    ----------
    W_q, W_k, w_v : torch.nn.Linear
        Without bias; weights (F, Dq), (F, Dk) and (1, F).

    Raises
    ------
    ArgumentError
        In forward, where queries or keys have another width than was said.

    References
    ----------
    .. [1] Bahdanau et al., "Neural machine translation by jointly learning to align and translate",
       2015, section A.1.2.

    Examples
    --------
    >>> import torch
    >>> attention = AdditiveAttention(query_size=20, key_size=2, num_hiddens=8, dropout=0.1)
    >>> queries, keys, values = torch.ones(2, 1, 20), torch.ones(2, 10, 2), torch.ones(2, 10, 4)
    >>> attention(queries, keys, values, torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    """

    def __init__(self, query_size: int, key_size: int, num_hiddens: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        check_widths(query_size=query_size, key_size=key_size, num_hiddens=num_hiddens)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=False)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)

    def _score(self) -> Additive:
        return Additive(self.W_q.weight, self.W_k.weight, self.w_v.weight[0])


class GaussianAttention(_TextbookAttention):
    r"""Distance attention: scores −‖q − k‖²/(2σ²) [1]_.

    Parameters
    ----------
    bandwidth : float or Tensor, optional
        The width σ; None is σ² = √D, and a torch.nn.Parameter is learned.
    dropout : float
        Rate at which weights are dropped, in training mode only.

    Raises
    ------
    ArgumentError
        For a bandwidth that is not positive; in forward, where queries and keys have different
        widths.

    References
    ----------
    .. [1] Nadaraya, "On estimating regression", 1964; Watson, "Smooth regression analysis", 1964.

    Examples
    --------
    >>> import torch
    >>> attention = GaussianAttention(bandwidth=1.0)
    >>> keys = torch.tensor([[[0.0], [1.0], [2.0]]])
    >>> attention(torch.zeros(1, 1, 1), keys, keys)
    tensor([[[0.5036]]])
    >>> attention.attention_weights
    tensor([[[0.5741, 0.3482, 0.0777]]])
    """

    def __init__(self, bandwidth: Any = None, dropout: float = 0.0) -> None:
        super().__init__(dropout)
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
        Rate at which weights are dropped, in training mode only.

    Attributes
    ----------
    M : torch.nn.Parameter
        (Dq, Dk), drawn with variance 1/(Dq·Dk): inputs of unit variance give scores of unit variance.

    Raises
    ------
    ArgumentError
        In forward, where queries or keys have another width than was said.

    References
    ----------
    .. [1] Luong et al., "Effective approaches to attention-based neural machine translation", 2015,
       equation 8 (general).

    Examples
    --------
    >>> import torch
    >>> attention = BilinearAttention(query_size=20, key_size=2)
    >>> queries, keys, values = torch.ones(2, 3, 20), torch.ones(2, 6, 2), torch.ones(2, 6, 4)
    >>> attention(queries, keys, values).shape
    torch.Size([2, 3, 4])
    """

    def __init__(self, query_size: int, key_size: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        check_widths(query_size=query_size, key_size=key_size)
        self.M = nn.Parameter(torch.empty(query_size, key_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `M` anew."""
        nn.init.normal_(self.M, std=self.M.numel() ** -0.5)

    def _score(self) -> Bilinear:
        return Bilinear(self.M)

    def extra_repr(self) -> str:
        return f"query_size={self.M.shape[0]}, key_size={self.M.shape[1]}"
