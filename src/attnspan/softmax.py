"""The masked softmax and the masked log-sum-exp, for an array of scores."""

from __future__ import annotations

from typing import Any

from attnspan.arrays import (
    TITLES,
    accumulation_dtype,
    arange,
    as_written,
    constant,
    device_of,
    framework,
    full_like_shape,
    is_array,
    is_floating,
    is_integer,
    stop_gradient,
    xp_of,
)
from attnspan.errors import describe, refusal
from attnspan.masks.base import as_mask
from attnspan.masks.dense import Dense
from attnspan.masks.parameters import MaskSizes, within
from attnspan.shapes import outer
from attnspan.values import as_array

__all__ = ["exp_below", "masked_logsumexp", "masked_softmax", "softmax_parts"]


def masked_softmax(scores: Any, valid_lens: Any = None, *, mask: Any = None) -> Any:
    r"""Softmax over the last axis, of the valid entries alone.

    .. math:: w_j = \frac{[j\ \text{visible}]\, e^{a_j}}{\sum_{j'} [j'\ \text{visible}]\, e^{a_{j'}}}

    A row without a visible entry is all zero, and so is its gradient.

    Parameters
    ----------
    scores : array
        ``(..., S)`` of any rank, a floating dtype; (B, L, S) as in the textbook.
    valid_lens : int or integer array, optional
        A number, ``(B,)`` one per entry of the first axis, or ``(B, L)`` one per row: entries from
        there on are excluded.
    mask : Mask or bool array, optional
        True = visible. With `valid_lens` too, both must agree.

    Returns
    -------
    array
        Weights of the shape and dtype of `scores`; float16 and bfloat16 are summed in float32.

    Raises
    ------
    ArgumentError
        If the lengths or the mask are of another kind or were made for other sizes, or a length is
        seen to lie outside [0, S].

    References
    ----------
    .. [1] Zhang et al., "Dive into Deep Learning", 2nd edition, section 10.2: masked softmax.

    Examples
    --------
    >>> import numpy as np
    >>> masked_softmax(np.zeros((2, 1, 4)), np.array([2, 0])).tolist()
    [[[0.5, 0.5, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]]
    """
    s, keep = _accumulated(scores, valid_lens, mask)
    with as_written(scores):
        weights, _ = softmax_parts(s, keep)
    return xp_of(scores).astype(weights, scores.dtype, copy=False)


def masked_logsumexp(scores: Any, valid_lens: Any = None, *, mask: Any = None) -> Any:
    r"""Log-sum-exp over the last axis, of the valid entries alone.

    .. math:: \ell = \log \sum_j [j\ \text{visible}]\, e^{a_j}

    A row without a visible entry is -inf with gradient 0. ``scores - masked_logsumexp(...)[..., None]``
    is the masked log-softmax where visible.

    Parameters
    ----------
    scores, valid_lens, mask
        As in `masked_softmax`.

    Returns
    -------
    array
        ``(...)``: natural logarithms, float64 for float64 and else float32.

    Raises
    ------
    ArgumentError
        As `masked_softmax`.

    Examples
    --------
    >>> import numpy as np
    >>> masked_logsumexp(np.zeros((2, 3)), np.array([1, 0])).tolist()
    [0.0, -inf]
    """
    s, keep = _accumulated(scores, valid_lens, mask)
    with as_written(scores):
        return softmax_parts(s, keep)[1]


def softmax_parts(s: Any, keep: Any) -> tuple[Any, Any]:
    """Give (weights, log-sum-exp) over the last axis; excluded scores may hold anything.

    The mask decides what counts; the filler only keeps the exponential quiet. A score of -inf
    excludes too. `keep` broadcasts to `s`; None shows all.
    """
    xp = xp_of(s)
    there = s != -float("inf")
    keep = there if keep is None else keep & there
    if s.shape[-1] == 0:
        top = full_like_shape(xp, device_of(s), (*s.shape[:-1], 1), 0.0, s.dtype)
    else:
        filled = xp.where(keep, stop_gradient(s), xp.finfo(s.dtype).min)
        top = xp.max(filled, axis=-1, keepdims=True)
    e = xp.where(keep, exp_below(xp, xp.where(keep, s, top) - top), 0.0)
    total = xp.sum(e, axis=-1, keepdims=True)
    empty = ~xp.any(keep, axis=-1, keepdims=True)
    total = xp.where(empty, 1.0, total)
    lse = xp.where(empty, -float("inf"), xp.log(total) + top)
    return xp.where(keep, e / total, 0.0), lse[..., 0]  # a total of NaN is no news of excluded keys


def exp_below(xp: Any, x: Any) -> Any:
    """Exponentiate the differences of scores and a score that is not below them.

    In JAX they may be above 0, where XLA rounds a score once for each use, or -inf, where its
    exponential is NaN on CPUs. e^-1000 is 0 in float64 too.
    """
    if framework(x) == "jax":
        x = xp.clip(x - stop_gradient(xp.clip(x, 0.0, None)), -1000.0, None)
    return xp.exp(x)


def _accumulated(scores: Any, valid_lens: Any, mask: Any) -> tuple[Any, Any]:
    """Check the arguments; give the scores in the accumulation dtype, and which are visible."""
    if not is_array(scores) or not is_floating(scores) or not scores.shape:
        raise refusal("scores", scores, "a floating-point array (..., S)")
    xp = xp_of(scores)
    keep = None
    if valid_lens is not None:
        keep = _before(valid_lens, scores, xp)
    if mask is not None:
        seen = _visible(mask, scores)
        keep = seen if keep is None else keep & seen
    return xp.astype(scores, accumulation_dtype(scores), copy=False), keep


def _before(lens: Any, scores: Any, xp: Any) -> Any:
    """Mark the entries before the valid lengths."""
    rank, S = len(scores.shape), scores.shape[-1]
    lens = as_array(lens)
    needed = "a number, (B,) one per entry of the first axis, or (B, L) one per row"
    if isinstance(lens, bool) or not (isinstance(lens, int) or (is_array(lens) and is_integer(lens))):
        raise refusal("valid_lens", lens, f"integers: {needed}")
    shape = tuple(getattr(lens, "shape", ()))
    wanted = {0: (), 1: scores.shape[:1], 2: (*scores.shape[:1], *scores.shape[-2:-1])}.get(len(shape))
    if wanted is None or shape != tuple(wanted) or rank <= len(shape):
        raise refusal("valid_lens", lens, f"{needed}, for scores {describe(scores)}")
    within("valid_lens", lens, S, "S")
    if is_array(lens):
        home, own = framework(scores), framework(lens)
        if own not in ("numpy", home):
            raise refusal("valid_lens", f"an array of {TITLES[str(own)]}", f"an array of {TITLES[str(home)]}")
        lens = constant(lens, xp, device_of(scores))
    if shape:
        middle = (1,) * (rank - len(shape) - 1)
        lens = lens.reshape((*shape[:1], *middle, *shape[1:], 1))
    return arange(S, scores) < lens


def _visible(mask: Any, scores: Any) -> Any:
    """Mark the entries a mask shows, in the rank of the scores."""
    rank = len(scores.shape)
    full = (1,) * (4 - rank) + tuple(scores.shape) if rank != 3 else (scores.shape[0], 1, *scores.shape[1:])
    mask = as_mask(mask)
    if rank == 2:  # (L, S): the first axis has a second name, B
        for part in mask.values():
            for name, x in part._items():
                if (
                    is_array(x)
                    and not getattr(part, "has_length", False)
                    and len(x.shape) == 1
                    and x.shape[0] > 1
                ):
                    raise refusal(
                        "mask",
                        f"{type(part).__name__}.{name} {describe(x)} beside scores {describe(scores)}",
                        "numbers: two axes of scores are (L, S), one sequence",
                        "pass lengths of each row as valid_lens=, or give scores[:, None] three axes",
                    )
    for part in mask.values():
        if isinstance(part, Dense) and len(part.array.shape) == 3 and rank >= 4:
            raise refusal("mask", part.array, f"four axes beside scores {describe(scores)}")
    sizes = MaskSizes(full[-2], full[-1], B=full[0], H=full[-3])
    keep = mask.visible(full[-2], full[-1], like=scores, sizes=sizes)
    if rank > 4:
        return keep.reshape((keep.shape[0],) + (1,) * (rank - 4) + tuple(keep.shape[1:]))
    if rank == 1:
        return keep.reshape(keep.shape[-1:])
    return outer(keep, rank, 2)
