"""PyTorch's own attention function, with attnspan underneath."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnspan.attention import attention
from attnspan.errors import describe, refusal
from attnspan.masks import Causal, Dense, Mask
from attnspan.scores import ScaledDot
from attnspan.torch.base import autocasted, draw_seed

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Compute softmax(scale·QKᵀ + bias) V with the signature and meaning of PyTorch's function [1]_.

    It can stand wherever ``torch.nn.functional.scaled_dot_product_attention`` stands. One
    difference: a query that may see no key gets zeros, with zero gradients, on every device.

    Parameters
    ----------
    query, key, value : Tensor
        (..., H, L, D), (..., G, S, D), (..., G, S, E), two or more axes; leading axes broadcast.
    attn_mask : Tensor, optional
        Broadcasts to (..., H, L, S). Boolean: True = may attend. Floating: added to the scores.
    dropout_p : float
        Rate at which weights are dropped, always (pass 0.0 in evaluation). The draw is attnspan's
        own, from a seed of PyTorch's default generator: ``torch.manual_seed`` governs it.
    is_causal : bool
        Query i sees keys 0 … i, anchored at the top left corner whatever L and S are.
    scale : float, optional
        Factor of the scores; None is 1/√D.
    enable_gqa : bool
        Let G be a proper divisor of H: query head h uses key/value head h // (H/G).

    Returns
    -------
    Tensor
        (..., H, L, E).

    Raises
    ------
    ArgumentError
        For `is_causal` together with `attn_mask` (as PyTorch does), a mask that is neither boolean
        nor floating, a rate outside [0, 1], and shapes or dtypes that don't fit.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1; the interface is PyTorch's.

    Examples
    --------
    >>> import torch
    >>> q = k = v = torch.tensor([[0.0], [1.0]])
    >>> scaled_dot_product_attention(q, k, v, is_causal=True)
    tensor([[0.0000],
            [0.7311]])
    """
    _check(query, key, value, attn_mask, is_causal)
    q, k, v = (x if x.ndim > 2 else x[None] for x in autocasted(query, key, value))
    q, k, v = _grouped(q, k, v) if enable_gqa else _broadcast(q, k, v)
    lead = _leading(q, k, v)
    batch = math.prod(lead)
    q, k, v = (x.expand(*lead, *x.shape[-3:]).reshape(batch, *x.shape[-3:]) for x in (q, k, v))
    mask: Mask | None = Causal(align="top_left") if is_causal else None
    bias = None
    if attn_mask is not None:
        pairs = _lined_up(attn_mask, torch.Size((*lead, *q.shape[1:3], k.shape[2])), batch)
        mask, bias = (Dense(pairs), None) if pairs.dtype == torch.bool else (None, pairs)
    if q.shape[1] == 0:
        out = q @ k.mT @ v  # no heads, nothing to attend
    else:
        rng = draw_seed(q.device) if 0 < dropout_p < 1 else None
        rate = 0.0 if dropout_p == 1 else dropout_p
        out = attention(q, k, v, score=ScaledDot(scale), mask=mask, bias=bias, dropout=rate, rng=rng)
        out = out * 0 if dropout_p == 1 else out
    out = out.reshape(*lead, *out.shape[1:])
    return out[0] if query.ndim == key.ndim == value.ndim == 2 else out


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, x in given.items():
        if not isinstance(x, Tensor) and not (x is None and name == "attn_mask"):
            raise refusal(name, x, "a tensor", f"write torch.as_tensor({name})")
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise refusal("query, key, value", _names(query, key, value), "two or more axes each")
    if attn_mask is None:
        return
    if is_causal:
        raise refusal(
            "attn_mask",
            f"{describe(attn_mask)} beside is_causal=True",
            "one of the two",
            "to have both use attnspan.attention(mask=Causal() & mask)",
        )
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise refusal("attn_mask", attn_mask, "a boolean (True = may attend) or a floating tensor (added)")


def _names(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {describe(query)}, key {describe(key)}, value {describe(value)}"


def _leading(q: Tensor, k: Tensor, v: Tensor) -> torch.Size:
    """Broadcast the axes before the heads."""
    try:
        return torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise refusal(
            "query, key, value", _names(q, k, v), "leading axes (before axis -3) that agree or are 1"
        ) from None


def _broadcast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the heads of q, and those of k and v (one key/value head for all needs no copy)."""
    try:
        (G,) = torch.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
        (H,) = torch.broadcast_shapes(q.shape[-3:-2], (G,))
    except RuntimeError:
        raise refusal(
            "key, value",
            _names(q, k, v),
            "heads (axis -3) that agree with query's, or are 1",
            "for fewer key/value heads than query heads say enable_gqa=True",
        ) from None
    return _with_heads(q, H), _with_heads(k, G), _with_heads(v, G)


def _with_heads(x: Tensor, heads: int) -> Tensor:
    return x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give k and v as many heads as each other, a divisor of q's."""
    H = q.shape[-3]
    for name, x in (("key", k), ("value", v)):
        if x.shape[-3] == 0 or H % x.shape[-3]:
            raise refusal(name, x, f"a number of heads (axis -3) that divides query's {H}")
    G = math.lcm(k.shape[-3], v.shape[-3])
    return q, _repeated(k, G), _repeated(v, G)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _lined_up(attn_mask: Tensor, scores: torch.Size, batch: int) -> Tensor:
    """Give the mask four axes (B|1, H|1, L|1, S|1), written out only where leading axes differ."""
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, scores) == scores
    except RuntimeError:
        fits = False
    if not fits:
        raise refusal("attn_mask", attn_mask, f"a shape that broadcasts to {tuple(scores)}")
    tail = attn_mask[(None,) * (len(scores) - attn_mask.ndim)]
    lead = tail.shape[:-3]
    if math.prod(lead) == 1:
        return tail.reshape(1, *tail.shape[-3:])
    return tail.expand(*scores[:-3], *tail.shape[-3:]).reshape(batch, *tail.shape[-3:])
