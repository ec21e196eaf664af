"""Bits: what spans cannot say in few intervals, one bit a pair.

`words` is uint8 `(B|1, H|1, L|1, ceil(S/8))`; bit n of a byte is the n-th of its eight keys. A
size-1 axis stays of size 1. `tile_states` sums them up for whoever walks in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnspan.arrays import device_of, full_like_shape, pack_bits, unpack_bits, xp_of
from attnspan.values import Value

__all__ = ["EMPTY", "FULL", "PARTIAL", "TILE", "Bits", "pack", "tile_states"]

EMPTY, PARTIAL, FULL = 0, 1, 2
TILE = (24, 64)
"""Queries and keys of one tile."""

_BLOCK = 2**24  # unpacked booleans held at once while packing


@dataclass(frozen=True, eq=False, repr=False)
class Bits(Value):
    """Which keys each query sees, one bit a pair (see the module's text).

    Attributes
    ----------
    words : array
        uint8 `(B|1, H|1, L|1, ceil(S/8))`.
    """

    words: Any

    def __and__(self, other: Bits) -> Bits:
        return Bits(self.words & other.words)

    def dense(self, S: int, queries: Any = None) -> Any:
        """Unpack to bool `(B|1, H|1, L|1, S)`, or only the rows `queries` selects."""
        words = self.words
        if queries is not None and words.shape[-2] > 1:
            words = words[..., queries, :]
        return unpack_bits(words, S)


def pack(rows: Callable[[int, int], Any], L: int, S: int) -> Bits:
    """Pack what `rows(i, j)` gives for the queries i to j, bool `(B|1, H|1, j - i | 1, S)`.

    Works block by block, so that the unpacked booleans never stand in memory whole.
    """
    step = max(2, min(L, _BLOCK // max(1, S)))  # of one row it could not be told that all are alike
    first = pack_bits(rows(0, min(step, L)))
    if step >= L or first.shape[-2] != step:  # one block, or all queries alike
        return Bits(first)
    xp = xp_of(first)
    rest = [pack_bits(rows(i, min(i + step, L))) for i in range(step, L, step)]
    return Bits(xp.concat([first, *rest], axis=-2))


def tile_states(bits: Bits, L: int, S: int) -> Any:
    """Say for each tile whether none, some or all of its pairs are visible.

    Returns int8 `(B|1, H|1, ceil(L/24), ceil(S/64))` of EMPTY, PARTIAL, FULL; pairs beyond L
    or S don't count.
    """
    xp = xp_of(bits.words)
    seen = bits.dense(S)
    seen = xp.broadcast_to(seen, (*seen.shape[:2], L, S))
    rows, columns = -(-L // TILE[0]), -(-S // TILE[1])

    def filler(shape: tuple[int, ...], fill: bool) -> Any:
        return full_like_shape(xp, device_of(seen), shape, fill, xp.bool)

    def tiled(fill: bool) -> Any:
        right = filler((*seen.shape[:-1], columns * TILE[1] - S), fill)
        wide = xp.concat([seen, right], axis=-1)
        below = filler((*seen.shape[:2], rows * TILE[0] - L, wide.shape[-1]), fill)
        whole = xp.concat([wide, below], axis=-2)
        return whole.reshape((*seen.shape[:2], rows, TILE[0], columns, TILE[1]))

    some, every = xp.any(tiled(False), axis=(-3, -1)), xp.all(tiled(True), axis=(-3, -1))
    return xp.astype(some, xp.int8) + xp.astype(some & every, xp.int8)
