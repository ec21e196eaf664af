"""The walk over tiles as Python loops: for NumPy and PyTorch, whose operations run as they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attnspan.arrays import look, segment, xp_of
from attnspan.implementations.tiled.problem import (
    Back,
    Part,
    Problem,
    Rows,
    absorbed,
    gradients,
    look_started,
    looked,
    looked_at,
    settled,
    started,
)
from attnspan.masks.coverage import tiles_covered
from attnspan.request import Request

Place = tuple[int | None, int | None]

__all__ = ["attend", "backward", "objection", "statistics"]


def parts(n: int, step: int) -> list[Part]:
    """Cut a length into parts of `step`; the last may be shorter."""
    return [Part(i, min(step, n - i), n) for i in range(0, n, step)]


def tiles_of(problem: Problem, tile: tuple[int, int]) -> Iterator[tuple[Rows, list[tuple[Part, Any]]]]:
    """Walk over the rows of tiles: the queries, and (keys, mask) of each tile that shows a pair.

    Where the mask's values are seen, tiles without a visible pair are left out, and the mask of a tile
    that shows all is None.
    """
    sizes, bound = problem.sizes, problem.bound
    columns = parts(sizes.S, tile[1])
    touched = full = None
    several = tile[0] < sizes.L or tile[1] < sizes.S
    if several and bound is not None and all(look(x) is not None for _, x in bound.spans.arrays()):
        touched, full = (look(x) for x in tiles_covered(bound.spans, sizes.L, sizes.S, tile))
    for n, part in enumerate(parts(sizes.L, tile[0])):
        rows = Rows.of(problem, part)
        found = []
        for m, column in enumerate(columns):
            if touched is not None and not touched[n, m]:
                continue
            if full is not None and full[n, m] and bound is not None and bound.bits is None:
                found.append((column, None))
                continue
            keep = rows.keep(column)
            seen = None if keep is None or bound is None or bound.bits is None else look(keep)
            if seen is None or seen.any():
                found.append((column, keep))
        yield rows, found


def attend(problem: Problem, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Give (out, log-sum-exp)."""
    out, top, log_total = settled_rows(problem, tile)
    return out, top + log_total


def settled_rows(problem: Problem, tile: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Give (out, largest score, logarithm of the total) of all queries."""
    xp = xp_of(problem.v)
    done = []
    for rows, tiles in tiles_of(problem, tile):
        sums = started(rows)
        for columns, keep in tiles:
            sums = absorbed(rows, sums, columns, keep)
        done.append(settled(sums))
    out, top, log_total = zip(*done, strict=True)
    return xp.concat(out, axis=-2), xp.concat(top, axis=-1), xp.concat(log_total, axis=-1)


def statistics(problem: Problem, tile: tuple[int, int]) -> tuple[Any, ...]:
    """Give the fields of `Statistics`, each ``(..., H, L)``."""
    xp = xp_of(problem.v)
    done = []
    for rows, tiles in tiles_of(problem, tile):
        running = look_started(rows)
        for columns, keep in tiles:
            running = looked_at(rows, running, columns, keep)
        done.append(looked(running))
    return tuple(xp.concat(some, axis=-1) for some in zip(*done, strict=True))


def objection(request: Request) -> str | None:
    """Say why a score function cannot be called in tiles: in NumPy nothing is traced."""
    return None


def backward(
    problem: Problem, tile: tuple[int, int], back: Back, vjp: Callable[..., Any], wanted: list[bool]
) -> tuple[list[Any], Any]:
    """Give the gradients of the scoring's leaves, None for those not wanted, and of the values."""
    places = problem.scoring.places()
    leaves: list[dict[Any, Any]] = [{} for _ in places]
    values: dict[Any, Any] = {}
    for rows, tiles in tiles_of(problem, tile):
        some = back.rows(rows.part)
        for columns, keep in tiles:
            grads, dv = gradients(rows, columns, keep, some, vjp)
            _add(values, (0, columns.start), dv)
            for found, (row_axis, column_axis), g in zip(leaves, places, grads, strict=True):
                if g is None:
                    continue
                g = xp_of(g).astype(g, dv.dtype, copy=False)  # sums of a narrow parameter run in full
                row = 0 if row_axis is None else rows.part.start
                _add(found, (row, 0 if column_axis is None else columns.start), g)
    joined = [
        _joined(found, x, place, tile) if want else None
        for want, found, x, place in zip(wanted, leaves, problem.scoring.leaves(), places, strict=True)
    ]
    return joined, _joined(values, problem.v, (None, -2), tile)


def _add(found: dict[Any, Any], place: Any, g: Any) -> None:
    found[place] = found[place] + g if place in found else g


def _joined(
    found: dict[Any, Any], x: Any, place: tuple[int | None, int | None], tile: tuple[int, int]
) -> Any:
    """Join the gradients of the parts of `x`; a part that no tile touched has gradient 0."""
    xp = xp_of(x)

    def along(axis: int | None, step: int) -> list[Part]:
        return [Part(0, 1, 1)] if axis is None else parts(x.shape[axis], step)

    def piece(row: Part, column: Part) -> Any:
        if (row.start, column.start) in found:
            return found[row.start, column.start]
        part = x
        for axis, cut in zip(place, (row, column), strict=True):
            part = part if axis is None else segment(part, axis, cut.start, cut.count)
        return xp.zeros_like(part)

    def concat(some: list[Any], axis: int | None) -> Any:
        return some[0] if len(some) == 1 else xp.concat(some, axis=axis)

    columns = along(place[1], tile[1])
    lines = [concat([piece(row, c) for c in columns], place[1]) for row in along(place[0], tile[0])]
    return xp.astype(concat(lines, place[0]), x.dtype, copy=False)
