"""Padding said by lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnspan.arrays import is_array
from attnspan.errors import refusal
from attnspan.masks.base import Mask, as_mask
from attnspan.masks.parameters import MaskSizes, check_axes, counted, four, within

__all__ = ["ValidLens", "combined"]


@dataclass(frozen=True, eq=False, repr=False)
class ValidLens(Mask):
    r"""Each query sees the valid keys of its sequence: k < lens, or k ≥ S - lens with left padding.

    Parameters
    ----------
    lens : int or integer array
        Valid keys: a number, ``(B,)`` one per sequence, ``(B, L)`` one per query (the textbook's
        two forms), ``(B|1, H|1)`` one per head, or ``(B|1, H|1, L|1)``.
    pad : {"right", "left"}
        On which side the padding stands.
    query_lens : int or integer array, optional
        Valid queries, ``(B,)``: a query in the padding sees nothing.

    Raises
    ------
    ArgumentError
        If a length is seen to lie outside [0, S]. Lengths that are not seen (traced, on a device)
        are clipped.

    Examples
    --------
    >>> print(ValidLens([1, 3]).picture(2, 4))
    batch 0:
    █···
    █···
    batch 1:
    ███·
    ███·
    """

    lens: Any = field(metadata={"positional": True})
    pad: str = "right"
    query_lens: Any = None

    def _check(self) -> None:
        if self.pad not in ("right", "left"):
            raise refusal("pad", repr(self.pad), '"right" or "left"')
        self._set("lens", counted("lens", self.lens))
        if len(getattr(self.lens, "shape", ())) > 3:
            raise refusal("lens", self.lens, "at most three axes (B|1, H|1, L|1)")
        if self.query_lens is not None:
            self._set("query_lens", counted("query_lens", self.query_lens))

    @property
    def has_length(self) -> bool:
        shape = tuple(getattr(self.lens, "shape", ()))
        return len(shape) >= 2 and shape[-1] > 1

    def check(self, sizes: MaskSizes) -> None:
        if is_array(self.lens) and len(self.lens.shape) >= 2:
            self._check_rows(sizes)
        elif is_array(self.lens):
            check_axes(self, "lens", self.lens, sizes)
        within("ValidLens.lens", self.lens, sizes.S, "S")
        if self.query_lens is not None:
            if is_array(self.query_lens):
                check_axes(self, "query_lens", self.query_lens, sizes)
            within("ValidLens.query_lens", self.query_lens, sizes.L, "L")

    def _check_rows(self, sizes: MaskSizes) -> None:
        B, L, H = sizes.B, sizes.L, sizes.H
        shape = tuple(self.lens.shape)
        needed = f"(B,), (B, L) with L = {L}, (B|1, H|1) or (B|1, H|1, L|1)"
        if B is not None:
            needed = f"({B},), ({B}, {L}), ({B} or 1, {H} or 1) or ({B} or 1, {H} or 1, {L} or 1)"
        fits = B is None or shape[0] in (1, B)
        if len(shape) == 3:
            fits = fits and (H is None or shape[1] in (1, H)) and shape[2] in (1, L)
        else:
            fits = fits and (shape[1] in (1, L) or H is None or shape[1] == H)
            if shape[1] == L == H and L > 1:
                raise refusal(
                    "ValidLens.lens",
                    self.lens,
                    f"to know whether its second axis means the {L} queries or the {H} heads",
                    "write lens[:, None, :] for queries or lens[:, :, None] for heads",
                )
        if not fits:
            raise refusal("ValidLens.lens", self.lens, needed)

    def _lens(self, L: Any) -> Any:
        """Line the lengths up with (B, H, L, 1)."""
        shape = tuple(getattr(self.lens, "shape", ()))
        if len(shape) == 3:
            return self.lens[..., None]
        if len(shape) == 2 and isinstance(L, int) and shape[1] == L and L > 1:
            return self.lens[:, None, :, None]
        return four(self.lens)

    def _at(self, q: Any, L: Any) -> Any:
        """Give the length that each of the queries at positions q has."""
        lens = self._lens(L)
        if len(getattr(lens, "shape", ())) == 4 and lens.shape[-2] > 1:
            if not is_array(q):
                return lens[:, :, q : q + 1, :]
            if len(q.shape) == 4 and q.shape[0] > 1:
                raise refusal(
                    "ValidLens.lens",
                    self.lens,
                    "one length per sequence or head inside Documents(each=...)",
                )
            return lens[:, :, q.reshape(-1), :]
        return lens

    def keep(self, q: Any, k: Any, L: Any = None, S: Any = None) -> Any:
        lens = self._at(q, L)
        seen = (k < lens) if self.pad == "right" else (k >= _behind(S, lens))
        if self.query_lens is None:
            return seen
        valid = four(self.query_lens)
        return seen & ((q < valid) if self.pad == "right" else (q >= _behind(L, valid)))

    def rows(self, q: Any, L: Any, S: Any) -> tuple[Any, Any]:
        lens = self._at(q, L)
        start, stop = (0, lens) if self.pad == "right" else (_behind(S, lens), S)
        if self.query_lens is None:
            return start, stop
        valid = four(self.query_lens)
        hidden = (q >= valid) if self.pad == "right" else (q < _behind(L, valid))
        return start, stop - hidden * stop


def _behind(n: Any, lens: Any) -> Any:
    """Give n - lens, where the last `lens` of n begin; far negative lengths must not wrap."""
    return n - lens * (lens > 0)


def combined(valid_lens: Any, mask: Any, *, heads: bool = False) -> Mask | None:
    """Give the one mask that valid lengths and a mask say together, None if both are None.

    With heads, lengths (B, L) are (B, 1, L): they never speak of heads here.
    """
    if valid_lens is None:
        return None if mask is None else as_mask(mask)
    lens = ValidLens(valid_lens)
    if heads and len(getattr(lens.lens, "shape", ())) == 2:
        lens = ValidLens(lens.lens[:, None, :])
    return lens if mask is None else lens & as_mask(mask)
