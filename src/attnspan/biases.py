"""What is added to the scores after the softcap, besides arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.arrays import is_array, is_floating
from attnspan.errors import refusal
from attnspan.masks.parameters import checked_align, offset
from attnspan.scores.base import in_dtype
from attnspan.shapes import Sizes, check_parameter
from attnspan.values import Value, as_array

__all__ = ["ALiBi"]


@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Value):
    r"""A linear penalty on distance: ``bias = -slope · |i - j|`` with i = q + align [1]_.

    Parameters
    ----------
    slopes : float array
        ``(H,)``, one per head.
    align : {"top_left", "bottom_right"}, int or integer array, optional
        The key position at which query 0 stands; must be said where L ≠ S.

    Raises
    ------
    ArgumentError
        If the slopes are not one per head, or L ≠ S and the alignment is unsaid.

    References
    ----------
    .. [1] Press et al., "Train short, test long: attention with linear biases enables input length
       extrapolation", 2022, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import attnspan as asp
    >>> x = np.ones((1, 2, 3, 4))
    >>> asp.attention(x, x, x, bias=ALiBi([0.5, 0.25])).shape
    (1, 2, 3, 4)
    """

    slopes: Any = field(metadata={"positional": True})
    align: Any = None

    def _check(self) -> None:
        slopes = self.slopes
        if isinstance(slopes, (list, tuple)):
            slopes = as_array([float(slope) for slope in slopes])
        if not is_array(slopes) or not is_floating(slopes) or len(slopes.shape) != 1:
            raise refusal("ALiBi.slopes", slopes, "a floating-point array (H,), one slope per head")
        self._set("slopes", slopes)
        self._set("align", checked_align(self.align))

    def with_align(self, align: Any) -> ALiBi:
        """Fill in the alignment if it was left unsaid."""
        return ALiBi(self.slopes, align) if self.align is None else self

    def check(self, sizes: Sizes) -> None:
        """Refuse slopes made for another number of heads, and an unsaid alignment."""
        if self.slopes.shape[0] != sizes.H:
            raise refusal("ALiBi.slopes", self.slopes, f"one slope for each of the {sizes.H} heads")
        offset(self.align, sizes.L, sizes.S, self)
        if is_array(self.align) and tuple(self.align.shape):
            check_parameter(tuple(self.align.shape), "ALiBi.align", sizes)

    def dense(self, q: Any, k: Any, L: int, S: int, like: Any) -> Any:
        """Write the bias out, (B|1, H, L, S), for positions q (L, 1) and k (1, S), in `like`'s dtype."""
        slopes = in_dtype(self.slopes, like).reshape((1, -1, 1, 1))
        distance = abs(q + offset(self.align, L, S, self) - k)
        return -slopes * in_dtype(distance, like)
