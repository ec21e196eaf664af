"""What is masked does not exist, in two promises.

(1) A key that no query sees, a query that sees no key, a bias at an excluded pair and the gradient that
arrives at an empty row may hold anything: output and gradients keep every bit. (2) A visible entry that is
not finite makes NaN exactly the rows that see it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.masks import Causal, Dense, SlidingWindow, ValidLens
from attnspan.scores import Dot

from .asked import Asked
from .cases import SCORES, Sizes, masks, written_out
from .helpers import (
    DTYPES,
    EVERY_IMPLEMENTATION,
    FRAMEWORKS,
    INF,
    NAMES,
    NAN,
    TRACED,
    array,
    cases,
    precision,
    runs,
    same_bits,
    values,
)

S = Sizes()
RULES = {name: rule for name, _, rule in masks(S)}
HUGE = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38, "float64": 1e308}
FEW_MASKS = ("valid, left", "causal at -2", "documents that return", "bits")
FEW_SCORES = ("scaled dot", "gaussian", "additive, per head")
ONCE_MORE = (  # what else may reach an excluded entry
    Asked(bias="-BHLS", mask="everything"),
    Asked(bias="-B11S", mask="window", score="gaussian"),
    Asked(bias="BHLS", mask="bits", sink="1H", softcap=2.0, score="low rank, per head"),
    Asked(bias="alibi", mask="causal at -2", dropout=0.3, sink="", score="scaled dot, per sequence"),
)


def visible(asked: Asked, x: dict[str, np.ndarray]) -> np.ndarray:
    """Write out which pairs count: bool (B, H, L, S), by the mask's rule and a bias of -inf."""
    keep = written_out(RULES[asked.mask], S)
    return keep & np.broadcast_to(x["bias"] != -INF, keep.shape) if "bias" in x else keep


def dead(keep: np.ndarray) -> dict[str, np.ndarray]:
    """Mark what does not exist: queries (B, H, L) that see no key, keys (B, G, S) none of theirs sees."""
    keys = keep.reshape(S.B, S.G, S.H // S.G, S.L, S.S).any(axis=(2, 3))
    return {"q": ~keep.any(axis=-1), "k": ~keys, "v": ~keys}


def poisoned(x: dict[str, np.ndarray], keep: np.ndarray, poison: float) -> dict[str, np.ndarray]:
    """Put `poison` into whatever does not exist."""
    gone = {name: at[..., None] for name, at in dead(keep).items()}
    if "bias" in x and x["bias"].shape == keep.shape:
        gone["bias"] = ~keep & (x["bias"] != -INF)
    return {name: np.where(gone[name], poison, value) if name in gone else value for name, value in x.items()}


def combinations(framework: str) -> list[Asked]:
    """Choose masks x scores: every mask with a few scores, every score with a few masks; fewer in JAX."""
    if framework == "jax":
        one, other = Asked(mask="valid (B,)", score="gaussian"), Asked(mask="bits", score="additive")
        return [one, other, ONCE_MORE[2]]
    crossed = itertools.product(RULES, SCORES)
    pairs = [(m, score) for m, score in crossed if m in FEW_MASKS or score in FEW_SCORES]
    return [*(Asked(mask=mask, score=score) for mask, score in pairs), *ONCE_MORE]


def by_score(requests: list[Asked]) -> dict[str, list[Asked]]:
    found: dict[str, list[Asked]] = {}
    for asked in requests:
        found.setdefault(asked.score, []).append(asked)
    return found


EVERY = [
    pytest.param(str(f.values[0]), several, marks=f.marks, id=f"{f.values[0]}-{score}")
    for f in FRAMEWORKS
    for score, several in by_score(combinations(str(f.values[0]))).items()
]


@pytest.mark.parametrize(("framework", "several"), EVERY)
def test_excluded_entries_move_no_bit_of_the_output(framework: str, several: list[Asked]) -> None:
    for asked in several:
        dtypes = DTYPES[framework] if asked.mask in FEW_MASKS[:2] and framework != "jax" else ("float32",)
        for dtype, name in itertools.product(dtypes, NAMES):
            x = asked.draw(dtype)
            keep = visible(asked, x)
            qkv, options = asked.library(asked.native(framework, dtype, x), framework)
            if not runs(name, *qkv, **options):
                continue
            clean = asp.attention(*qkv, **options, implementation=name)
            assert np.isfinite(values(clean)).all()
            assert (values(clean)[~keep.any(axis=-1)] == 0).all()
            for poison in (NAN, INF, -INF, HUGE[dtype]):
                bad = asked.native(framework, dtype, poisoned(x, keep, poison))
                qkv, options = asked.library(bad, framework)
                same_bits(asp.attention(*qkv, **options, implementation=name), clean)


def torch_gradients(asked: Asked, x: dict[str, Any], name: str, g: tuple[Any, Any]) -> dict[str, Any]:
    import torch

    leaves = {n: y.clone().requires_grad_() for n, y in x.items()}
    qkv, options = asked.library(leaves, "torch")
    r = asp.inspect(*qkv, **options, implementation=name)
    found = torch.autograd.grad((r.out, r.lse), list(leaves.values()), g)
    return dict(zip(leaves, found, strict=True))


@functools.cache
def jax_pullback(asked: Asked, name: str) -> Callable[..., dict[str, Any]]:
    import jax

    def both(x: dict[str, Any]) -> tuple[Any, Any]:
        qkv, options = asked.library(x, "jax")
        r = asp.inspect(*qkv, **options, implementation=name)
        return r.out, r.lse

    return jax.jit(lambda x, g: jax.vjp(both, x)[1](g)[0])


def jax_gradients(asked: Asked, x: dict[str, Any], name: str, g: tuple[Any, Any]) -> dict[str, Any]:
    return jax_pullback(asked, name)(x, g)


GRADIENTS: dict[str, Callable[..., dict[str, Any]]] = {"torch": torch_gradients, "jax": jax_gradients}


@pytest.mark.parametrize(("framework", "several"), [case for case in EVERY if case.values[0] != "numpy"])
def test_excluded_entries_move_no_bit_of_a_gradient(framework: str, several: list[Asked]) -> None:
    """B05: also NaN gradients arriving at empty rows, of out and of lse; for every input there is."""
    few = [asked for asked in several if asked.mask in FEW_MASKS[:3] or asked.score in FEW_SCORES[:1]]
    for asked, name in itertools.product(few or several[:2], NAMES):
        x = asked.draw("float32")
        keep = visible(asked, x)
        gone, rng = dead(keep), np.random.default_rng(1)
        g = rng.standard_normal((*keep.shape[:-1], S.E)), rng.standard_normal(keep.shape[:-1])
        bad_g = np.where(gone["q"][..., None], NAN, g[0]), np.where(gone["q"], NAN, g[1])
        good, bad = (tuple(array(y, framework, "float32") for y in pair) for pair in (g, bad_g))
        native = asked.native(framework, "float32", x)
        qkv, options = asked.library(native, framework)
        if not runs(name, *qkv, **options):
            continue
        clean = GRADIENTS[framework](asked, native, name, good)
        for poison in (NAN, HUGE["float32"]) if asked.mask in FEW_MASKS[:2] else (NAN,):
            dirty_x = asked.native(framework, "float32", poisoned(x, keep, poison))
            dirty = GRADIENTS[framework](asked, dirty_x, name, bad)
            for n in x:
                assert np.isfinite(values(clean[n])).all()
                same_bits(dirty[n], clean[n])
                if n in gone:
                    assert (values(clean[n])[gone[n]] == 0).all()


# The second promise ----------------------------------------------------------------------------------

SEEING = ("everything", "causal", "valid (B,)", "documents that return", "window", "not causal, or bits")


@pytest.mark.parametrize(("framework", "mask"), cases(SEEING, ("not causal, or bits",)))
def test_a_visible_non_finite_entry_makes_nan_of_exactly_its_rows(framework: str, mask: str) -> None:
    """Output, lse and weights as the oracle has them: a bad value leaves the weights right."""
    scores = ("scaled dot", "gaussian", "additive", "cosine") if framework != "jax" else ("scaled dot",)
    for score, what, poison in itertools.product(scores, "qkv", (NAN, INF, -INF)):
        asked = Asked(score=score, mask=mask)
        x = asked.draw("float32")
        x[what][1, -1, 1, 0] = poison
        qkv, options = asked.oracle(x)
        wanted = oracle.attention(*qkv, **options)
        assert np.isnan(wanted.out).any() and not np.isnan(wanted.out).all()
        qkv, options = asked.library(asked.native(framework, "float32", x), framework)
        for name in NAMES:
            if not runs(name, *qkv, **options):
                continue
            out = values(asp.attention(*qkv, **options, implementation=name))
            nan = np.isnan(wanted.out)
            np.testing.assert_array_equal(np.isnan(out), nan)
            np.testing.assert_allclose(out[~nan], wanted.out[~nan], rtol=0, atol=1e-5)
        r = asp.inspect(*qkv, **options)
        for found, right in ((r.lse, wanted.lse), (r.weights(), wanted.weights), *statistics(r, wanted)):
            np.testing.assert_array_equal(np.isnan(values(found)), np.isnan(right))
            fine = np.isfinite(right)
            np.testing.assert_allclose(values(found)[fine], right[fine], rtol=0, atol=2e-5)


def statistics(r: Any, wanted: oracle.Result) -> list[tuple[Any, np.ndarray]]:
    names = ("entropy", "effective_keys", "max_weight", "jacobian_norm")
    return [(getattr(r.stats, name), getattr(wanted, name)) for name in names]


@pytest.mark.parametrize("framework", TRACED[:1])
@pytest.mark.parametrize("score", ["scaled dot", "gaussian", "low rank", "additive"])
def test_a_visible_nan_leaves_the_gradients_of_other_heads_alone(framework: str, score: str) -> None:
    """Only the batch element and head group that holds it has no promise."""
    asked = Asked(score=score, mask="causal, bottom right")
    x = asked.draw("float32")
    ones = (array(np.ones((S.B, S.H, S.L, S.E)), framework, "float32"),)
    g = (*ones, ones[0][..., 0])
    for what, name in itertools.product("qkv", NAMES):
        qkv, options = asked.library(asked.native(framework, "float32", x), framework)
        if not runs(name, *qkv, **options):
            continue
        clean = torch_gradients(asked, asked.native(framework, "float32", x), name, g)
        bad = {n: y.copy() for n, y in x.items()}
        bad[what][1, -1, 1, 0] = NAN  # the last head group of sequence 1
        dirty = torch_gradients(asked, asked.native(framework, "float32", bad), name, g)
        for n in "qkv":
            elsewhere = np.ones(x[n].shape[:2], bool)
            elsewhere[1, -(S.H // S.G if n == "q" else 1) :] = False
            np.testing.assert_array_equal(values(dirty[n])[elsewhere], values(clean[n])[elsewhere])


@pytest.mark.parametrize(("framework", "implementation"), EVERY_IMPLEMENTATION)
def test_the_bias_of_a_visible_pair(framework: str, implementation: str) -> None:
    """NaN or +inf there is not finite; -inf excludes the pair, and with it what the key holds."""
    asked = Asked(mask="causal, bottom right", bias="BHLS")
    x = asked.draw("float32")
    x["bias"][0, 1, 2, 0] = NAN
    x["bias"][1, 0, 3, 1] = INF
    x["bias"][1, 2, :, 0] = x["bias"][1, 3, :, 0] = -INF  # a head group, so that nobody sees its key 0
    x["k"][1, 1, 0] = x["v"][1, 1, 0] = NAN
    native = asked.native(framework, "float32", x)
    qkv, options = asked.library(native, framework)
    if not runs(implementation, *qkv, **options):
        return
    qkv_o, options_o = asked.oracle(x)
    wanted = oracle.attention(*qkv_o, **options_o).out
    assert np.isnan(wanted).any(axis=-1).sum() == 2
    out = values(asp.attention(*qkv, **options, implementation=implementation))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    fine = ~np.isnan(wanted)
    np.testing.assert_allclose(out[fine], wanted[fine], rtol=0, atol=1e-5)


# Reports that are about ranges -----------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "implementation"), EVERY_IMPLEMENTATION[: 2 * len(NAMES)])
def test_a_long_masked_span_before_the_first_key(framework: str, implementation: str) -> None:
    """B11: causal with a window, far longer than any tile, and with the first tiles masked."""
    q, k, v = (array(np.ones((1, 1, 600, 2)), framework, "float32") for _ in range(3))
    late = np.zeros((600, 600), bool)
    late[:, 590:] = True
    for mask in (Causal() & SlidingWindow(9), Dense(array(late, framework))):
        if runs(implementation, q, k, v, mask=mask):
            out = asp.attention(q, k, v, mask=mask, implementation=implementation)
            np.testing.assert_allclose(values(out), 1.0, rtol=0, atol=1e-6)


def constant(framework: str, dtype: str, q: float, k: list[float], v: list[float]) -> list[Any]:
    """Give q of one number, and k and v of one number a key."""
    shapes = (S.B, S.H, S.L, S.D), (S.B, S.G, S.S, S.D), (S.B, S.G, S.S, S.E)
    columns = np.float64(q), np.array(k)[:, None], np.array(v)[:, None]
    drawn = (np.broadcast_to(x, shape) for x, shape in zip(columns, shapes, strict=True))
    return [array(x, framework, dtype) for x in drawn]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_products_beyond_half_precision(framework: str) -> None:
    """B46, B47: scores that no float16 holds, hidden or not, overflow nowhere; the scale comes first."""
    for dtype in [d for d in DTYPES[framework] if d != "float64"][: 1 if framework == "jax" else 3]:
        big = 4000.0 if dtype == "float16" else 1e19
        qkv = constant(framework, dtype, big, [big, big, big, -big, -big], [2, 2, 2, 5, 9])
        for name, mask in itertools.product(NAMES, (ValidLens(2), Causal(-1), None)):
            if runs(name, *qkv, mask=mask):
                out = values(asp.attention(*qkv, mask=mask, implementation=name))
                np.testing.assert_array_equal(out[:, :, 1:], 2.0)
        for q in (-1.0, 1.0):
            qkv = constant(framework, dtype, q, [0, 9990, 9990, 9990, 9990], [0, 1, 1, 1, 1])
            out = asp.attention(*qkv, score=Dot(), mask=ValidLens(1))
            assert (values(out) == 0).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_hidden_score_that_dominates(framework: str) -> None:
    """B14, B50: the mask decides before the softmax; nothing underflows to 0/0."""
    for dtype in DTYPES[framework] if framework != "jax" else ("float16", "float32"):
        qkv = constant(framework, dtype, 1, [0, 0, 200, 12, 12], [1, 3, 9, 9, 9])
        for name in NAMES:
            if runs(name, *qkv, mask=ValidLens(2)):
                out = asp.attention(*qkv, score=Dot(), mask=ValidLens(2), implementation=name)
                assert (values(out) == 2).all()
        r = asp.inspect(*qkv, score=Dot(), mask=ValidLens(2))
        assert (values(r.weights()) == [0.5, 0.5, 0, 0, 0]).all()


@pytest.mark.parametrize("framework", TRACED[1:])
def test_no_infinity_appears(framework: str) -> None:
    """B48: with a hidden key and no empty row, JAX's own check for infinities finds none."""
    import jax

    for dtype in ("float32", "float64"):
        with precision(framework, dtype):
            asked = Asked(mask="causal, bottom right")
            qkv, options = asked.library(asked.native(framework, dtype), framework)
            with jax.debug_infs(True), jax.debug_nans(True):
                out = asp.attention(*qkv, **options)
            assert str(out.dtype) == dtype


@pytest.mark.sweep
@pytest.mark.parametrize("framework", TRACED)
@pytest.mark.parametrize("score", SCORES)
def test_every_score_with_every_mask(framework: str, score: str) -> None:
    several = [Asked(mask=mask, score=score) for mask in RULES]
    test_excluded_entries_move_no_bit_of_the_output(framework, several)
    for asked in several:
        test_excluded_entries_move_no_bit_of_a_gradient(framework, [asked])
