"""The walk over tiles in JAX: loops that the compiler sees, and their derivative by recomputation.

Loops want tiles of one size, so lengths are padded to multiples of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    one_pair,
    settled,
    started,
)
from attnspan.masks.bound import Bound
from attnspan.masks.coverage import tiles_covered
from attnspan.masks.spans import Spans
from attnspan.request import Request
from attnspan.scores.function import CalledForm

__all__ = ["attend", "objection", "statistics"]


class Grid(NamedTuple):
    """A tile's queries and keys, and how many tiles there are of each."""

    rows: int
    columns: int
    down: int
    across: int


def attend(problem: Problem, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Give (out, log-sum-exp), differentiable in reverse as often as one likes."""
    sizes = problem.sizes
    grid, problem = _padded(problem, tile)
    # A function may hold anything: what was compiled for it once may not be true of it now.
    run = _tiled if isinstance(problem.scoring.form, CalledForm) else _compiled
    out, top, log_total = run(grid, problem, problem.v, problem.scoring.leaves())
    return out[..., : sizes.L, :], (jax.lax.stop_gradient(top) + log_total)[..., : sizes.L]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(grid: Grid, problem: Problem, v: Any, leaves: list[Any]) -> tuple[Any, Any, Any]:
    problem = problem.of(v, leaves)

    def row(i: Any) -> tuple[Any, Any, Any]:
        rows = _rows(problem, grid, i)
        return settled(_over_columns(grid, rows, functools.partial(absorbed, rows), started(rows)))

    out, top, log_total = _stacked(row, grid)
    return _side_by_side(out, -2), _side_by_side(top, -1), _side_by_side(log_total, -1)


def _forward(grid: Grid, problem: Problem, v: Any, leaves: list[Any]) -> Any:
    found = _tiled(grid, problem, v, leaves)
    return found, (problem, v, leaves, *found)


def _backward(grid: Grid, kept: Any, arrived: Any) -> Any:
    problem, v, leaves, out, top, log_total = kept
    problem = problem.of(v, leaves)
    places = [(None, -2), *problem.scoring.places()]
    back = Back.of(out, top, log_total, arrived[0], arrived[2])

    def row(i: Any, sums: Any) -> Any:
        rows = _rows(problem, grid, i)
        some = back.rows(rows.part)

        def step(sums: Any, columns: Part, keep: Any) -> Any:
            grads, dv = gradients(rows, columns, keep, some, _vjp)
            found = zip(sums, [dv, *grads], places, strict=True)
            return [_added(x, g, place, (rows.part, columns)) for x, g, place in found]

        return _over_columns(grid, rows, step, sums)

    zeros = [jnp.zeros(x.shape, v.dtype) for x in (v, *leaves)]  # sums of a narrow parameter run in full
    dv, *grads = row(0, zeros) if grid.down == 1 else jax.lax.fori_loop(0, grid.down, row, zeros)
    return None, dv, [g.astype(x.dtype) for g, x in zip(grads, leaves, strict=True)]


_tiled.defvjp(_forward, _backward)
_compiled = jax.jit(_tiled, static_argnums=0)  # outside jit too, or each call would compile its loops


def statistics(problem: Problem, tile: tuple[int, int]) -> tuple[Any, ...]:
    """Give the fields of `Statistics`, each ``(..., H, L)``."""
    L = problem.sizes.L
    run = _statistics if isinstance(problem.scoring.form, CalledForm) else _compiled_statistics
    return tuple(x[..., :L] for x in run(*_padded(problem, tile)))


def _statistics(grid: Grid, problem: Problem) -> tuple[Any, ...]:
    def row(i: Any) -> tuple[Any, ...]:
        rows = _rows(problem, grid, i)
        return looked(_over_columns(grid, rows, functools.partial(looked_at, rows), look_started(rows)))

    return tuple(_side_by_side(x, -1) for x in _stacked(row, grid))


_compiled_statistics = jax.jit(_statistics, static_argnums=0)


def objection(request: Request) -> str | None:
    """Say why a score function cannot be called in tiles: an array it was not given is traced."""
    try:
        constants = jax.make_jaxpr(lambda form: form.called())(one_pair(request, lambda x: x)).consts
    except jax.errors.JAXTypeError:  # such as control flow on values
        return "it cannot be traced"
    if any(isinstance(x, jax.core.Tracer) for x in constants):
        return "it closes over an array that is traced, whose gradient would be lost"
    return None


def _rows(problem: Problem, grid: Grid, i: Any) -> Rows:
    return Rows.of(problem, Part(i * grid.rows, grid.rows, grid.rows * grid.down))


def _stacked(row: Callable[[Any], Any], grid: Grid) -> Any:
    """Run `row` for each row of tiles; the answers are stacked on a new first axis."""
    if grid.down == 1:
        return jax.tree.map(lambda x: x[None], row(0))
    return jax.lax.map(row, jnp.arange(grid.down))


def _over_columns(grid: Grid, rows: Rows, step: Callable[[Any, Part, Any], Any], sums: Any) -> Any:
    """Walk over the tiles of some queries; what shows no pair is skipped."""
    bound, width = rows.bound, grid.columns * grid.across
    touched = None
    if bound is not None and bound.bits is None and grid.across > 1:
        touched, _ = tiles_covered(bound.spans, grid.rows, width, (grid.rows, grid.columns))

    def at(j: Any, sums: Any) -> Any:
        columns = Part(j * grid.columns, grid.columns, width)
        if touched is not None:
            work = lambda sums: step(sums, columns, rows.keep(columns))  # noqa: E731
            return jax.lax.cond(touched[0, j], work, lambda sums: sums, sums)
        keep = rows.keep(columns)
        if keep is None or grid.across == 1:
            return step(sums, columns, keep)
        return jax.lax.cond(keep.any(), lambda sums: step(sums, columns, keep), lambda sums: sums, sums)

    return at(0, sums) if grid.across == 1 else jax.lax.fori_loop(0, grid.across, at, sums)


def _added(x: Any, g: Any, place: tuple[int | None, int | None], parts: tuple[Part, Part]) -> Any:
    """Add the gradient of a part of `x` to it."""
    starts = [0] * x.ndim
    for axis, part in zip(place, parts, strict=True):
        if axis is not None:
            starts[axis] = part.start
    old = jax.lax.dynamic_slice(x, starts, g.shape)
    return jax.lax.dynamic_update_slice(x, old + g.astype(x.dtype), starts)


def _side_by_side(x: Any, axis: int) -> Any:
    """Join what `_stacked` stacked, along an axis (a negative number)."""
    x = jnp.moveaxis(x, 0, axis - 1)
    return x.reshape((*x.shape[: axis - 1], x.shape[axis - 1] * x.shape[axis], *x.shape[x.ndim + axis + 1 :]))


def _padded(problem: Problem, tile: tuple[int, int]) -> tuple[Grid, Problem]:
    """Bring queries and keys to whole tiles with copies of the last, hidden or cut off in the end."""
    L, S = problem.sizes.L, problem.sizes.S
    rows, columns = min(tile[0], L), min(tile[1], S)
    grid = Grid(rows, columns, -(-L // rows), -(-S // columns))
    more = (rows * grid.down - L, columns * grid.across - S)

    def longer(x: Any, *axes: int | None, mode: str = "edge") -> Any:
        widths = [(0, 0)] * x.ndim
        for axis, n in zip(axes, more, strict=True):
            if axis is not None:
                widths[axis] = (0, n)
        return jnp.pad(x, widths, mode) if any(n for _, n in widths) else x

    bound = problem.bound
    if bound is None and more[1]:
        zero = jnp.zeros((1,) * (problem.v.ndim - 1) + (1,), jnp.int32)
        bound = Bound(Spans(zero, zero + S))
    if bound is not None:
        bound = bound.map_arrays(lambda x: longer(x, -2, None, mode="constant") if x.shape[-2] > 1 else x)
    return grid, replace(
        problem, scoring=problem.scoring.cut(longer), v=longer(problem.v, None, -2), bound=bound
    )


def _vjp(f: Callable[[Any], Any], leaves: list[Any]) -> tuple[Any, Callable[[Any], Any]]:
    s, pull = jax.vjp(f, leaves)
    return s, lambda ds: pull(ds)[0]
