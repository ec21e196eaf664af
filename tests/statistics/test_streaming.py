"""Statistics from tiles of scores, against the definition and against those of the weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import attnspan as asp
from attnspan.arrays import as_written
from attnspan.arrays import framework as framework_of
from attnspan.scores import Dot
from attnspan.statistics import (
    RunningMean,
    RunningStatistics,
    column_sums,
    mass_on,
    mean_distance,
    statistics_of,
)
from tests.attention.helpers import FRAMEWORKS, TRACED, array, dtype_name, precision, same_bits, values

from .reference import INF, NAMES, NAN, hard_rows, hold, statistics, tiles_of, weights_of

# JAX compiles each of these anew: most wait for the sweep.
FEW = (*FRAMEWORKS[:2], pytest.param("jax", marks=[*FRAMEWORKS[2].marks, pytest.mark.sweep]))

WIDE = ("float32", "float64")
WIDTHS = ([1], [2], [3, 1, 4], [100])


def stream(s: Any, keep: Any = None, widths: Any = (3, 1, 4)) -> dict[str, Any]:
    """Run over scores (..., S): everything that is streamed, by name."""

    def run(s: Any, keep: Any) -> dict[str, Any]:
        tiles = tiles_of(s.shape[-1], widths)
        every = keep is None or keep.shape[-1] == 1
        parts = [(s[..., t], keep if every else keep[..., t]) for t in tiles]
        with as_written(s):
            seen = RunningStatistics.start(tuple(s.shape[:-1]), s)
            for tile, kept in parts:
                seen = seen.update(tile, kept)
            lse, found = seen.finish()
            columns = [seen.column_sums(tile, kept) for tile, kept in parts]
        return {"lse": lse, **{name: getattr(found, name) for name in NAMES}, "columns": columns}

    return compiled(run, s)(s, keep)


def mean(s: Any, x: Any, keep: Any = None, widths: Any = (3, 1, 4)) -> Any:
    def run(s: Any, x: Any, keep: Any) -> Any:
        with as_written(s):
            seen = RunningMean.start(tuple(s.shape[:-1]), s)
            for t in tiles_of(s.shape[-1], widths):
                seen = seen.update(s[..., t], x[..., t], None if keep is None else keep[..., t])
            return seen.finish()

    return compiled(run, s)(s, x, keep)


def compiled(fn: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """Jit for JAX, which would otherwise compile operation by operation."""
    return sys.modules["jax"].jit(fn) if framework_of(like) == "jax" else fn


# Precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_hard_rows(framework: str, dtype: str) -> None:
    """Saturated, tied, with the largest first, last and in between, in tiles of several widths."""
    scores = hard_rows(dtype)
    wanted = statistics(scores)
    dense = statistics_of(weights_of(scores).astype(np.float64))
    with precision(framework, dtype):
        for widths in WIDTHS if framework != "jax" else WIDTHS[2:]:
            found = stream(array(scores, framework, dtype), widths=widths)
            for name in ("lse", *NAMES):
                assert dtype_name(found[name]) == dtype
                hold(values(found[name]), wanted[name], scores, dtype, name)
            for name in NAMES:
                hold(values(found[name]), getattr(dense, name), scores, dtype)


@pytest.mark.parametrize("framework", FEW)
def test_means_and_columns_of_hard_rows(framework: str) -> None:
    dtype = "float32"
    scores = hard_rows(dtype)
    p = weights_of(scores).astype(np.float64)
    L, S = p.shape
    keys, positions = np.arange(S) % 3 == 1, np.arange(L)
    distance = np.abs(positions[:, None] - np.arange(S))
    s = array(scores, framework, dtype)
    hold(values(mean(s, array(keys, framework))), mass_on(p, keys), scores, dtype)
    hold(values(mean(s, array(distance, framework))), mean_distance(p, positions), scores, dtype)
    alone = np.concatenate([values(x) for x in stream(s[:, None], widths=[7])["columns"]], -1)
    for j in range(S):  # with one query, the sums over queries are its weights
        hold(alone[:, j], p[:, j], scores, dtype)
    together = np.concatenate([values(x) for x in stream(s, widths=[7])["columns"]])
    np.testing.assert_allclose(together, column_sums(p), rtol=2e-5)


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int], str]:
    """Draw scores with ties, gaps and gradual slopes, what the mask shows, and a partition."""
    n = draw(st.integers(1, 40))
    values = st.one_of(
        st.sampled_from([0.0, 0.0, 1.0, 30.0, 60.0, 88.0, 200.0, -INF, "min", "max"]),
        st.integers(-400, 400).map(lambda i: i / 4),
        st.floats(-20, 20, width=32),
    )
    dtype = draw(st.sampled_from(WIDE))
    limits = {"min": np.finfo(dtype).min, "max": np.finfo(dtype).max}
    row = [limits.get(x, x) for x in draw(st.lists(values, min_size=n, max_size=n))]
    keep = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    if draw(st.booleans()):
        keep = [True] * n
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    return np.array([row], np.float64), np.array([keep]), widths, dtype


@given(rows())
@example((np.array([[5.0, 5.0, 5.0]]), np.array([[True, True, True]]), [1], "float32"))
def test_random_rows_and_partitions(drawn: tuple[np.ndarray, np.ndarray, list[int], str]) -> None:
    scores, keep, widths, dtype = drawn
    shown = np.where(keep, scores, -INF)
    wanted = statistics(scores, keep)
    s = scores.astype(dtype)
    found = stream(s, keep, widths)
    for name in ("lse", *NAMES):
        hold(found[name], wanted[name], shown, dtype, name)
    p = weights_of(scores, keep)
    x = (np.cos(np.arange(s.shape[-1])) + 2)[None].astype(dtype)
    average = mean(s, x, keep, widths)
    hold(average, (p * x).sum(-1), shown, dtype)

    poison = np.resize(np.array([NAN, INF, -INF, 0], dtype), s.shape)
    again = stream(np.where(keep, s, poison), keep, widths)
    for name in ("lse", *NAMES):
        same_bits(again[name], found[name])
    same_bits(np.concatenate(again["columns"]), np.concatenate(found["columns"]))
    same_bits(mean(np.where(keep, s, poison), np.where(keep, x, poison), keep, widths), average)


def test_the_fields_are_what_they_say() -> None:
    scores = hard_rows("float64")
    with as_written(scores):
        seen = RunningStatistics.start(scores.shape[:1], scores)
        for t in tiles_of(scores.shape[1], [2, 3]):
            seen = seen.update(scores[:, t])
    lowest = np.finfo(float).min
    for row, a in enumerate(scores):
        a = a[a != -INF]
        top = a.max(initial=lowest)
        assert (seen.top[row], seen.n[row]) == (top, (a == top).sum())
        assert seen.second[row] == a[a != top].max(initial=lowest)


def test_many_tiles() -> None:
    """Thousands of updates: rounding adds up as in any sum of that many terms, and no faster."""
    rng = np.random.default_rng(0)
    n = 4000
    scores = np.sort(rng.standard_normal((3, n)) * [[1], [10], [40]]).astype(np.float32)
    wanted = statistics_of(weights_of(scores).astype(np.float64))
    for s in (scores, scores[:, ::-1], rng.permuted(scores, axis=1)):
        found = stream(s, widths=[1])
        for name in NAMES:
            np.testing.assert_allclose(found[name], getattr(wanted, name), rtol=3e-5)


def test_norms_down_to_the_smallest_number() -> None:
    """The norm of two keys is 2·p·(1 - p): its square would vanish from 1e-19 on."""
    gaps = np.arange(40, 88, dtype=np.float32)
    found = stream(np.stack([gaps, np.zeros_like(gaps)], -1), widths=[1])["jacobian_norm"]
    np.testing.assert_allclose(found, 2 * np.exp(-gaps.astype(np.float64)), rtol=1e-6)
    assert found[-1] < 4e-38


# What is excluded, what is empty, what is not finite ---------------------------------------------------


@pytest.mark.parametrize("framework", FEW)
def test_what_is_excluded_may_hold_anything(framework: str) -> None:
    """And moves no bit, whatever shape the mask has."""
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((2, 3, 7)) * 20
    shapes = ((7,), (3, 7), (1, 7), (3, 1), (2, 1, 7), (2, 3, 7))
    for shape in shapes if framework != "jax" else shapes[-3:]:
        keep = rng.random(shape) < 0.6
        poison = rng.choice([NAN, INF, -INF, 3e38], scores.shape)
        kept = array(keep, framework)
        clean, dirty = (
            array(np.where(np.broadcast_to(keep, scores.shape), scores, other), framework, "float32")
            for other in (0, poison)
        )
        found, again = stream(clean, kept), stream(dirty, kept)
        for name in ("lse", *NAMES):
            same_bits(again[name], found[name])
        for one, other in zip(again["columns"], found["columns"], strict=True):
            same_bits(one, other)
        for row in np.ndindex(2, 3):
            wanted = statistics(
                scores.astype("f4")[row][None], np.broadcast_to(keep, scores.shape)[row][None]
            )
            shown = np.where(np.broadcast_to(keep, scores.shape)[row], scores[row], -INF)[None]
            for name in ("lse", *NAMES):
                hold(values(found[name])[row][None], wanted[name], shown, "float32")


@pytest.mark.parametrize("framework", FEW)
@pytest.mark.parametrize("other", [NAN, INF])
def test_a_row_that_sees_a_non_finite_score_is_nan(framework: str, other: float) -> None:
    """Wherever it stands; a neighbour keeps every bit."""
    for at in range(6):
        scores = np.arange(18.0).reshape(3, 6)
        keep = np.ones((3, 6), bool)
        keep[1, :2] = False
        keep[2, at] = False
        clean = stream(array(scores, framework, "float32"), array(keep, framework))
        scores[[0, 2], at] = other
        s, kept = array(scores, framework, "float32"), array(keep, framework)
        found = stream(s, kept)
        for name in ("lse", *NAMES):
            assert np.isnan(values(found[name])[0]), name
            same_bits(found[name][1:], clean[name][1:])
        columns = np.concatenate([values(x) for x in found["columns"]])
        assert np.isnan(columns).all()  # row 0 sees every key
        x = array(np.arange(6) % 2 == 0, framework)
        assert np.isnan(values(mean(s, x, kept))).tolist() == [True, False, False]
        if framework == "jax" and at == 1:
            return  # each operation is compiled: two places are enough


@pytest.mark.parametrize("framework", FEW)
def test_without_keys(framework: str) -> None:
    """Nothing shown, no tile at all, tiles of no key, and no query."""
    s = array(np.full((2, 3), NAN), framework, "float32")
    shown = stream(s, array(np.zeros((2, 3), bool), framework))
    with as_written(s):
        start = RunningStatistics.start((2,), s)
        for seen in (start, start.update(s[:, :0])):
            lse, found = seen.finish()
            assert values(lse).tolist() == values(shown["lse"]).tolist() == [-INF, -INF]
            for name in NAMES:
                assert values(getattr(found, name)).tolist() == values(shown[name]).tolist() == [0, 0]
        nothing = RunningMean.start((2,), s)
        for seen in (nothing, nothing.update(s[:, :0], s[:, :0])):
            assert values(seen.finish()).tolist() == [0, 0]
    assert all((values(x) == 0).all() for x in shown["columns"])


@pytest.mark.parametrize("framework", FEW)
def test_as_inspected(framework: str) -> None:
    """The very conventions of `inspect`: a bias of NaN, +inf or -inf, a row of the mask without a key."""
    bias = np.array([[0, 1, 2, 3], [0, NAN, 0, 0], [INF, 0, 0, 0], [-INF, 1, 2, -INF], [1, 2, 3, 4], [0] * 4])
    keep = np.ones((5 + 1, 4), bool)
    keep[4] = False
    keep[5, 1:] = False
    q, k = (array(np.zeros((1, n, 1)), framework, "float32") for n in (6, 4))
    b, mask = array(bias, framework, "float32"), array(keep, framework)
    wanted = asp.inspect(q, k, k, score=Dot(), bias=b, mask=mask)
    found = stream(b, mask)
    for name in ("lse", *NAMES):
        expected = values(wanted.lse if name == "lse" else getattr(wanted.stats, name))[0]
        np.testing.assert_allclose(values(found[name]), expected, rtol=1e-6, err_msg=name)


# Loops, compilers, transforms ----------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["fori_loop", "scan"])
def test_carried_through_loops_of_jax(loop: str) -> None:
    jax = pytest.importorskip("jax")
    scores = hard_rows("float32")
    scores = np.pad(scores, ((0, 0), (0, -scores.shape[1] % 4)), constant_values=-INF)
    tiles = scores.shape[1] // 4

    def one(seen: tuple[Any, Any], tile: Any, t: Any) -> tuple[Any, Any]:
        x = (jax.numpy.arange(4) + 4 * t) % 2 == 0
        return seen[0].update(tile), seen[1].update(tile, x)

    @jax.jit
    def run(s: Any) -> Any:
        lead = s.shape[:-1]
        start = RunningStatistics.start(lead, s), RunningMean.start(lead, s)
        if loop == "scan":
            cut = jax.numpy.moveaxis(s.reshape(*lead, tiles, 4), -2, 0)
            seen, _ = jax.lax.scan(lambda c, x: (one(c, *x), None), start, (cut, jax.numpy.arange(tiles)))
        else:
            body = lambda t, c: one(c, jax.lax.dynamic_slice_in_dim(s, 4 * t, 4, axis=-1), t)  # noqa: E731
            seen = jax.lax.fori_loop(0, tiles, body, start)
        return seen[0].finish(), seen[1].finish()

    (lse, found), mass = run(array(scores, "jax", "float32"))
    wanted = {
        **statistics(scores),
        "mass": mass_on(weights_of(scores).astype("f8"), np.arange(4 * tiles) % 2 == 0),
    }
    for name, x in {"lse": lse, "mass": mass, **{n: getattr(found, n) for n in NAMES}}.items():
        hold(values(x), wanted[name], scores, "float32", name)


def test_compiled_by_torch_in_one_graph() -> None:
    torch = pytest.importorskip("torch")
    scores = hard_rows("float32")
    s, keep = array(scores, "torch", "float32"), array(np.isfinite(scores), "torch")

    def run(s: Any, keep: Any) -> Any:
        found = stream(s, keep)
        return *(found[name] for name in ("lse", *NAMES)), *found["columns"], mean(s, s == 0, keep)

    one_graph = torch.compile(run, backend="eager", fullgraph=True)
    for a, b in zip(one_graph(s, keep), run(s, keep), strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("framework", TRACED)
def test_mapped_and_not_differentiable(framework: str) -> None:
    scores = np.random.default_rng(0).standard_normal((3, 2, 5)) * 10
    s = array(scores, framework, "float32")

    def run(s: Any) -> Any:
        found = stream(s)
        return found["lse"], found["jacobian_norm"], mean(s, s > 0)

    if framework == "torch":
        mapped = sys.modules["torch"].func.vmap(run)(s)
        assert not any(x.requires_grad for x in run(s.clone().requires_grad_()))
    else:
        jax = sys.modules["jax"]
        mapped = jax.jit(jax.vmap(run))(s)
        gradient = jax.grad(lambda s: sum(x.sum() for x in run(s)))(s)
        assert (values(gradient) == 0).all()
    for a, b in zip(mapped, run(s), strict=True):
        np.testing.assert_allclose(values(a), values(b), rtol=1e-6)


@pytest.mark.parametrize("framework", TRACED)
def test_half_scores_are_summed_in_float32(framework: str) -> None:
    s = array(np.zeros((1, 4096)), framework, "bfloat16")
    found = stream(s, widths=[1024])
    assert {dtype_name(found[name]) for name in ("lse", *NAMES)} == {"float32"}
    np.testing.assert_allclose(values(found["effective_keys"]), [4096], rtol=1e-6)
