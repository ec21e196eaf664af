"""Each score: its definition `pair`, its lowered form and the plain rule say the same; and its traps."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.masks import ValidLens
from attnspan.scores import Additive, Bilinear, Cosine, Dot, Gaussian, LowRankBilinear, ScaledDot, Score
from attnspan.shapes import sizes_of

from .asked import Asked
from .cases import SCORES, Sizes
from .helpers import DTYPES, FRAMEWORKS, INF, NAMES, NAN, TRACED, array, runs, values

LIBRARY = [name for name in SCORES if name != "function"]
SHAPES = {
    "usual": Sizes(),
    "many keys": Sizes(L=2, S=40),  # the two orders of a bilinear product are chosen by counting
    "many queries": Sizes(L=40, S=2),
    "a key head each": Sizes(G=4, L=3, S=9),
    "two widths": Sizes(Dk=2),
}


def ruled(asked: Asked, x: dict[str, np.ndarray]) -> np.ndarray:
    """Ask the rule for every pair: (B, H, L, S)."""
    s = asked.sizes
    rule = SCORES[asked.score].rule(**{n: x[n] for n in SCORES[asked.score].shapes(s)})
    found = np.zeros((s.B, s.H, s.L, s.S))
    for b, h, i, j in np.ndindex(*found.shape):
        found[b, h, i, j] = rule(x["q"][b, h, i], x["k"][b, h * s.G // s.H, j], b, h)
    return found


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_pair_and_lowered_form_are_the_rule(framework: str, name: str) -> None:
    for shape, s in SHAPES.items():
        if shape == "two widths" and not name.startswith(("bilinear", "low rank", "additive")):
            continue
        asked = Asked(sizes=s, score=name)
        x = asked.draw("float64")
        native = asked.native(framework, "float64", x)
        (q, k, v), options = asked.library(native, framework)
        score = options["score"]
        assert isinstance(score, Score)
        wanted = ruled(asked, x)
        heads = k[:, [h * s.G // s.H for h in range(s.H)]]
        given = values(score.pair(q[..., :, None, :], heads[..., None, :, :]))
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-12)
        form = score.lower(q, k, None, sizes_of(q, k, v))
        np.testing.assert_allclose(values(form.scores()), wanted, rtol=0, atol=1e-12)
        picked = form.rows(slice(1, None)).scores()
        np.testing.assert_allclose(values(picked), wanted[..., 1:, :], rtol=0, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_numbers_from_the_reports(framework: str) -> None:
    """B63, B68: -12.5 and not -3.5; dot, bilinear and scaled dot by their names."""
    to = lambda x: array(np.array(x, float), framework, "float32")  # noqa: E731
    assert float(Gaussian(1).pair(to([3, 4]), to([0, 0]))) == -12.5
    q, k = to([1, 0]), to([0, 1])
    swap = to([[0, 1], [1, 0]])
    assert (float(Dot().pair(q, k)), float(ScaledDot().pair(q, k)), float(Bilinear(swap).pair(q, k))) == (
        0,
        0,
        1,
    )
    r = asp.inspect(to([[[0]]]), to([[[0], [1], [2]]]), to([[[0], [1], [2]]]), score=Gaussian(1))
    np.testing.assert_allclose(values(r.weights()).ravel(), [0.5741, 0.3482, 0.0777], atol=5e-5)


def gradients_of(framework: str, score: Any, q: np.ndarray, k: np.ndarray) -> list[np.ndarray]:
    """Differentiate the sum of out * [1, 2, ...] in q and k."""
    v = np.arange(1.0, k.shape[-2] + 1)[None, :, None]
    if framework == "torch":
        import torch

        leaves = [array(x, framework, "float32").requires_grad_() for x in (q, k)]
        out = asp.attention(*leaves, array(v, framework, "float32"), score=score)
        return [values(g) for g in torch.autograd.grad(out.sum(), leaves)]
    import jax

    x = [array(y, framework, "float32") for y in (q, k, v)]
    return [
        values(g) for g in jax.grad(lambda q, k: asp.attention(q, k, x[2], score=score).sum(), (0, 1))(*x[:2])
    ]


@pytest.mark.parametrize("framework", TRACED)
def test_gradients_where_a_root_would_have_none(framework: str) -> None:
    """B64: a query equal to a key, and vectors of zeros, have finite gradients; right ones."""
    same = np.array([[[1.0, 2.0]]])
    for g in gradients_of(framework, Gaussian(), same, same):
        assert (g == 0).all()
    if framework == "jax":
        return
    x = np.array([[[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]])
    for score in (Gaussian(), Gaussian(0.5), Cosine()):
        assert all(np.isfinite(g).all() for g in gradients_of(framework, score, x, x))
    zero = np.zeros((1, 2, 2))
    dq, dk = gradients_of(framework, Cosine(), zero, x)
    assert (dq == 0).all()
    assert np.isfinite(dk).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_padded_batch_is_its_sequences_alone(framework: str) -> None:
    """B67: lengths count with every score, in every implementation."""
    scores = SCORES if framework != "jax" else ("scaled dot", "additive")
    s = Sizes(B=2, H=4, G=2, L=4, S=5)
    for name in scores:
        asked = Asked(sizes=s, score=name)
        x = asked.draw("float32")
        qkv, options = asked.library(asked.native(framework, "float32", x), framework)
        for one in ("auto", *NAMES) if framework == "torch" else ("auto",):
            if one != "auto" and not runs(one, *qkv, **options):
                continue
            out = values(asp.attention(*qkv, **{**options, "mask": ValidLens([2, 4])}, implementation=one))
            rule = SCORES[name].rule(**{n: x[n] for n in SCORES[name].shapes(s)})
            for b, n in enumerate((2, 4)):
                alone = [x["q"][b : b + 1], x["k"][b : b + 1, :, :n], x["v"][b : b + 1, :, :n]]
                shifted = lambda q, k, _, h: rule(q, k, b, h)  # noqa: B023, E731
                wanted = oracle.attention(*alone, score=shifted).out[0]
                np.testing.assert_allclose(out[b], wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_large_common_offset_costs_no_digits(framework: str) -> None:
    """The Gaussian in float32 at 1e3: the reference point is a query that counts, never what is excluded."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3)))
    offset = np.array([1e3, -2e3])[:, None, None, None]
    moved = (q + offset, k + offset, v)
    x = {n: y.astype("f4").astype("f8") for n, y in zip("qkv", moved, strict=True)}
    x["q"][1, :, 0] = NAN  # sees nothing below, and comes first
    x["k"][0, :, 4] = 1e30  # seen by nobody
    keep = np.ones((2, 4, 4, 5), bool)
    keep[1, :, 0] = keep[0, :, :, 4] = False
    wanted = oracle.attention(*x.values(), score="gaussian", keep=keep)
    given = [array(y, framework, "float32") for y in x.values()]
    for one in ("auto", *NAMES):
        if one == "auto" or runs(one, *given, score=Gaussian()):
            out = asp.attention(*given, score=Gaussian(), mask=array(keep, framework), implementation=one)
            np.testing.assert_allclose(values(out), wanted.out, rtol=0, atol=5e-6)
    r = asp.inspect(*given, score=Gaussian(), mask=array(keep, framework))
    lse = np.where(np.isfinite(wanted.lse), wanted.lse, -1)
    np.testing.assert_allclose(np.where(np.isinf(values(r.lse)), -1, values(r.lse)), lse, rtol=0, atol=5e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_square_overflows_in_a_cosine(framework: str) -> None:
    shapes = (2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3)
    for size in (1e30, 1e-30):
        x = [np.random.default_rng(n).standard_normal(y).astype("f4") for n, y in enumerate(shapes)]
        big = [(x[0] * np.float32(size)), (x[1] * np.float32(size)), x[2]]
        big[0][0, 0, 1] = 0  # a vector without a direction
        wanted = oracle.attention(*big, score="cosine")
        out = asp.attention(*(array(y, framework, "float32") for y in big), score=Cosine())
        np.testing.assert_allclose(values(out), wanted.out, rtol=0, atol=5e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_parameters_come_in_any_dtype_and_from_numpy(framework: str) -> None:
    asked = Asked(score="gaussian, per sequence and head")
    for dtype in DTYPES[framework]:
        x = asked.draw("float16" if dtype == "float16" else "bfloat16")
        qkv = [array(x[n], framework, dtype) for n in "qkv"]
        plain = values(asp.attention(*qkv, score=Gaussian(array(x["bandwidth"], framework, dtype))))
        for other in (
            x["bandwidth"],
            x["bandwidth"].astype("f4"),
            array(x["bandwidth"], framework, "float64"),
        ):
            np.testing.assert_allclose(values(asp.attention(*qkv, score=Gaussian(other))), plain, rtol=1e-6)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_a_function_is_called_in_the_callers_rank(framework: str, rank: int) -> None:
    """It sees heads for itself, finite numbers only, and may broadcast what it returns."""
    lead = ((), (2,), (2, 4), (2, 2, 4))[rank - 2]
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((*lead, n, 3)), framework, "float64") for n in (4, 5, 5))
    seen = []

    def score(q: Any, k: Any) -> Any:
        seen.append((tuple(q.shape), tuple(k.shape)))
        assert np.isfinite(values(q)).all() and np.isfinite(values(k)).all()
        return q @ k.mT

    out = asp.attention(q, k, v, score=score, implementation="eager")
    assert seen == [((*lead, 4, 3), (*lead, 5, 3))]
    np.testing.assert_allclose(values(out), values(asp.attention(q, k, v, score=Dot())), rtol=0, atol=1e-12)
    if rank == 4:
        k, v = k[:, :2], v[:, :2]
        k[0, :, 4] = v[0, :, 4] = NAN
        seen.clear()
        out = asp.attention(q, k, v, score=score, mask=ValidLens([4, 5]))
        assert {(a[:2], a[3:], b[:2], b[3:]) for a, b in seen} == {((2, 4), (3,)) * 2}
        wanted = asp.attention(q, k, v, score=Dot(), mask=ValidLens([4, 5]))
        np.testing.assert_allclose(values(out), values(wanted), rtol=0, atol=1e-12)
    if rank > 2:
        flat = asp.attention(q, k, v, score=lambda q, k: (q @ k.mT)[(slice(0, 1),) * len(lead)] * 0)
        np.testing.assert_allclose(values(flat)[..., 1, :], values(flat)[..., 0, :], rtol=0, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_a_function_may_exclude(framework: str) -> None:
    """A score of -inf excludes the pair; where all are, the row is empty."""
    asked = Asked(score="dot")
    x = asked.draw("float64")
    x["q"][:, :, 1, 0] = 9
    dots = x["q"] @ np.repeat(x["k"], 2, axis=1).swapaxes(-1, -2)
    wanted = oracle.attention(*(x[n] for n in "qkv"), score="dot", keep=(dots < 1) & (x["q"][..., :1] != 9))
    where = np.where if framework == "numpy" else importlib.import_module(framework).where

    def score(q: Any, k: Any) -> Any:
        s = q @ k.mT
        return where((s < 1) & (q[..., :1] != 9), s, -INF)

    qkv = [array(x[n], framework, "float64") for n in "qkv"]
    if framework == "torch":
        qkv = [y.requires_grad_() for y in qkv]
    r = asp.inspect(*qkv, score=score)
    np.testing.assert_allclose(values(r.out), wanted.out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(values(r.weights()), wanted.weights, rtol=0, atol=1e-12)
    assert (values(r.out)[:, :, 1] == 0).all() and (values(r.lse)[:, :, 1] == -INF).all()
    if framework == "torch":
        r.out.sum().backward()
        assert all(y.grad.isfinite().all() for y in qkv)
        assert (qkv[0].grad[:, :, 1] == 0).all()


X = np.ones((3, 2, 4, 5), np.float32)
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "bandwidth 0": (lambda: Gaussian(0), "bandwidth: given 0, needed a positive number"),
    "bandwidth < 0": (lambda: Gaussian(np.array(-1.0)), "bandwidth: given .*-1.0, needed a positive"),
    "text": (lambda: ScaledDot("big"), "scale: given str 'big', needed a number, or a floating-point array"),
    "integers": (
        lambda: Cosine(np.array([1, 2])),
        r"scale: given int64\[2\], needed a number",
    ),
    "three axes": (
        lambda: ScaledDot(np.ones((1, 1, 1))),
        r"scale: given float64\[1, 1, 1\], needed a number",
    ),
    "a list": (lambda: Bilinear([[1.0]]), "M: given list, needed a floating-point array"),
    "a vector": (
        lambda: Bilinear(np.ones(2)),
        r"M: given float64\[2\], needed .*\(Dq, Dk\) or \(H, Dq, Dk\)",
    ),
    "two ranks": (
        lambda: LowRankBilinear(np.ones((2, 3)), np.ones((3, 3))),
        "W_q, W_k: given ranks 2 and 3, needed one rank r",
    ),
    "two hidden widths": (
        lambda: Additive(np.ones((2, 3)), np.ones((3, 3)), np.ones(2)),
        "W_q, W_k, w_v: given hidden widths .2, 3, 2., needed one hidden width F",
    ),
    "heads in one axis": (
        lambda: asp.attention(X, X, X, score=ScaledDot(np.ones(2))),
        "a 1-D array means sequences, never heads: for one per head write scale\\[None, :\\]",
    ),
    "another width": (
        lambda: asp.attention(X, X, X, score=Bilinear(np.ones((5, 4)))),
        r"Bilinear.M: given float64\[5, 4\], needed \(Dq, Dk\) = \(5, 5\)",
    ),
    "another number of heads": (
        lambda: asp.attention(X, X, X, score=Bilinear(np.ones((3, 5, 5)))),
        r"Bilinear.M: given float64\[3, 5, 5\], needed H = 2",
    ),
    "another width of keys": (
        lambda: asp.attention(X, X, X, score=Additive(np.ones((2, 5)), np.ones((2, 4)), np.ones(2))),
        r"Additive.W_k: given float64\[2, 4\], needed width 5",
    ),
    "two widths": (
        lambda: asp.attention(X, X[..., :3], X),
        "queries of width 5 and keys of width 3, needed equal widths for ScaledDot; Bilinear and Additive",
    ),
    "what a function returns": (
        lambda: asp.attention(X, X, X, score=lambda q, k: q),
        r"score: given a function that returned float32\[3, 2, 3, 5\]",
    ),
    "a function that returns a number": (
        lambda: asp.attention(X, X, X, score=lambda q, k: 3.0),
        r"score: given a function that returned 3.0, needed float32 scores \(3, 2, 3, 2\); .*parts",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_refusals(mistake: str) -> None:
    make, text = MISTAKES[mistake]
    with pytest.raises(asp.ArgumentError, match=text):
        make()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_softcaps_at_the_ends_of_their_range(framework: str) -> None:
    """A cap that float32 cannot hold, or an infinite one, caps nothing; a tiny one all but signs."""
    rng = np.random.default_rng(0)
    qkv = [array(rng.standard_normal((1, 3, 4)), framework, "float32") for _ in range(3)]
    for one in ("eager", "tiled"):
        plain = values(asp.attention(*qkv, implementation=one))
        for cap in (1e30, 1e39, 1e300, array(INF, framework, "float32")):
            np.testing.assert_allclose(
                values(asp.attention(*qkv, softcap=cap, implementation=one)), plain, rtol=1e-5
            )
        flat = values(asp.attention(*qkv, softcap=1e-50, implementation=one))
        mean = values(qkv[2]).mean(-2, keepdims=True)
        np.testing.assert_allclose(flat, np.broadcast_to(mean, flat.shape), rtol=0, atol=1e-6)


def test_a_function_of_another_kind_is_refused() -> None:
    x = np.ones((1, 2, 3))
    with pytest.raises(asp.ArgumentError, match=r"returned complex128\[1, 2, 2\], needed float64 scores"):
        asp.attention(x, x, x, score=lambda q, k: (q @ k.mT) + 0j)
    torch = pytest.importorskip("torch")
    y = torch.ones(1, 2, 3)
    with pytest.raises(asp.ArgumentError, match=r"returned float64\[1, 2, 2\], needed float32 scores"):
        asp.attention(y, y, y, score=lambda q, k: x @ x.mT)
