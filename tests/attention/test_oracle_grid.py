"""Every implementation against the oracle: masks, scores, options, shapes, dtypes, frameworks.

A pair of request and implementation is left out only where the implementation itself has reasons
against it, and then naming it must raise with those reasons (`helpers.runs`).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnspan as asp
from attnspan import oracle
from attnspan.biases import ALiBi
from attnspan.implementations import IMPLEMENTATIONS
from attnspan.masks import Causal, SlidingWindow

from .asked import Asked, hold
from .cases import SCORES, Sizes, masks, written_out
from .helpers import DTYPES, FRAMEWORKS, INF, NAMES, NAN, array, cases, close, runs, values

MASKS = tuple(name for name, _, _ in masks(Sizes()))
ALL = ("auto", *NAMES)
PLAIN = Sizes(B=1, H=1, G=1)
NO_HEADS = Sizes(H=1, G=1)


def dtypes(framework: str, n: int) -> tuple[str, ...]:
    """Choose the dtypes of the n-th of many: all but in JAX, which compiles every operation of each."""
    if framework != "jax":
        return DTYPES[framework]
    return ("float32", "float16", "float64") if n == 0 else ("float32", ("float16", "bfloat16")[n % 2])


def test_close_can_fail() -> None:
    for a, b in ((NAN, NAN), (NAN, 1), (1, NAN), (1, 1 + 1e-5), (INF, 1), (INF, -INF), ([1.0], 1)):
        with pytest.raises(AssertionError):
            close(a, b, "float32")
    close([1.0, -INF], [1 + 1e-6, -INF], "float32")


def test_the_implementations_are_discovered() -> None:
    assert "eager" in NAMES
    assert len(set(NAMES)) == len(IMPLEMENTATIONS)


IN_JAX = (
    *("everything", "valid (B,)", "valid (B, L)", "causal, bottom right", "causal at (B,)"),
    *("documents that return", "not causal, or bits"),
)


@pytest.mark.parametrize(("framework", "mask"), cases(MASKS, IN_JAX))
def test_masks(framework: str, mask: str) -> None:
    """B01, B10, B23, B24, B31-B33, B35, B39-B43, B45, B52-B57, B59: each kind over every path."""
    for dtype in dtypes(framework, MASKS.index(mask)):
        hold(Asked(mask=mask), framework, dtype, ALL)


@pytest.mark.parametrize(
    ("framework", "score"),
    cases(SCORES, ("gaussian", "additive", "function")),
)
def test_scores(framework: str, score: str) -> None:
    for dtype in dtypes(framework, 1 + list(SCORES).index(score)):
        hold(Asked(score=score), framework, dtype, ALL)
        hold(Asked(score=score, mask="bits", softcap=2.0), framework, dtype, ALL)


BIASES = ("S", "1S", "L1", "LS", "1111", "B11S", "1HL1", "B1LS", "BHLS", "-S", "-LS", "-B11S", "-BHLS")


@pytest.mark.parametrize(("framework", "bias"), cases(BIASES, ("S", "1HL1", "-BHLS")))
def test_biases(framework: str, bias: str) -> None:
    """B02, B21, B61: every broadcast, beside every mask, in its own dtype; -inf excludes."""
    n = BIASES.index(bias)
    for dtype in dtypes(framework, 1 + n):
        own = (None, "float16", "float32")[n % 3]
        hold(Asked(bias=bias, bias_dtype=own), framework, dtype, ALL)
        hold(Asked(bias=bias, bias_dtype=own, mask="bits", score="gaussian"), framework, dtype, ALL)
    if framework != "jax":
        hold(Asked(bias=bias, bias_dtype="float64", mask="causal at (B,)"), framework, "float32", ALL)


OPTIONS = {
    "alibi": Asked(bias="alibi"),
    "alibi, causal, softcap": Asked(bias="alibi", mask="causal, bottom right", softcap=3.0),
    "softcap": Asked(softcap=0.5, spread=3.0),
    "sink": Asked(sink=""),
    "sink, per head": Asked(sink="1H", mask="valid (B,)"),
    "sink, per sequence": Asked(sink="B", mask="bits"),
    "sink, both": Asked(sink="BH", bias="-BHLS", softcap=2.0),
    "dropout": Asked(dropout=0.3),
    "dropout, sink, softcap, bias": Asked(dropout=0.6, sink="1H", softcap=2.0, bias="LS", mask="window"),
    "large scores": Asked(spread=30.0, mask="causal"),
}
SHAPES = {
    "2-D": Asked(sizes=PLAIN, rank=2, mask="bits", bias="-LS", sink=""),
    "3-D": Asked(sizes=NO_HEADS, rank=3, mask="bits", bias="-BLS", sink="B", dropout=0.2),
    "3-D, per row": Asked(sizes=NO_HEADS, rank=3, mask="valid (B, L)", score="gaussian"),
    "3-D, additive": Asked(sizes=NO_HEADS, rank=3, mask="documents", score="additive"),
    "5-D": Asked(rank=5, mask="bits", bias="BNHLS", dropout=0.2),
    "5-D, per head": Asked(rank=5, mask="valid (B,)", score="bilinear, per head", sink="1H"),
    "5-D, function": Asked(rank=5, mask="causal at (B,)", score="function", bias="1NH1S"),
    "all heads": Asked(sizes=Sizes(G=4), mask="bits", score="low rank, per head"),
    "one key head": Asked(sizes=Sizes(G=1), mask="bits", score="additive, per head"),
    "E > D": Asked(sizes=Sizes(E=5), mask="bits"),
    "E < D": Asked(sizes=Sizes(E=1), mask="causal", score="cosine"),
    "two widths": Asked(sizes=Sizes(Dk=5), score="bilinear", mask="bits"),
    "two widths, additive": Asked(sizes=Sizes(Dk=2), score="additive", mask="causal"),
    "two widths, low rank": Asked(sizes=Sizes(Dk=1, E=2), score="low rank, per head", mask="window"),
    "D = 1": Asked(sizes=Sizes(D=1, E=1), score="gaussian", mask="bits"),
    "E = 0": Asked(sizes=Sizes(E=0), mask="bits"),
    "D = 0": Asked(sizes=Sizes(D=0), mask="bits"),
    "L = 1": Asked(sizes=Sizes(L=1), mask="causal, bottom right", bias="-BHLS"),
    "S = 1": Asked(sizes=Sizes(S=1), mask="valid (B,)", score="gaussian"),
    "L = 0": Asked(sizes=Sizes(L=0), mask="bits", score="gaussian", dropout=0.3),
    "S = 0": Asked(sizes=Sizes(S=0), mask="causal", sink="", bias="LS"),
    "S = 0, gaussian": Asked(sizes=Sizes(S=0), mask="bits", score="gaussian"),
    "L = S = 0": Asked(sizes=Sizes(L=0, S=0), score="additive"),
    "B = 0": Asked(sizes=Sizes(B=0), bias="alibi"),
    "more queries": Asked(sizes=Sizes(L=7, S=3), mask="causal, bottom right", bias="alibi"),
    "longer": Asked(sizes=Sizes(B=1, H=2, L=40, S=50, D=8, E=8), mask="sinks, window, causal"),
}


@pytest.mark.parametrize(
    ("framework", "name"),
    cases(OPTIONS, ("alibi, causal, softcap", "dropout, sink, softcap, bias")),
)
def test_options(framework: str, name: str) -> None:
    for dtype in dtypes(framework, 1 + list(OPTIONS).index(name)):
        hold(OPTIONS[name], framework, dtype, ALL)


@pytest.mark.parametrize(("framework", "name"), cases(SHAPES, ("3-D, per row",)))
def test_shapes(framework: str, name: str) -> None:
    """B62 and the letters: any rank, lengths and widths of 0 and 1, grouped heads, L and S far apart."""
    for dtype in DTYPES[framework] if framework != "jax" else ("float32",):
        hold(SHAPES[name], framework, dtype, ALL)


BROADCASTS = {str(shape): shape for shape in itertools.product((1, 2), (1, 4), (1, 4), (1, 5))}


@pytest.mark.parametrize(("framework", "name"), cases(BROADCASTS, ("(2, 1, 1, 5)", "(1, 4, 4, 1)")))
def test_every_broadcast_of_a_mask_array(framework: str, name: str) -> None:
    """B61: all sixteen combinations of 1 and full equal the mask written out."""
    s, shape = Sizes(), BROADCASTS[name]
    seen = np.random.default_rng(5).random(shape) < 0.6
    full = written_out(lambda *at: bool(seen[tuple(n % m for n, m in zip(at, shape, strict=True))]), s)
    asked = Asked()
    x = asked.draw("float32")
    wanted = oracle.attention(x["q"], x["k"], x["v"], keep=full)
    q, k, v = (array(x[n], framework, "float32") for n in "qkv")
    for one in ALL if framework == "torch" else ("auto",):
        for mask in (array(seen, framework), array(seen.astype(np.int64), framework), full):
            out = asp.attention(q, k, v, mask=mask, implementation=one)
            close(values(out), wanted.out, "float32", 4.0)


@pytest.mark.parametrize("align", ["top_left", "bottom_right", 2, -1, (0, 3)], ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_align_fills_in_what_was_left_unsaid(framework: str, align: Any) -> None:
    """B23, B24: one align for mask and bias; a mask's own wins."""
    s, asked = Sizes(), Asked()
    x = asked.draw("float32")
    places = {"top_left": (0, 0), "bottom_right": (s.S - s.L,) * 2}.get(str(align), align)
    at = places if isinstance(places, tuple) else (places, places)
    rule = lambda b, h, i, j: i + at[b] - 1 <= j <= i + at[b] and j <= i  # noqa: E731
    slopes = np.array([1, 0.5, 0.25, 0.125])
    distance = np.array([[[abs(i + n - j) for j in range(s.S)] for i in range(s.L)] for n in at])
    bias = -slopes[None, :, None, None] * distance[:, None]
    wanted = oracle.attention(x["q"], x["k"], x["v"], keep=written_out(rule, s), bias=bias)
    q, k, v = (array(x[n], framework, "float32") for n in "qkv")
    given = array(align, framework) if isinstance(align, tuple) else align
    mask = Causal() & SlidingWindow(back=1) & Causal("top_left")
    out = asp.attention(
        q, k, v, mask=mask, bias=ALiBi(array(slopes, framework, "float32")), align=given
    )  # fmt: skip
    close(values(out), wanted.out, "float32", 4.0)


LAYOUTS = {
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "batch last": lambda x: np.ascontiguousarray(np.moveaxis(x, 0, -1)),
    "every other": lambda x: np.repeat(x, 2, axis=-1),
    "odd slice": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)]),
    "backwards": lambda x: x[..., ::-1, :].copy(),
    "expanded": lambda x: x[:, :1],
}


def laid_out(x: np.ndarray, layout: str, framework: str) -> Any:
    """Give `x` (or for "expanded" its first head in all) as a view of that layout."""
    y = array(LAYOUTS[layout](x), framework, "float32")
    if layout == "transposed":
        stored = array(np.ascontiguousarray(x.swapaxes(-1, -2)), framework, "float32")
        return stored.mT
    if layout == "batch last":
        return y.permute(3, 0, 1, 2) if framework == "torch" else np.moveaxis(y, -1, 0)
    if layout == "every other":
        return y[..., ::2]
    if layout == "odd slice":
        return y[..., 1 : 1 + x.shape[-1]]
    if layout == "backwards":
        return y.flip(-2) if framework == "torch" else y[..., ::-1, :]
    return y.expand(*x.shape) if framework == "torch" else np.broadcast_to(y, x.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_strides(framework: str, layout: str) -> None:
    """B85: transposed, sliced and expanded inputs and masks equal their contiguous copies."""
    x = Asked(sizes=Sizes(B=2, H=3, G=3, L=5, S=5, D=7, E=7)).draw("float32")
    views = [laid_out(x[n], layout, framework) for n in "qkv"]
    if framework == "numpy" or layout != "backwards":  # PyTorch has no negative strides
        assert not (views[0].is_contiguous() if framework == "torch" else views[0].flags.c_contiguous)
    copies = [np.ascontiguousarray(values(y)) for y in views]
    seen = np.random.default_rng(2).random((2, 1, 5, 5)) < 0.7
    turned = array(np.ascontiguousarray(seen.swapaxes(-1, -2)), framework).mT
    for mask, keep in ((turned, seen), (Causal(), np.tri(5, dtype=bool)), (None, None)):
        wanted = oracle.attention(*copies, keep=keep)
        for name in ALL:
            if name == "auto" or runs(name, *views, mask=mask):
                out = asp.attention(*views, mask=mask, implementation=name)
                close(values(out), wanted.out, "float32", 4.0)


# Random requests -------------------------------------------------------------------------------------


@st.composite
def requests(draw: Any, sizes: Sizes | None = None) -> Asked:
    if sizes is None:
        G = draw(st.sampled_from((1, 2)))
        D = draw(st.integers(1, 5))
        sizes = Sizes(
            B=draw(st.integers(1, 3)),
            H=G * draw(st.integers(1, 2)),
            G=G,
            L=draw(st.integers(0, 5)),
            S=draw(st.integers(0, 6)),
            D=D,
            E=draw(st.sampled_from((D, 1, 4))),
        )
    biases = (None, None, "alibi", *BIASES)
    bias = draw(st.sampled_from(biases))
    return Asked(
        sizes=sizes,
        rank=draw(st.sampled_from((4, 4, 5))) if bias is None or len(bias.strip("-")) < 3 else 4,
        score=draw(st.sampled_from(list(SCORES))),
        mask=draw(st.sampled_from(MASKS)),
        bias=bias,
        softcap=draw(st.sampled_from((None, None, 0.5, 5.0))),
        sink=draw(st.sampled_from((None, None, "", "1H", "B1", "BH"))),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.1, 0.7))),
        rng=draw(st.integers(-(2**63), 2**64)),
        seed=draw(st.integers(0, 999)),
        spread=draw(st.sampled_from((0.1, 1.0, 5.0))),
    )


def hypothetically(examples: int, *, vary: bool = False) -> Any:
    """Set hypothesis up: the same requests every time in a plain run, new ones in a sweep."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=not vary,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@hypothetically(120)
@given(asked=requests(), dtype=st.sampled_from(DTYPES["numpy"]))
def test_random_requests_in_numpy(asked: Asked, dtype: str) -> None:
    hold(asked, "numpy", dtype, ALL)


@pytest.mark.parametrize("framework", FRAMEWORKS[1:2])
@hypothetically(150)
@given(asked=requests(), dtype=st.sampled_from(DTYPES["torch"]))
def test_random_requests_in_torch(framework: str, asked: Asked, dtype: str) -> None:
    hold(asked, framework, dtype, ALL)


@pytest.mark.sweep
@pytest.mark.parametrize("framework", FRAMEWORKS)
@hypothetically(2000, vary=True)
@given(data=st.data())
def test_random_requests(framework: str, data: Any) -> None:
    asked = data.draw(requests(Sizes() if framework == "jax" else None))
    hold(asked, framework, data.draw(st.sampled_from(DTYPES[framework])), ALL)


@pytest.mark.sweep
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("score", SCORES)
def test_every_score_with_every_mask(framework: str, score: str) -> None:
    for mask, dtype in itertools.product(MASKS, DTYPES[framework]):
        for options in ({}, {"bias": "-BHLS", "softcap": 2.0, "sink": "1H", "dropout": 0.2}):
            hold(Asked(score=score, mask=mask, **options), framework, dtype, ALL)
