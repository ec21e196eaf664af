"""What is masked does not exist, over the grid of masks, scores, libraries and poisons (a sweep).

`test_masked_does_not_exist.py` holds the same promises on fewer requests in every run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle

from .asked import Asked
from .cases import Sizes, masks, written_out
from .helpers import EVERY_IMPLEMENTATION, INF, NAN, TRACED, array, runs, same_bits, values

pytestmark = pytest.mark.sweep
SIZES = Sizes()
MASKS = (
    "nothing",
    "valid (B,)",
    "valid, left",
    "valid queries too",
    "causal",
    "causal at -2",
    "window",
    "documents",
    "documents that return",
    "documents, each causal",
    "strided",
    "bits",
    "sinks, window, causal",
    "not causal, or bits",
)
SCORES = (
    "scaled dot",
    "cosine, per head",
    "gaussian",
    "bilinear",
    "low rank, per head",
    "additive",
    "function",
)


def rule_of(mask: str) -> np.ndarray:
    """Write the mask out by its plain rule: bool (B, H, L, S)."""
    return written_out(next(rule for name, _, rule in masks(SIZES) if name == mask), SIZES)


def unseen(keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the keys that no query of their group sees (B, G, S), and the queries that see none (B, H, L)."""
    groups = keep.reshape(SIZES.B, SIZES.G, SIZES.H // SIZES.G, SIZES.L, SIZES.S)
    return ~groups.any(axis=(2, 3)), ~keep.any(axis=-1)


def poisoned(x: dict[str, np.ndarray], keep: np.ndarray, poison: float) -> dict[str, np.ndarray]:
    keys, queries = unseen(keep)
    changed = dict(x)
    for name, dead in (("q", queries), ("k", keys), ("v", keys)):
        changed[name] = np.where(dead[..., None], poison, x[name])
    return changed


@pytest.mark.parametrize(("framework", "implementation"), EVERY_IMPLEMENTATION)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_excluded_entries_move_no_bit(framework: str, implementation: str, mask: str, score: str) -> None:
    asked = Asked(score=score, mask=mask)
    x, keep = asked.draw("float32"), rule_of(mask)
    qkv, options = asked.library(asked.native(framework, "float32", x), framework)
    if not runs(implementation, *qkv, **options):
        return
    clean = asp.attention(*qkv, **options, implementation=implementation)
    assert (values(clean)[~keep.any(axis=-1)] == 0).all()
    for poison in (NAN, INF, -INF, 3e38):
        dirty = asked.native(framework, "float32", poisoned(x, keep, poison))
        qkv, options = asked.library(dirty, framework)
        same_bits(asp.attention(*qkv, **options, implementation=implementation), clean)


def gradients(
    framework: str, x: dict[str, Any], asked: Asked, implementation: str, g: dict[str, Any]
) -> list:
    """Give the gradients of q, k, v for upstream gradients of out and lse."""
    if framework == "torch":
        import torch

        leaves = [x[n].clone().requires_grad_() for n in "qkv"]
        qkv, options = asked.library({**x, **dict(zip("qkv", leaves, strict=True))}, framework)
        record = asp.inspect(*qkv, **options, implementation=implementation)
        return list(torch.autograd.grad([record.out, record.lse], leaves, [g["out"], g["lse"]]))
    import jax

    def both(q: Any, k: Any, v: Any) -> Any:
        qkv, options = asked.library({**x, "q": q, "k": k, "v": v}, framework)
        record = asp.inspect(*qkv, **options, implementation=implementation)
        return record.out, record.lse

    return list(jax.vjp(both, x["q"], x["k"], x["v"])[1]((g["out"], g["lse"])))


@pytest.mark.parametrize("framework", TRACED)
@pytest.mark.parametrize("mask", ["valid (B,)", "causal at -2", "window", "bits", "valid queries too"])
@pytest.mark.parametrize("score", ["scaled dot", "gaussian", "additive"])
def test_excluded_entries_and_gradients_of_empty_rows_move_no_gradient(
    framework: str, mask: str, score: str
) -> None:
    asked = Asked(score=score, mask=mask)
    x, keep = asked.draw("float32"), rule_of(mask)
    keys, queries = unseen(keep)
    rng = np.random.default_rng(1)
    g = {"out": rng.normal(size=(*queries.shape, SIZES.E)), "lse": rng.normal(size=queries.shape)}
    bad = {"out": np.where(queries[..., None], NAN, g["out"]), "lse": np.where(queries, NAN, g["lse"])}
    to = {
        n: {m: array(y, framework, "float32") for m, y in each.items()}
        for n, each in (("g", g), ("bad", bad))
    }
    for implementation in ("eager", "auto"):
        clean = gradients(framework, asked.native(framework, "float32", x), asked, implementation, to["g"])
        dirty_x = asked.native(framework, "float32", poisoned(x, keep, NAN))
        dirty = gradients(framework, dirty_x, asked, implementation, to["bad"])
        for a, b, dead in zip(dirty, clean, (queries, keys, keys), strict=True):
            same_bits(a, b)
            assert (values(a)[dead] == 0).all()


@pytest.mark.parametrize(("framework", "implementation"), EVERY_IMPLEMENTATION)
@pytest.mark.parametrize("mask", ["everything", "causal", "valid (B,)", "documents that return", "window"])
@pytest.mark.parametrize("score", ["scaled dot", "gaussian", "additive"])
@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_visible_non_finite_entry_makes_nan_of_the_rows_that_see_it(
    framework: str, implementation: str, mask: str, score: str, what: str, poison: float
) -> None:
    asked = Asked(score=score, mask=mask)
    x = asked.draw("float32")
    x[what][1, -1, 1, 0] = poison
    qkv, options = asked.oracle(x)
    wanted = oracle.attention(*qkv, **options).out
    qkv, options = asked.library(asked.native(framework, "float32", x), framework)
    if not runs(implementation, *qkv, **options):
        return
    out = values(asp.attention(*qkv, **options, implementation=implementation))
    nan = np.isnan(wanted)
    assert nan.any(axis=-1).tolist() == nan.all(axis=-1).tolist()
    np.testing.assert_array_equal(np.isnan(out), nan)
    np.testing.assert_allclose(out[~nan], wanted[~nan], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("framework", "implementation"), EVERY_IMPLEMENTATION)
def test_an_excluded_bias_may_be_nan_and_minus_infinity_excludes(framework: str, implementation: str) -> None:
    asked = Asked(mask="window")
    x, keep = asked.draw("float32"), rule_of("window")
    qkv, options = asked.library(asked.native(framework, "float32", x), framework)
    if not runs(implementation, *qkv, **options):
        return
    bias = np.where(keep, 0.5, NAN)
    out = asp.attention(
        *qkv, **{**options, "bias": array(bias, framework, "float32")}, implementation=implementation
    )
    plain = asp.attention(
        *qkv, **{**options, "bias": array(0.5 * keep, framework, "float32")}, implementation=implementation
    )
    same_bits(out, plain)
    hidden = array(np.where(keep, -INF, 0), framework, "float32")
    none = asp.attention(*qkv, **{**options, "bias": hidden}, implementation=implementation)
    assert (values(none) == 0).all()
