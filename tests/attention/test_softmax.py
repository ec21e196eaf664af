"""masked_softmax and masked_logsumexp: any rank, every form of lengths and masks, and their ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.masks import Causal, Documents, SlidingWindow, ValidLens

from .helpers import (
    DTYPES,
    EVERY_DTYPE,
    FRAMEWORKS,
    INF,
    NAN,
    TRACED,
    array,
    close,
    dtype_name,
    precision,
    rounded,
    same_bits,
    values,
)


def reference(scores: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give weights and log-sum-exp, row by row in float64: the definition."""
    keep = np.broadcast_to(keep, scores.shape) & (scores != -INF)
    weights, lse = np.zeros(scores.shape), np.full(scores.shape[:-1], -INF)
    for at in np.ndindex(*scores.shape[:-1]):
        seen = [j for j in range(scores.shape[-1]) if keep[at][j]]
        if seen:
            top = max(scores[at][j] for j in seen)
            total = math.fsum(math.exp(scores[at][j] - top) for j in seen)
            lse[at] = top + math.log(total)
            for j in seen:
                weights[at][j] = math.exp(scores[at][j] - top) / total
    return weights, lse


def hold(
    framework: str, dtype: str, scores: np.ndarray, keep: np.ndarray, *args: Any, **options: Any
) -> None:
    scores = rounded(scores, dtype)
    weights, lse = reference(scores, keep)
    given = array(scores, framework, dtype)
    found = asp.masked_softmax(given, *args, **options)
    assert dtype_name(found) == dtype
    close(values(found), weights, dtype)
    assert (values(found)[weights == 0] == 0).all()
    found = asp.masked_logsumexp(given, *args, **options)
    wide = "float64" if dtype == "float64" else "float32"
    assert dtype_name(found) == wide
    close(values(found), lse, wide, float(np.abs(scores).max(initial=1)))


SHAPES = ((5,), (4, 5), (3, 4, 5), (3, 2, 4, 5), (3, 2, 2, 4, 5))


def draw(shape: tuple[int, ...]) -> np.ndarray:
    return 3 * np.random.default_rng(len(shape)).standard_normal(shape)


def lengths(shape: tuple[int, ...]) -> list[tuple[Any, np.ndarray]]:
    """List every form of valid_lens for scores of that shape, each with what it shows."""
    j, rank = np.arange(5), len(shape)
    forms: list[tuple[Any, np.ndarray]] = [(n, j < n) for n in (0, 2, 5)]
    if rank > 1:
        lens = np.array([0, 5, 2, 1])[: shape[0]]
        forms.append((lens, j < lens.reshape(-1, *(1,) * (rank - 1))))
    if rank > 2:
        lens = np.array([[0, 1, 2, 3], [5, 4, 0, 1], [2, 2, 2, 0]])
        forms.append((lens, j < lens.reshape(3, *(1,) * (rank - 3), 4, 1)))
    return forms


def masks(shape: tuple[int, ...]) -> list[tuple[Any, np.ndarray]]:
    """List boolean arrays of every broadcast that has a meaning, and masks, each with what it shows."""
    rng, rank = np.random.default_rng(0), len(shape)
    full = (*shape[:1], *shape[-3:-2], *shape[-2:])[-4:] if rank == 5 else shape
    found: list[tuple[Any, np.ndarray]] = []
    for one in itertools.product((0, 1), repeat=len(full)):
        part = tuple(1 if n else m for n, m in zip(one, full, strict=True))
        seen = rng.random(part) < 0.6
        found.append((seen, seen if rank < 5 else seen[:, None]))
    if rank > 1:
        row = rng.random(5) < 0.5
        found += [(row, row), (np.tri(4, 5, dtype=bool), np.tri(4, 5, dtype=bool))]
        band = np.tri(4, 5, dtype=bool) & ~np.tri(4, 5, -2, dtype=bool)
        found += [(Causal(0), np.tri(4, 5, dtype=bool)), (SlidingWindow(1, align=0), band)]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("framework", "dtype"), EVERY_DTYPE)
def test_every_rank_and_form(framework: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Lengths, masks, and both, which must both agree."""
    if framework == "jax" and (dtype != "float32" or len(shape) not in (3, 4)):
        return  # the few shapes below, in the sweep all of them
    forms_of_both(framework, dtype, shape)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES["jax"])
@pytest.mark.parametrize("framework", FRAMEWORKS[2:])
def test_every_rank_and_form_in_jax(framework: str, dtype: str, shape: tuple[int, ...]) -> None:
    forms_of_both(framework, dtype, shape)


def forms_of_both(framework: str, dtype: str, shape: tuple[int, ...]) -> None:
    scores = draw(shape)
    few = slice(0, None, 5) if framework == "jax" else slice(None)
    with precision(framework, dtype):
        hold(framework, dtype, scores, np.ones(5, bool))
        for lens, shown in lengths(shape):
            for given in (lens,) if isinstance(lens, int) else (lens.tolist(), lens, array(lens, framework)):
                hold(framework, dtype, scores, shown, given)
        for mask, shown in masks(shape)[few]:
            given = mask if not isinstance(mask, np.ndarray) else array(mask, framework)
            hold(framework, dtype, scores, shown, mask=given)
            lens, more = lengths(shape)[-1]
            hold(framework, dtype, scores, shown & more, lens, mask=given)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_sizes_of_zero_and_one(framework: str) -> None:
    for shape in ((0,), (2, 0), (0, 5), (0, 3, 5), (2, 3, 0), (2, 1, 1), (1, 1, 1, 1)):
        x = array(np.ones(shape), framework, "float32")
        assert tuple(asp.masked_softmax(x).shape) == shape
        lse = values(asp.masked_logsumexp(x))
        assert lse.shape == shape[:-1]
        assert (lse == (1 if shape[-1] else -INF)).all()
        if len(shape) > 1:
            x = array(np.ones(shape), framework, "float32")
            none = asp.masked_softmax(x, array(np.zeros(shape[0], np.int64), framework))
            assert (values(none) == 0).all()


# What the reports are about --------------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "dtype"), EVERY_DTYPE)
def test_numbers_from_the_reports(framework: str, dtype: str) -> None:
    """B06, B07, B14, B46, B47, B50: an empty row is 0, no filler leaks, none overflows."""
    big = 2e6 if dtype != "float16" else 6e4
    cases: list[tuple[Any, Any, Any]] = [
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, 0]),
        ([-big, -big, 3, 4], [1, 1, 0, 0], [0.5, 0.5, 0, 0]),
        ([0, 0, 200, 0], [1, 1, 0, 0], [0.5, 0.5, 0, 0]),
        ([0, 0, 12, 12], [1, 1, 0, 0], [0.5, 0.5, 0, 0]),
        ([-20, -20, 50, -50], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([0, 9990, 9990, 9990], [1, 0, 0, 0], [1, 0, 0, 0]),
        ([-big, big, big, -big], [1, 0, 0, 0], [1, 0, 0, 0]),
        ([-INF, 0, -INF, 0], [1, 1, 1, 0], [0, 1, 0, 0]),
        ([-INF, -INF, 5, 5], [1, 1, 0, 0], [0, 0, 0, 0]),
    ]
    scores, mask, wanted = (np.array([case[n] for case in cases], float) for n in range(3))
    with precision(framework, dtype):
        found = asp.masked_softmax(array(scores, framework, dtype), mask=array(mask.astype(bool), framework))
        close(values(found), wanted, dtype)
        assert (values(found)[wanted == 0] == 0).all()
        every = array(np.zeros((2, 2, 4)), framework, dtype)
        by_length = values(asp.masked_softmax(every, [0, 3]))
        close(by_length[:, 0], wanted[:2], dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_log_softmax(framework: str) -> None:
    """B12: scores - logsumexp where visible; -inf and never NaN at an empty row."""
    x = array([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 5, 9]], framework, "float32")
    mask = array([[True] * 3 + [False], [False] * 4, [True, True, False, False]], framework)
    lse = values(asp.masked_logsumexp(x, mask=mask))
    np.testing.assert_allclose(lse, [math.log(3), -INF, math.log(2)], rtol=1e-6)


def gradient(framework: str, fn: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    if framework == "torch":
        import torch

        leaf = array(x, framework, "float32").requires_grad_()
        return values(torch.autograd.grad(fn(leaf), leaf)[0])
    import jax

    return values(jax.jit(jax.grad(fn))(array(x, framework, "float32")))


@pytest.mark.parametrize("framework", TRACED)
def test_gradients(framework: str) -> None:
    """B12, B15: right where visible, exactly 0 at what is hidden and at empty rows, whatever it holds."""
    scores = draw((3, 4))
    mask = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], bool)
    g = np.array([[1.0, -2, 3, 0.5], [1, 1, 1, 1], [2, 2, 2, 2]])
    seen, up = array(mask, framework), array(g, framework, "float32")
    p = reference(scores, mask)[0]
    wanted = p * (g - (p * g).sum(axis=1, keepdims=True))
    for poison in (0.0, NAN, INF, 3e38):
        x = np.where(mask, scores, poison)
        found = gradient(framework, lambda s: (asp.masked_softmax(s, mask=seen) * up).sum(), x)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
        assert (found[~mask] == 0).all()
        found = gradient(framework, lambda s: asp.masked_logsumexp(s, mask=seen)[0], x)
        np.testing.assert_allclose(found, np.where([[True], [False], [False]], p, 0), rtol=0, atol=1e-6)
        every = gradient(framework, lambda s: asp.masked_logsumexp(s, mask=seen).sum(), x)
        np.testing.assert_allclose(every, p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_hidden_scores_may_hold_anything(framework: str) -> None:
    """And a visible one that is not finite makes NaN of its own row alone."""
    scores, mask = draw((3, 4, 5)), np.random.default_rng(1).random((3, 4, 5)) < 0.6
    seen = array(mask, framework)
    call = lambda x: asp.masked_softmax(array(x, framework, "float32"), mask=seen)  # noqa: E731
    clean = call(scores)
    for poison in (NAN, INF, -INF, 3e38):
        same_bits(call(np.where(mask, scores, poison)), clean)
    mask[1, 2, 3] = True
    seen = array(mask, framework)
    for poison in (NAN, INF):
        x = scores.copy()
        x[1, 2, 3] = poison
        found = values(call(x))
        nan = np.zeros((3, 4), bool)
        nan[1, 2] = True
        np.testing.assert_array_equal(np.isnan(found).any(axis=-1), nan)
        np.testing.assert_allclose(found[~nan], values(call(scores))[~nan], rtol=0, atol=0)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_gradcheck(framework: str) -> None:
    import torch

    x = torch.randn((2, 3, 4), dtype=torch.float64).requires_grad_()
    lens = torch.tensor([[0, 2, 4], [1, 3, 0]])
    fn = lambda x: asp.masked_softmax(x, lens)  # noqa: E731
    assert torch.autograd.gradcheck(fn, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fn, x)


@pytest.mark.parametrize("framework", TRACED)
def test_traced_lengths_are_clipped(framework: str) -> None:
    """Under jit, vmap and compile no value is looked at: what lies outside [0, S] is cut off."""
    scores = draw((3, 4, 5)).astype("f4")
    lens = np.array([-3, 2, 9])
    wanted = reference(scores.astype(float), np.arange(5) < np.clip(lens, 0, 5)[:, None, None])[0]
    given = array(scores, framework), array(lens, framework)
    if framework == "jax":
        import jax

        found = jax.jit(asp.masked_softmax)(*given)
    else:
        import torch

        found = torch.func.vmap(asp.masked_softmax)(*given)
    close(values(found), wanted, "float32")


# Refusals --------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 4), np.float32)
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "integer scores": (
        lambda to: asp.masked_softmax(to(X.astype(int))),
        r"scores: given int\d+\[2, 3, 4\], needed a floating-point array \(\.\.\., S\)",
    ),
    "a list": (
        lambda to: asp.masked_softmax([0.0, 1.0]),
        "scores: given list, needed a floating-point array",
    ),
    "0-d": (
        lambda to: asp.masked_softmax(to(X)[0, 0, 0]),
        "scores: given float32.., needed a floating-point",
    ),
    "float lengths": (
        lambda to: asp.masked_softmax(to(X), to(np.ones(2, np.float32))),
        r"valid_lens: given float32\[2\], needed integers: a number, \(B,\)",
    ),
    "a boolean": (lambda to: asp.masked_softmax(to(X), True), "valid_lens: given True, needed integers"),
    "too many lengths": (
        lambda to: asp.masked_softmax(to(X), [1, 2, 3]),
        r"valid_lens: given int64\[3\], needed a number, \(B,\) .* for scores float32\[2, 3, 4\]",
    ),
    "lengths per key": (
        lambda to: asp.masked_softmax(to(X), np.ones((2, 4), int)),
        r"valid_lens: given int64\[2, 4\], needed .*\(B, L\) one per row",
    ),
    "too long": (
        lambda to: asp.masked_softmax(to(X), [1, 5]),
        "valid_lens: given int64.2. with values from 1 to 5, needed lengths between 0 and S = 4",
    ),
    "negative": (
        lambda to: asp.masked_softmax(to(X), -1),
        "valid_lens: given .*-1.*, needed lengths between 0 and S = 4",
    ),
    "a float mask": (
        lambda to: asp.masked_softmax(to(X), mask=to(X)),
        r"mask: given float32\[2, 3, 4\], needed booleans .*; a float array is a bias",
    ),
    "lengths as a mask": (
        lambda to: asp.masked_softmax(to(X), mask=to(np.array([[[1, 3, 2, 2]]]))),
        r"needed booleans, or integers that are all 0 or 1 .*; did you mean valid_lens\?",
    ),
    "another length": (
        lambda to: asp.masked_softmax(to(X), mask=to(np.ones((2, 3, 5), bool))),
        r"mask: given bool\[2, 3, 5\], needed \(\.\.\., L, S\) = \(\.\.\., 3 or 1, 4 or 1\)",
    ),
    "which axis": (
        lambda to: asp.masked_softmax(to(X)[:, None], mask=to(np.ones((2, 3, 4), bool))),
        r"mask: given bool\[2, 3, 4\], needed four axes beside scores float32\[2, 1, 3, 4\]",
    ),
    "alignment unsaid": (
        lambda to: asp.masked_softmax(to(X), mask=Causal()),
        "align: given nothing, for Causal",
    ),
    "a mask for other sizes": (
        lambda to: asp.masked_softmax(to(X), mask=ValidLens([1, 2, 3])),
        r"ValidLens.lens: given int64\[3\], needed B = 2 \(or 1\) on axis 0",
    ),
    "documents of other lengths": (
        lambda to: asp.masked_softmax(to(X), mask=Documents([0, 0, 1])),
        "Documents",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refusals(framework: str, mistake: str) -> None:
    make, text = MISTAKES[mistake]
    with pytest.raises(asp.ArgumentError, match=text):
        make(lambda x: array(x, framework))
