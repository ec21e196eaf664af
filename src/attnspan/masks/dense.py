"""An arbitrary boolean array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnspan.arrays import is_array
from attnspan.errors import refusal
from attnspan.masks.base import Mask
from attnspan.masks.parameters import MaskSizes, boolean

__all__ = ["Dense"]


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Each query sees the keys that a boolean array marks: array[..., q, k]. True = may attend.

    Parameters
    ----------
    array : bool array
        ``(S,)`` keys of all sequences, ``(L|1, S|1)``, ``(B|1, L|1, S|1)`` beside 3-D queries, or
        ``(B|1, H|1, L|1, S|1)``. Integers are accepted where all are seen to be 0 or 1.

    Raises
    ------
    ArgumentError
        For a float array, integers beyond 0 and 1, or an array made for other lengths.

    Examples
    --------
    >>> print(Dense([[True, False, True]]).picture(2, 3))
    █·█
    █·█
    """

    array: Any = field(metadata={"positional": True})

    def _check(self) -> None:
        x = self.array
        if isinstance(x, (list, tuple)):
            try:
                x = np.asarray(x)
            except ValueError:
                raise refusal("mask", "lists of different lengths", "rows of one length") from None
            x = x if x.size else x.astype(bool)
        if not is_array(x):
            raise refusal("mask", x, "a boolean array")
        x = boolean(x, "mask")
        if not 1 <= len(x.shape) <= 4:
            raise refusal("mask", x, "one to four axes: (S,), (L, S), (B, L, S) or (B, H, L, S)")
        self._set("array", x)

    @property
    def _four(self) -> Any:
        """The array as (B|1, H|1, L|1, S|1)."""
        x = self.array
        shape = tuple(x.shape)
        if len(shape) == 3:
            return x.reshape((shape[0], 1, *shape[1:]))
        return x.reshape((1,) * (4 - len(shape)) + shape)

    @property
    def has_length(self) -> bool:
        return True

    def check(self, sizes: MaskSizes) -> None:
        *lead, rows, columns = (1, *self.array.shape) if len(self.array.shape) == 1 else self.array.shape
        L, S = sizes.L, sizes.S
        fix = ""
        if rows not in (1, L) or columns not in (1, S):
            if len(self.array.shape) == 2 and columns == S and rows == sizes.B:
                fix = "for the keys of each sequence (B, S) write mask[:, None, None, :] (3-D: [:, None, :])"
            elif (columns, rows) == (L, S):
                fix = "its last two axes are (queries, keys): transpose it"
            else:
                fix = "a mask is made for one pair of lengths; symbolic masks fit all"
            raise refusal("mask", self.array, f"(..., L, S) = (..., {L} or 1, {S} or 1)", fix)
        if lead and sizes.B is not None and lead[0] not in (1, sizes.B):
            raise refusal("mask", self.array, f"B = {sizes.B} (or 1) on axis 0")
        if len(lead) == 2 and sizes.H is not None and lead[1] not in (1, sizes.H):
            fix = "masks are (B|1, H|1, L|1, S|1)"
            raise refusal("mask", self.array, f"H = {sizes.H} (or 1) on axis 1", fix)

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        seen = self._four
        for axis, at in ((-2, q), (-1, k)):
            if seen.shape[axis] == 1:
                continue
            if not isinstance(at, int) and len(at.shape) == 4 and at.shape[0] > 1:
                raise refusal(
                    "each",
                    "Dense(...)",
                    "a mask without a length of its own inside Documents(each=...)",
                )
            at = at if isinstance(at, int) else at.reshape(-1)
            at = slice(at, at + 1) if isinstance(at, int) else at
            seen = seen[..., at, :] if axis == -2 else seen[..., at]
        return seen
