"""Looking: the output keeps every bit, and log-sum-exp, statistics and weights are the oracle's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.masks import Causal, SlidingWindow, ValidLens
from attnspan.scores import Dot

from .asked import Asked, scale_of
from .cases import SCORES, Sizes, masks
from .helpers import (
    DTYPES,
    EVERY_DTYPE,
    FRAMEWORKS,
    INF,
    NAMES,
    TRACED,
    array,
    close,
    dtype_name,
    precision,
    runs,
    same_bits,
    values,
)

MASKS = tuple(name for name, _, _ in masks(Sizes()))
STATISTICS = ("entropy", "effective_keys", "max_weight", "jacobian_norm")
REQUESTS = {
    "plain": Asked(),
    "masked": Asked(mask="causal, window, valid"),
    "bits, bias": Asked(mask="bits", bias="-BHLS", score="gaussian"),
    "everything at once": Asked(mask="window", bias="alibi", softcap=2.0, sink="1H", dropout=0.4),
    "additive": Asked(score="additive", mask="valid (B,)"),
    "no keys": Asked(sizes=Sizes(S=0)),
}
LARGE = Sizes(B=2, H=2, G=1, L=48, S=56, D=16, E=16)


def look(asked: Asked, framework: str, dtype: str, name: str = "auto") -> tuple[Any, oracle.Result, float]:
    x = asked.draw(dtype)
    qkv, options = asked.library(asked.native(framework, dtype, x), framework)
    r = asp.inspect(*qkv, **options, implementation=name)
    qkv, options = asked.oracle(x)
    wanted = oracle.attention(*qkv, **options)
    return r, wanted, scale_of(x, wanted)


def judge(r: Any, wanted: oracle.Result, dtype: str, scale: float) -> None:
    """Hold everything but the output against the oracle, in the accumulation dtype."""
    wide = "float64" if dtype == "float64" else "float32"
    weights = r.weights()
    for found, right in (
        (r.lse, wanted.lse),
        (weights, wanted.weights),
        *((getattr(r.stats, name), getattr(wanted, name)) for name in STATISTICS),
    ):
        assert dtype_name(found) == wide
        close(values(found), right, wide, scale)
    assert (values(weights)[wanted.weights == 0] < 1e-30).all()
    empty = np.isinf(wanted.lse)
    for name in STATISTICS:
        assert (values(getattr(r.stats, name))[empty] == 0).all()


@pytest.mark.parametrize(
    ("framework", "mask"),
    [
        pytest.param(*f.values, name, marks=f.marks)
        for f in FRAMEWORKS
        for name in (MASKS if f.values != ("jax",) else ("nothing", "valid (B,)", "bits", "causal at -2"))
    ],
)
def test_what_is_seen_is_the_oracles(framework: str, mask: str) -> None:
    dtypes = DTYPES[framework] if framework != "jax" else ("float32",)
    scores = ("scaled dot", "gaussian") if framework != "jax" else ("scaled dot",)
    for score, dtype in itertools.product(scores, dtypes):
        with precision(framework, dtype):
            judge(*_with(look(Asked(score=score, mask=mask), framework, dtype), dtype))


def _with(found: tuple[Any, oracle.Result, float], dtype: str) -> tuple[Any, oracle.Result, str, float]:
    r, wanted, scale = found
    return r, wanted, dtype, scale


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_output_keeps_every_bit(framework: str, name: str) -> None:
    """B29, B30, B84: whatever the implementation; and weights that were asked for change nothing either."""
    asked = REQUESTS[name]
    if framework == "jax" and name == "no keys":
        return
    for dtype in DTYPES[framework] if framework != "jax" else ("float32",):
        qkv, options = asked.library(asked.native(framework, dtype), framework)
        for one in ("auto", *NAMES):
            if one != "auto" and not runs(one, *qkv, **options):
                continue
            out = asp.attention(*qkv, **options, implementation=one)
            r = asp.inspect(*qkv, **options, implementation=one)
            same_bits(r.out, out)
            r.weights()
            same_bits(r.out, out)
            assert r.plan == asp.plan(*qkv, **options, implementation=one)
            assert one in (r.plan.implementation, "auto")
    if dtype != "bfloat16":
        r, wanted, scale = look(asked, framework, dtype)
        judge(r, wanted, dtype, scale)


@pytest.mark.parametrize("name", ["everything at once", pytest.param("bits, bias", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("framework", TRACED[1:])
def test_the_output_keeps_every_bit_under_jit(framework: str, name: str) -> None:
    """The record is a pytree with a static plan; the second pass is kept apart from the first."""
    import dataclasses

    import jax

    asked = dataclasses.replace(REQUESTS[name], sizes=LARGE)
    x = asked.native(framework, "float32")

    def options_of(x: dict[str, Any]) -> Any:
        return asked.library(x, framework)

    def plain(x: dict[str, Any]) -> Any:
        qkv, options = options_of(x)
        return asp.attention(*qkv, **options, implementation="tiled")

    def looked(x: dict[str, Any]) -> Any:
        qkv, options = options_of(x)
        r = asp.inspect(*qkv, **options, implementation="tiled")
        return r, r.weights(rows=[0, -1])

    out = jax.jit(plain)(x)
    r, rows = jax.jit(looked)(x)
    same_bits(r.out, out)
    assert r.plan.implementation == "tiled"
    assert all(isinstance(y, jax.Array) for y in jax.tree.leaves(r))
    qkv, options = asked.oracle(asked.draw("float32"))
    wanted = oracle.attention(*qkv, **options)
    judge(r, wanted, "float32", 20.0)
    np.testing.assert_allclose(values(rows), wanted.weights[..., [0, -1], :], rtol=0, atol=2e-5)


def compiled(backend: str, name: str, sizes: Sizes, one: str = "auto") -> None:
    import torch

    asked = dataclasses.replace(REQUESTS[name], sizes=sizes)
    x = asked.native("torch", "float32")
    qkv, options = asked.library(x, "torch")

    def run(fn: Callable[..., Any]) -> Any:
        torch.compiler.reset()
        return torch.compile(fn, backend=backend, fullgraph=True)(*qkv)

    def looked(q: Any, k: Any, v: Any) -> Any:
        r = asp.inspect(q, k, v, **options, implementation=one)
        return r.out, r.lse, r.stats.entropy, r.stats.jacobian_norm, r.weights()

    out = run(lambda q, k, v: asp.attention(q, k, v, **options, implementation=one))
    found = run(looked)
    same_bits(found[0], out)
    given, right = asked.oracle(asked.draw("float32"))
    wanted = oracle.attention(*given, **right)
    close(values(out), wanted.out, "float32", 20.0)
    names = ("lse", "entropy", "jacobian_norm", "weights")
    for y, n in zip(found[1:], names, strict=True):
        close(values(y), getattr(wanted, n), "float32", 20.0)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_the_output_keeps_every_bit_when_compiled(framework: str) -> None:
    """B74: one graph, no break."""
    compiled("eager", "masked", Sizes())


@pytest.mark.sweep
@pytest.mark.parametrize("framework", TRACED[:1])
def test_the_output_keeps_every_bit_when_fused(framework: str) -> None:
    for name in ("masked", "bits, bias", "everything at once"):
        for one in ("auto", "eager"):
            compiled("inductor", name, LARGE, one)


# Statistics where naive formulas cancel ---------------------------------------------------------------

ROWS = {
    "uniform": [0, 0, 0, 0, 0],
    "two tied": [3, 3, -40, -41, -60],
    "three tied, near others": [2, 2, 2, 1.5, 0],
    "ordinary": [0.5, -1, 2, 0.25, 1],
    "one hot": [0, -300, -300, -400, -1000],
    **{
        f"saturated by {gap}": [0, -gap, -gap - 1, -2 * gap, -2 * gap]
        for gap in (1, 4, 8, 12, 16, 20, 30, 40)
    },
    "saturated, then tied": [50, 10, 10, 10, 10],
    "far from 0": [1000, 999, 998, 990, 0],
    "far below 0": [-1000, -999, -998, -990, -2000],
    "one key": [5, -INF, -INF, -INF, -INF],
    "two keys, tied": [-7, -7, -INF, -INF, -INF],
    "no key": [-INF] * 5,
}


@pytest.mark.parametrize(
    ("framework", "dtype"),
    [case for case in EVERY_DTYPE if case.values[0] != "jax" or "32" in case.values[1]],
)
def test_statistics_of_extreme_rows(framework: str, dtype: str) -> None:
    """Relative accuracy of the Jacobian norm where Σp², Σp³ would cancel; scores are exact in every dtype."""
    scores = np.array(list(ROWS.values()), np.float64)[None]
    zero = np.zeros((1, len(ROWS), 1)), np.zeros((1, 5, 1)), np.ones((1, 5, 1))
    with precision(framework, dtype):
        q, k, v = (array(x, framework, dtype) for x in zero)
        wide = "float64" if dtype == "float64" else "float32"
        r = asp.inspect(q, k, v, score=Dot(), bias=array(scores, framework, wide))
        wanted = oracle.attention(*zero, score="dot", bias=scores)
        relative = 1e-10 if dtype == "float64" else 1e-5
        found = {name: values(getattr(r.stats, name)) for name in STATISTICS}
        for name in ("jacobian_norm", "max_weight"):
            np.testing.assert_allclose(found[name], getattr(wanted, name), rtol=relative, atol=1e-37)
        for name in ("entropy", "effective_keys"):
            np.testing.assert_allclose(found[name], getattr(wanted, name), rtol=relative, atol=relative / 2)
        close(values(r.lse), wanted.lse, wide, 1000.0)
        np.testing.assert_allclose(values(r.weights()), wanted.weights, rtol=relative, atol=1e-37)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_statistics_of_random_saturated_rows(framework: str) -> None:
    """The same through real products: scores of a few hundred, most rows nearly one hot."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, n, 3)).astype("f4").astype("f8") for n in (4, 5, 5))
    q = np.round(q * 8) * 2  # products of these are exact in float32
    k = np.round(k[:, :2] * 8)
    given = (array(x, framework, "float32") for x in (q, k, v[:, :2]))
    r = asp.inspect(*given, score=Dot())
    wanted = oracle.attention(q, k, v[:, :2], score="dot")
    assert (wanted.max_weight > 0.999).mean() > 0.5
    found = values(r.stats.jacobian_norm)
    np.testing.assert_allclose(found, wanted.jacobian_norm, rtol=1e-5, atol=1e-37)


# Parts of the weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_and_heads_are_slices_of_all_weights(framework: str) -> None:
    """B90: always one a head; what is picked is what would be cut out."""
    requests = (Asked(mask="bits", bias="BHLS"), Asked(bias="alibi", mask="causal at (B,)", dropout=0.5))
    picks: tuple[tuple[Any, Any], ...] = (
        (None, None),
        (2, None),
        ([0, -1], [1]),
        (slice(1, 3), slice(None, None, 2)),
        (None, -1),
        ([3, 3, 0], [2, 0]),
    )
    for asked in requests[: 1 if framework == "jax" else 2]:
        r, wanted, _ = look(asked, framework, "float32")
        assert tuple(r.weights().shape) == wanted.weights.shape
        for rows, heads in picks if framework != "jax" else picks[2:4]:
            cut = wanted.weights
            if rows is not None:
                cut = cut[..., [rows] if isinstance(rows, int) else rows, :]
            if heads is not None:
                cut = cut[:, [heads] if isinstance(heads, int) else heads]
            np.testing.assert_allclose(values(r.weights(rows, heads)), cut, rtol=0, atol=2e-6)


@pytest.mark.parametrize("score", SCORES)
def test_chosen_rows_and_heads_of_every_score(score: str) -> None:
    """Heads that share keys, masks of each kind, a bias of their own, and parameters of scores per head."""
    for mask in ("everything", "causal, window, valid", "bits"):
        r, wanted, _ = look(Asked(score=score, mask=mask, bias="-BHLS"), "numpy", "float64")
        some = wanted.weights[:, [3, 0]][:, :, [-1, 0, 2]]
        np.testing.assert_allclose(r.weights([-1, 0, 2], [3, 0]), some, rtol=1e-9, atol=1e-300)


def test_rows_of_a_long_call_are_all_that_is_written_out() -> None:
    """All pairs would be 160 GB, and their mask 40."""
    n = 200_000
    q, k = (np.random.default_rng(i).standard_normal((1, 2, n, 4)).astype(np.float32) for i in range(2))
    mask = SlidingWindow(back=3) & Causal()
    weights = asp.inspect(q, k, k, mask=mask).weights([0, 150_000], [1])
    assert weights.shape == (1, 1, 2, n)
    assert np.flatnonzero(weights[0, 0, 1]).tolist() == [149_997, 149_998, 149_999, 150_000]
    s = q[0, 1, 150_000] @ k[0, 1, 149_997:150_001].T / 2
    np.testing.assert_allclose(weights[0, 0, 1, 149_997:150_001], np.exp(s) / np.exp(s).sum(), rtol=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_choices_beyond_the_axes_are_refused(framework: str) -> None:
    q, k, v = (array(np.ones((2, n, 3)), framework, "float32") for n in (4, 5, 5))
    r = asp.inspect(q, k, v)
    assert tuple(r.weights(rows=1).shape) == (2, 1, 5)
    with pytest.raises(
        asp.ArgumentError, match="heads: given 0, needed None: these queries have no axis of heads"
    ):
        r.weights(heads=0)
    with pytest.raises(asp.ArgumentError, match=r"rows: given \[4\], needed numbers between -4 and 3"):
        r.weights(rows=4)
    r = asp.inspect(*(x[:, None] for x in (q, k, v)))
    with pytest.raises(asp.ArgumentError, match=r"heads: given \[0, -2\], needed numbers between -1 and 0"):
        r.weights(heads=[0, -2])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_are_those_before_dropout(framework: str) -> None:
    """B77: one key, p = 0.2: the weight is 1, the output 0 or 1.25 times the value."""
    shape = Sizes()
    ones = (np.ones((shape.B, n, m, 3)) for n, m in ((shape.H, shape.L), (shape.G, 5), (shape.G, 5)))
    q, k, v = (array(x, framework, "float32") for x in ones)
    r = asp.inspect(q, k, v, mask=ValidLens(1), dropout=0.2, rng=11)
    assert set(np.unique(values(r.weights()))) == {0.0, 1.0}
    assert (values(r.weights())[..., 0] == 1).all()
    kept = np.array([oracle.keep_bits(11, n, shape.L, 1, 0.2) for n in range(8)]).reshape(2, 4, 4, 1)
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(values(r.out), np.where(kept, 1.25, 0) * np.ones(3), rtol=1e-6)
    assert (values(r.lse) == values(asp.inspect(q, k, v, mask=ValidLens(1)).lse)).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_sink_is_in_the_output_alone(framework: str) -> None:
    """out = sigmoid(lse - sink) times the output without it, at the limits too; nothing else knows it."""
    asked = Asked(mask="causal, bottom right")
    qkv, options = asked.library(asked.native(framework, "float32"), framework)
    plain = asp.inspect(*qkv, **options)
    for sink in (-INF, -3.0, 0.0, 200.0, INF):
        r = asp.inspect(*qkv, **options, sink=sink)
        same_bits(r.lse, plain.lse)
        same_bits(r.weights(), plain.weights())
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(sink - values(r.lse)))
        np.testing.assert_allclose(values(r.out), values(plain.out) * share[..., None], rtol=1e-5, atol=1e-37)
