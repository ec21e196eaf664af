"""What a walk in tiles asks of a bound mask, in O(L) where the mask is intervals.

Every function takes a `Bound`, whose arrays may have further axes between B and H.
"""

from __future__ import annotations

import math
from typing import Any

from attnspan.arrays import arange, counts, cumulative_sum, framework, segment, xp_of
from attnspan.masks.bound import Bound
from attnspan.masks.spans import Spans, cover

__all__ = ["queries_seeing", "queries_that_see", "rows_of", "seen_keys", "shown", "tiles_covered"]

_BLOCK = 2**24  # pairs written out at once


def shown(bound: Bound, k: Any) -> Any:
    """Write out which keys at the positions `k` (M,) each query sees: bool `(B|1, ..., H|1, L|1, M)`."""
    seen = cover(bound.spans, k)
    if bound.bits is None:
        return seen
    turn = xp_of(k).astype(k & 7, xp_of(k).uint8)
    return seen & (((bound.bits.words[..., k >> 3] >> turn) & 1) == 1)


def rows_of(bound: Bound, start: Any, count: int) -> Bound:
    """Keep `count` of the queries."""
    return bound.map_arrays(lambda x: x if x.shape[-2] == 1 else segment(x, -2, start, count))


def queries_that_see(bound: Bound, L: int, S: int) -> Any:
    """Tell which queries see a key: bool `(B|1, ..., H|1, L|1)`."""
    if bound.bits is None:
        return (bound.spans.start < bound.spans.stop).any(-1)
    return _over_blocks(bound, L, S, lambda seen, i: seen.any(-1), _joined)


def seen_keys(bound: Bound, L: int, S: int) -> Any:
    """Tell which keys some query sees: bool `(B|1, ..., H|1, S)`."""
    if bound.bits is not None:
        return _over_blocks(bound, L, S, lambda seen, i: seen.any(-2), lambda parts: _either(parts))
    opened, closed = (
        counts(x.reshape((*x.shape[:-2], x.shape[-2] * x.shape[-1])), S + 1)
        for x in (bound.spans.start, bound.spans.stop)
    )
    return cumulative_sum(opened - closed)[..., :S] > 0


def queries_seeing(bound: Bound, bad: Any, L: int, S: int) -> Any:
    """Tell which queries see a key that is bad, for bad keys `(..., H, S)`: bool `(..., H, L|1)`."""
    if bound.bits is not None:
        flags = bad[..., None, :]
        return _over_blocks(
            bound, L, S, lambda seen, i: (seen & flags).any(-1), _joined, math.prod(bad.shape[:-1])
        )
    xp = xp_of(bad)
    spans = bound.spans
    before = cumulative_sum(xp.astype(bad, xp.int32))
    before = xp.concat([xp.zeros_like(before[..., :1]), before], axis=-1)  # bad keys before each position
    wide = xp.int64 if framework(bad) == "torch" else xp.int32  # what each takes as an index

    def bad_before(x: Any) -> Any:
        x = xp.astype(x.reshape((*x.shape[:-2], x.shape[-2] * x.shape[-1])), wide)
        return xp.take_along_axis(before, xp.broadcast_to(x, (*before.shape[:-1], x.shape[-1])), axis=-1)

    inside = bad_before(spans.stop) > bad_before(spans.start)
    return inside.reshape((*inside.shape[:-1], spans.start.shape[-2], spans.R)).any(-1)


def tiles_covered(spans: Spans, L: int, S: int, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Say of each tile whether the spans touch it, and whether they cover it: bool `(rows, columns)`.

    A tile of the last column ends at S, one of the last row at L. All batch elements and heads count.
    """
    xp = xp_of(spans.start)
    rows, columns = -(-L // tile[0]), -(-S // tile[1])
    start, stop = (xp.broadcast_to(x, (*x.shape[:-2], L, spans.R)) for x in (spans.start, spans.stop))
    used = start < stop
    ends = xp.where(stop >= S, columns * tile[1], stop)

    def spread(first: Any, last: Any, used: Any) -> Any:
        """Count for each tile the rows whose intervals reach from its column `first` to `last`."""
        ranks = arange(L, start, xp.int32)
        base = (ranks // tile[0] * (columns + 1))[:, None]
        total = 0
        for edge, sign in ((first, 1), (last, -1)):
            places = xp.where(used, edge, columns) + base  # the spare column takes what is not used
            total = total + sign * counts(places.reshape(-1), rows * (columns + 1)).reshape(
                (rows, columns + 1)
            )
        return cumulative_sum(total)[:, :columns]

    touched = spread(start // tile[1], -(-stop // tile[1]), used) > 0
    first, last = -(-start // tile[1]), ends // tile[1]
    whole = spread(first, last, used & (first < last))
    above = arange(rows, start, xp.int32) * tile[0]
    pairs = xp.clip(L - above, None, tile[0]) * math.prod(start.shape[:-2])  # rows of a tile, over all heads
    return touched, whole == pairs[:, None]


def _over_blocks(bound: Bound, L: int, S: int, ask: Any, join: Any, heads: int = 1) -> Any:
    """Ask a question of the mask written out, block of queries by block, for so many heads at least."""
    k = arange(S, bound.spans.start, xp_of(bound.spans.start).int32)
    heads = max(heads, *(math.prod(x.shape[:-2]) for _, x in bound.arrays()))
    step = max(1, min(L, _BLOCK // max(1, S * heads)))
    alike = all(x.shape[-2] == 1 for _, x in bound.arrays())
    if alike:
        return ask(shown(bound, k), 0)
    return join([ask(shown(rows_of(bound, i, min(step, L - i)), k), i) for i in range(0, L, step)])


def _joined(parts: list[Any]) -> Any:
    xp = xp_of(parts[0])
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-1)


def _either(parts: list[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total | part
    return total
