"""Multi-head attention with any score, any mask and grouped key/value heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnspan.errors import refusal
from attnspan.masks.valid_lens import combined
from attnspan.scores import ScaledDot
from attnspan.shapes import check_split
from attnspan.torch.base import AttentionModule, Learned

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
        The score of each head, None is ScaledDot(). Its nn.Parameters are trained with the module,
        its other tensors are buffers.
    dropout : float
        Rate at which weights are dropped, in training mode only.
    bias : bool
        Whether the four projections add a bias.

    Attributes
    ----------
    W_q, W_k, W_v, W_o : torch.nn.Linear
        embed_dim → H·D, kdim → G·D, vdim → G·D, H·D → embed_dim.
    attention_weights : Tensor
        (B, H, L, S) of the latest call, before dropout.

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
    >>> import torch
    >>> from attnspan.masks import Causal
    >>> attention = MultiHeadAttention(8, 4, num_kv_heads=2)
    >>> x = torch.ones(2, 5, 8)
    >>> attention(x, mask=Causal(), valid_lens=torch.tensor([5, 3])).shape
    torch.Size([2, 5, 8])
    >>> attention.attention_weights.shape
    torch.Size([2, 4, 5, 5])
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
    ) -> None:
        super().__init__(dropout)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_split(embed_dim, num_heads, num_kv_heads)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        kv_width = embed_dim // num_heads * num_kv_heads
        self.W_q = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.W_k = nn.Linear(embed_dim if kdim is None else kdim, kv_width, bias=bias)
        self.W_v = nn.Linear(embed_dim if vdim is None else vdim, kv_width, bias=bias)
        self.W_o = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.score = Learned(ScaledDot() if score is None else score)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        valid_lens: Any = None,
        mask: Any = None,
        align: Any = None,
        score_bias: Any = None,
    ) -> Tensor:
        """Attend.

        Parameters
        ----------
        query : Tensor
            (B, L, embed_dim).
        key, value : Tensor, optional
            (B, S, kdim) and (B, S, vdim); None is the query, and the key.
        valid_lens : integer array, optional
            (B,) one per sequence or (B, L) one per query: the keys before it are visible.
        mask : Mask or bool array, optional
            Visible pairs, True = may attend; arrays are (L, S) or (B|1, H|1, L|1, S|1).
        align : optional
            Key position of query 0 for masks and biases that don't say it.
        score_bias : Tensor or ALiBi, optional
            Added to the scores: broadcasts to (B, H, L, S).

        Returns
        -------
        Tensor
            (B, L, embed_dim).

        Raises
        ------
        ArgumentError
            For shapes, dtypes, lengths or masks that don't fit each other.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, x, layer in (
            ("query", query, self.W_q),
            ("key", key, self.W_k),
            ("value", value, self.W_v),
        ):
            if x.ndim != 3 or x.shape[-1] != layer.in_features:
                raise refusal(name, x, f"three axes, batch first: (B, length, {layer.in_features})")
        heads = self._attend(
            self.W_q(query).unflatten(-1, (self.num_heads, -1)).transpose(1, 2),
            self.W_k(key).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2),
            self.W_v(value).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2),
            self.score(),
            mask=combined(valid_lens, mask, heads=True),
            align=align,
            bias=score_bias,
        )
        out: Tensor = self.W_o(heads.transpose(1, 2).flatten(-2))
        return out

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
