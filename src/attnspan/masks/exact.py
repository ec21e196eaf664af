"""Exact questions about a bound mask, answered on the host in O(L) for spans.

Bits are walked in blocks of queries, so nothing of size L x S is held at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnspan.errors import AttnspanError, refusal
from attnspan.masks.bound import Bound

__all__ = ["equal", "pairs", "picture", "valid_lens"]

_BLOCK = 2**24


def _blocks(bound: Bound, L: int, S: int) -> Iterator[tuple[int, np.ndarray]]:
    """Walk over (first query, bool (B|1, H|1, block, S))."""
    step = max(1, min(max(L, 1), _BLOCK // max(1, S)))
    for i in range(0, L, step):
        j = min(i + step, L)
        seen = bound.dense(L, S, queries=slice(i, j))
        yield i, np.broadcast_to(seen, (*seen.shape[:2], j - i, S))


def pairs(bound: Bound, L: int, S: int) -> np.ndarray:
    """Count the visible pairs of each batch element and head: int64 (B|1, H|1)."""
    if bound.bits is None:
        width = (bound.spans.stop.astype(np.int64) - bound.spans.start).sum(axis=-1)
        return np.broadcast_to(width, (*width.shape[:2], L)).sum(axis=-1)
    total = np.zeros((1, 1), np.int64)
    for _, seen in _blocks(bound, L, S):
        total = total + seen.sum(axis=(-2, -1), dtype=np.int64)
    return total


def equal(a: Bound, b: Bound, L: int, S: int) -> bool:
    """Tell whether two bound masks show the same pairs."""
    if L == 0 or S == 0:
        return True
    if a.bits is None and b.bits is None:
        R = max(a.spans.R, b.spans.R)
        edges = []
        for spans in (a.spans, b.spans):
            room = [(0, 0)] * 3 + [(0, R - spans.R)]
            edges.append([np.pad(x, room, constant_values=S) for x in (spans.start, spans.stop)])
        try:
            return all(bool(np.all(x == y)) for x, y in zip(*edges, strict=True))
        except ValueError:
            return False
    try:
        return all(
            bool(np.all(x == y)) for (_, x), (_, y) in zip(_blocks(a, L, S), _blocks(b, L, S), strict=True)
        )
    except ValueError:  # batches or heads that don't broadcast
        return False


def valid_lens(bound: Bound, L: int, S: int) -> np.ndarray:
    """Give int32 (B|1, H|1, L): the prefix each query sees; raise if one sees anything else."""
    if bound.bits is None:
        start, stop = bound.spans.start, bound.spans.stop
        if L == 0:  # one row may speak of all queries, and there are none
            return np.zeros((*start.shape[:2], 0), np.int32)
        used = start < stop
        wrong = (used[..., 1:].any(axis=-1)) | (used[..., 0] & (start[..., 0] > 0))
        lens = np.where(used[..., 0], stop[..., 0], 0)
        _refuse_first(bound, wrong, 0, L, S)
        return np.broadcast_to(lens, (*lens.shape[:2], L)).astype(np.int32)
    parts = []
    for i, seen in _blocks(bound, L, S):
        lens = seen.sum(axis=-1, dtype=np.int32)
        wrong = (seen != (np.arange(S) < lens[..., None])).any(axis=-1)
        _refuse_first(bound, wrong, i, L, S)
        parts.append(lens)
    return np.concatenate(parts, axis=-1) if parts else np.zeros((1, 1, 0), np.int32)


def _refuse_first(bound: Bound, wrong: np.ndarray, i: int, L: int, S: int) -> None:
    if not wrong.any():
        return
    b, h, row = (int(n[0]) for n in np.nonzero(wrong))
    query = i + row
    seen = bound.dense(L, S, queries=slice(query, query + 1))
    keys = np.flatnonzero(seen[min(b, len(seen) - 1), min(h, seen.shape[1] - 1), 0])
    ends = f"{keys[0]} to {keys[-1]}" if keys.size > 1 else f"{keys[0]}"
    raise AttnspanError(
        f"not expressible as valid lengths: query {query} (batch {b}, head {h}) sees {keys.size} keys, "
        f"{ends}, which are not the first {keys.size}"
    )


def picture(bound: Bound, L: int, S: int, width: int) -> str:
    """Draw a bound mask in text, one block a batch element and head."""
    if width < 1:
        raise refusal("width", width, "1 or more cells a line")
    rows, columns = -(-L // width) or 1, -(-S // width) or 1
    B = H = 1
    cells: list[np.ndarray] = []
    edges = np.arange(0, S, columns)
    wide = np.diff(np.append(edges, S)) if S else np.zeros(0, np.int64)
    for i in range(0, L, rows):
        j = min(i + rows, L)
        some = _per_cell(bound, i, j, edges, wide, S)
        B, H = some.shape[:2]
        cells.append(np.where(some == 0, 0, np.where(some == (j - i) * wide, 2, 1)))
    lines = []
    if rows > 1 or columns > 1:
        lines.append(f"one cell is {rows} queries x {columns} keys: █ all visible, ▒ some, · none")
    heads = [(b, h) for b in range(B) for h in range(H)]
    for b, h in heads:
        if len(heads) > 1:
            lines.append(f"batch {b}, head {h}:" if H > 1 else f"batch {b}:")
        lines += ["".join("·▒█"[c] for c in row[b, h]) for row in cells]
    return "\n".join(lines)


def _per_cell(bound: Bound, i: int, j: int, edges: np.ndarray, wide: np.ndarray, S: int) -> np.ndarray:
    """Count the visible pairs of the queries i to j in each run of keys: int64 (B|1, H|1, cells)."""
    start, stop = bound.spans.start, bound.spans.stop
    each = S if bound.bits is not None else start[:, :, :1].size * len(edges)
    step = max(1, _BLOCK // 16 // max(1, each))
    total: Any = 0
    for a in range(i, j, step):
        b = min(a + step, j)
        if bound.bits is not None:
            seen = bound.dense(0, S, queries=slice(a, b))
            keys = seen.sum(axis=-2, dtype=np.int64) * ((b - a) // seen.shape[-2])
            total = total + (np.add.reduceat(keys, edges, axis=-1) if S else keys)
            continue
        part = slice(a, b) if start.shape[-2] > 1 else slice(None)
        low, high = (x[:, :, part, :, None] for x in (start, stop))
        inside = np.minimum(high, edges + wide) - np.maximum(low, edges)
        count = np.maximum(inside, 0).sum(axis=(2, 3), dtype=np.int64)
        total = total + count * ((b - a) // low.shape[2])
    return total
