"""Statistics of an array of weights, against the definition."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnspan.statistics import column_sums, mass_on, mean_distance, statistics_of
from tests.attention.helpers import EVERY_DTYPE, FRAMEWORKS, TRACED, array, dtype_name, precision, values

from .reference import NAMES, NAN, hard_rows, hold, statistics, weights_of

# JAX compiles each of these anew: most wait for the sweep.
FEW = (*FRAMEWORKS[:2], pytest.param("jax", marks=[*FRAMEWORKS[2].marks, pytest.mark.sweep]))

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_statistics_of_hard_rows(framework: str, dtype: str) -> None:
    """Entropy and norm of saturated rows keep their digits, tied rows count all that tie."""
    scores = hard_rows(dtype)
    wanted = statistics(scores)
    with precision(framework, dtype):
        found = statistics_of(array(weights_of(scores).astype(dtype), framework, dtype))
        for name in NAMES:
            hold(values(getattr(found, name)), wanted[name], scores, dtype)


def test_zeros_have_no_sign() -> None:
    """Of a one-hot row the entropy is 0, not -0, and so it is without keys."""
    weights = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for found in (statistics_of(weights), statistics_of(weights[:, :1]), statistics_of(weights[:, :0])):
        assert not np.signbit(found.entropy).any()
        assert (found.entropy == 0).all()
    assert statistics_of(weights).effective_keys.tolist() == [1, 0]


@pytest.mark.parametrize("framework", FEW)
def test_a_row_of_nan_is_nan_and_its_neighbours_are_not(framework: str) -> None:
    """With zeros where the mask excludes, as attention weights have them."""
    p = array([[NAN, NAN, 0], [0.5, 0, 0.5], [0, 0, 0]], framework, "float32")
    found = statistics_of(p)
    keys = array([True, True, False], framework)
    for x in (*(getattr(found, name) for name in NAMES), mass_on(p, keys), mean_distance(p, np.arange(3))):
        assert np.isnan(values(x)).tolist() == [True, False, False]
    assert np.isnan(values(column_sums(p))).tolist() == [True, True, False]


@pytest.mark.parametrize(("framework", "dtype"), EVERY_DTYPE)
def test_sums_run_in_the_accumulation_dtype(framework: str, dtype: str) -> None:
    """4096 halves of a half type: the sum of a column would stop growing, or its count overflow."""
    with precision(framework, dtype):
        p = array(np.full((4096, 2), 0.5), framework, dtype)
        many = array(np.full((1, 2**17), 2.0**-17), framework, dtype)
        found = (
            column_sums(p),
            mass_on(p, array([True, False], framework)),
            mean_distance(p, np.arange(4096)),
        )
        wide = "float64" if dtype == "float64" else "float32"
        assert {dtype_name(x) for x in (*found, statistics_of(p).entropy)} == {wide}
        assert values(found[0]).tolist() == [2048, 2048]
        np.testing.assert_allclose(values(found[2]), np.abs(np.arange(4096) - 0.5), rtol=1e-6)
        np.testing.assert_allclose(values(statistics_of(many).effective_keys), [2.0**17], rtol=1e-4)


# Columns, masses, distances --------------------------------------------------------------------------


def weights(*lead: int) -> np.ndarray:
    p = RNG.random((*lead, 3, 5)) * (RNG.random((*lead, 3, 5)) < 0.7)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-9)
    p[..., 1, :] = 0  # sees no key
    return p


@pytest.mark.parametrize("framework", FEW)
@pytest.mark.parametrize("lead", [(), (2,), (2, 4)])
def test_columns_masses_and_distances(framework: str, lead: tuple[int, ...]) -> None:
    p = weights(*lead)
    given = array(p, framework, "float32")
    np.testing.assert_allclose(values(column_sums(given)), p.sum(-2), rtol=1e-6, atol=1e-7)
    for shape in {(5,), (3, 5), (*lead, 1, 5), (*lead, 3, 5)}:
        keys = RNG.random(shape) < 0.5
        wanted = np.zeros((*lead, 3))
        for at in np.ndindex(*p.shape):
            wanted[at[:-1]] += p[at] * np.broadcast_to(keys, p.shape)[at]
        found = values(mass_on(given, array(keys, framework)))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
        assert (found[..., 1] == 0).all()
    for shape in {(3,), (*lead, 1), (*lead, 3)}:
        positions = RNG.integers(-7, 12, shape)
        wanted = np.zeros((*lead, 3))
        for at in np.ndindex(*p.shape):
            wanted[at[:-1]] += p[at] * abs(int(np.broadcast_to(positions, wanted.shape)[at[:-1]]) - at[-1])
        for own in ("numpy", framework):
            found = values(mean_distance(given, array(positions, own)))
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
        assert (found[..., 1] == 0).all()


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_without_keys_or_queries(framework: str) -> None:
    for L, S in itertools.product((0, 2), (0, 3)):
        if L and S:
            continue
        p = array(np.zeros((2, L, S)), framework, "float32")
        assert values(column_sums(p)).tolist() == np.zeros((2, S)).tolist()
        for found in (
            mass_on(p, array(np.ones(S, bool), framework)),
            mean_distance(p, np.arange(L)),
            *(getattr(statistics_of(p), name) for name in NAMES),
        ):
            assert values(found).tolist() == np.zeros((2, L)).tolist()


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    lambda p, keys: statistics_of(p).entropy,
    lambda p, keys: statistics_of(p).jacobian_norm,
    lambda p, keys: column_sums(p),
    mass_on,
    lambda p, keys: mean_distance(p, np.arange(3)),
)


@pytest.mark.parametrize("framework", TRACED)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_nothing_is_differentiable(framework: str, fn: Callable[..., Any]) -> None:
    p, keys = array(weights(), framework, "float32"), array([True] * 2 + [False] * 3, framework)
    if framework == "torch":
        assert not fn(p.requires_grad_(), keys).requires_grad
    else:
        gradient = sys.modules["jax"].grad(lambda p: fn(p, keys).sum())(p)
        assert (values(gradient) == 0).all()
