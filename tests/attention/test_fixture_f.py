"""Fixture F of the bug reports: small integers that show at a glance which key leaked in.

Every query is 1, keys are ln 1 .. ln 4, values 1, 10, 100, 1000: the weights are small fractions. Each row
here stands for the reports named with it; a row runs in every framework, dtype and implementation, in 3-D,
4-D and 5-D, looked at or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    FirstKeys,
    Nothing,
    Predicate,
    PrefixLM,
    SlidingWindow,
    ValidLens,
)
from attnspan.scores import Dot, ScaledDot

from .helpers import (
    DTYPES,
    EVERY_DTYPE,
    FRAMEWORKS,
    INF,
    NAMES,
    TRACED,
    array,
    precision,
    runs,
    same_bits,
    values,
)

W = 4300 / 7  # 614.2857: keys 2 and 3
UPSIDE_DOWN = [480, W, 1000, 0]


@dataclass(frozen=True)
class Row:
    """The mask, what a correct library gives, and L and S."""

    mask: Any
    wanted: list[float]
    L: int = 4
    S: int = 4


LEFT = lambda n: ValidLens(4 - n, pad="left")  # noqa: E731
WINDOW = SlidingWindow(back=1)

ROWS = {
    "none": Row(None, [432.1] * 4),
    "everything": Row(Everything(), [432.1] * 4),
    "nothing": Row(Nothing(), [0] * 4),
    "B07, B08: valid 0": Row(ValidLens(0), [0] * 4),
    "valid 1": Row(ValidLens(1), [1] * 4),
    "B16, B39, B59: valid 2": Row(ValidLens([2]), [7] * 4),
    "valid 3": Row(ValidLens(3), [53.5] * 4),
    "B17, B29, B30: causal": Row(Causal(), [1, 7, 53.5, 432.1]),
    "B31, B32: causal, valid 3": Row(Causal() & ValidLens(3), [1, 7, 53.5, 53.5]),
    "B45: causal, left pad 1": Row(Causal() & LEFT(1), [0, 10, 64, 480]),
    "B33, B35, B40: causal, window of 2": Row(Causal() & WINDOW, [1, 7, 64, W]),
    "window of 2 is causal": Row(SlidingWindow.last(2), [1, 7, 64, W]),
    "causal, window of 3": Row(Causal() & SlidingWindow(back=2), [1, 7, 53.5, 480]),
    "B37: window of 1": Row(SlidingWindow(0), [1, 10, 100, 1000]),
    "B37: window of 100": Row(SlidingWindow(99), [1, 7, 53.5, 432.1]),
    "B37: no limit": Row(SlidingWindow(None), [1, 7, 53.5, 432.1]),
    "B10: causal, window of 2, left pad 2": Row(Causal() & WINDOW & LEFT(2), [0, 0, 100, W]),
    "B10: causal, window of 2, valid 2": Row(Causal() & WINDOW & ValidLens(2), [1, 7, 10, 0]),
    "B41: radius 1": Row(SlidingWindow(back=1, ahead=1), [7, 53.5, 480, W]),
    "B52, B54: documents, causal": Row(Documents([0, 0, 1, 1]) & Causal(), [1, 7, 100, W]),
    "B54: each causal": Row(Documents([0, 0, 1, 1], each=Causal()), [1, 7, 100, W]),
    "B55: documents": Row(Documents([0, 0, 1, 1]), [7, 7, W, W]),
    "B56: by offsets": Row(Documents.from_offsets([0, 2, 4]), [7, 7, W, W]),
    "B55: by lengths": Row(Documents.from_lengths([2, 2]), [7, 7, W, W]),
    "B56: documents that return, causal": Row(Documents([0, 1, 0, 1]) & Causal(), [1, 10, 75.25, 670]),
    "B53: padding is no document": Row(Documents([0, 0, 1, -1]), [7, 7, 100, 0]),
    "B43: prefix 0": Row(PrefixLM(0), [1, 7, 53.5, 432.1]),
    "B43: prefix 1": Row(PrefixLM(1), [1, 7, 53.5, 432.1]),
    "B43: prefix 2": Row(PrefixLM(2), [7, 7, 53.5, 432.1]),
    "B43: prefix 4": Row(PrefixLM(4), [432.1] * 4),
    "prefix 2, valid 3": Row(PrefixLM(2) & ValidLens(3), [7, 7, 53.5, 53.5]),
    "sink key, causal window of 2": Row((WINDOW | FirstKeys(1)) & Causal(), [1, 7, 53.5, 537.625]),
    "B23, B25: 2 of 4, bottom right": Row(Causal("bottom_right"), [53.5, 432.1], L=2),
    "B23: 2 of 4, top left": Row(Causal("top_left"), [1, 7], L=2),
    "B23: a decode step": Row(Causal("bottom_right"), [432.1], L=1),
    "B23: a decode step, top left": Row(Causal("top_left"), [1], L=1),
    "B25: 3 of 4": Row(Causal(1), [7, 53.5, 432.1], L=3),
    "B36: 2 of 4, no mask": Row(None, [432.1, 432.1], L=2),
    "B24: 4 of 2, bottom right": Row(Causal("bottom_right"), [0, 0, 1, 7], S=2),
    "B24: 4 of 2, top left": Row(Causal("top_left"), [1, 7, 7, 7], S=2),
    "B01: row 3 sees nothing": Row(Causal() & ValidLens(4, query_lens=[3]), [1, 7, 53.5, 0]),
    "B02: rows 2 and 3 see nothing": Row(
        Dense([[True] * 4, [True, True, False, False], [False] * 4, [False] * 4]), [432.1, 7, 0, 0]
    ),
    "B22: integers 0 and 1": Row(Dense(np.array([1, 1, 0, 0])), [7] * 4),
    "B35: not (ahead or too far)": Row(
        ~(Predicate(lambda q, k: k > q) | Predicate(lambda q, k: q - k > 1)), [1, 7, 64, W]
    ),
    "B59: valid queries too": Row(ValidLens(2, query_lens=[2]), [7, 7, 0, 0]),
    "upside down, asked for": Row(Dense(np.triu(np.ones((4, 4), bool), 1)), UPSIDE_DOWN),
}


def fixture(framework: str, dtype: str, L: int = 4, S: int = 4, lead: tuple[int, ...] = (1, 1)) -> list[Any]:
    """Give q, k and v; every number fits float16."""
    arrays = np.ones((L, 1)), np.log(np.arange(1.0, S + 1))[:, None], 10.0 ** np.arange(S)[:, None]
    return [array(np.broadcast_to(x, (*lead, *x.shape)), framework, dtype) for x in arrays]


# Relative: all terms are positive. Half types round the keys' logarithms (a weight moves by twice that),
# the output, and in PyTorch's kernel the weights.
ALLOWED = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
MEAN = 277.75
SIGNATURES = {
    MEAN: "the mean of the values: an empty row became uniform, or the softmax ran over queries",
    2.1: "valid 2: masked after the softmax, without normalising again",
    224.2: "valid 2: masked scores set to 0",
}


def judge(given: Any, wanted: list[float], dtype: str) -> None:
    """Hold (..., L, 1) against the table; an empty row is exactly 0."""
    for row in values(given)[..., 0].reshape(-1, len(wanted)):
        for got, want in zip(row, wanted, strict=True):
            assert not np.isnan(got)
            assert abs(got - want) <= ALLOWED[dtype] * want
            assert not any(abs(got - wrong) <= 0.02 * wrong for wrong in SIGNATURES)


def seen(row: Row) -> np.ndarray:
    """Read off the table which keys each query sees: (L, S), from its value alone."""
    keep = np.zeros((row.L, row.S), dtype=bool)
    subsets = [[j for j in range(row.S) if n >> j & 1] for n in range(2**row.S)]
    gives = [sum((j + 1) * 10**j for j in keys) / max(sum(j + 1 for j in keys), 1) for keys in subsets]
    for i, want in enumerate(row.wanted):
        (keys,) = (keys for keys, value in zip(subsets, gives, strict=True) if abs(value - want) < 1e-4)
        keep[i, keys] = True
    return keep


def test_the_table_is_read_off_right() -> None:
    assert seen(ROWS["B17, B29, B30: causal"]).tolist() == np.tri(4, dtype=bool).tolist()
    assert seen(ROWS["B53: padding is no document"]).sum(axis=1).tolist() == [2, 2, 1, 0]
    judge(np.array([[1.0], [0.0]]), [1.0, 0.0], "float64")
    for bad in (277.75, np.nan, 2e-9):
        with pytest.raises(AssertionError):
            judge(np.array([[bad]]), [0.0], "bfloat16")


def table() -> Iterator[Any]:
    """Walk over framework, dtype, row; most of what JAX would compile for one row alone is in the sweep."""
    rare = ("B23, B25: 2 of 4, bottom right", "B45: causal, left pad 1", "B53: padding is no document")
    for case in EVERY_DTYPE:
        framework, dtype = case.values
        for name, row in ROWS.items():
            usual = (row.L, row.S) == (4, 4) and dtype == "float32"
            usual = usual or (name in rare and dtype != "float64") or name == rare[1]
            marks = [] if usual or framework != "jax" else [pytest.mark.sweep]
            yield pytest.param(framework, dtype, name, marks=[*case.marks, *marks])


@pytest.mark.parametrize(("framework", "dtype", "name"), list(table()))
def test_row(framework: str, dtype: str, name: str) -> None:
    """Every way of asking gives the table, and looking moves no bit (B29, B30, B84)."""
    row = ROWS[name]
    keep = seen(row)
    weights = np.where(keep, np.arange(1, row.S + 1), 0.0)
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1)
    leads = ((1,), (1, 1), (1, 1, 1)) if framework != "jax" else ((1, 1),)
    with precision(framework, dtype):
        for lead in leads:
            qkv = fixture(framework, dtype, row.L, row.S, lead)
            options = {"mask": row.mask, "score": (Dot(), ScaledDot())[len(lead) % 2]}
            for one in NAMES:
                if not runs(one, *qkv, **options):
                    continue
                out = asp.attention(*qkv, **options, implementation=one)
                judge(out, row.wanted, dtype)
                if framework != "jax" or (dtype == "float32" and 0 in row.wanted):
                    r = asp.inspect(*qkv, **options, implementation=one)
                    same_bits(r.out, out)
                    found = values(r.weights())[(0,) * len(lead)]
                    assert (found[~keep] == 0).all()
                    np.testing.assert_allclose(found, weights, rtol=ALLOWED[dtype], atol=0)


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if 0 in row.wanted])
@pytest.mark.parametrize("framework", TRACED[:1])
def test_gradients_of_empty_rows(framework: str, name: str) -> None:
    """B05, B27, B71: finite everywhere; exactly 0 at empty rows and at keys that no query sees."""
    import torch

    row = ROWS[name]
    keep = seen(row)
    for dtype in DTYPES[framework]:
        for one in ("auto", *NAMES):
            q, k, v = (x.requires_grad_() for x in fixture(framework, dtype, row.L, row.S))
            if one != "auto" and not runs(one, q, k, v, mask=row.mask):
                continue
            asp.attention(q, k, v, mask=row.mask, implementation=one).sum().backward()
            for x, live in ((q, keep.any(1)), (k, keep.any(0)), (v, keep.any(0))):
                assert torch.isfinite(x.grad).all()
                assert (x.grad[0, 0][torch.tensor(~live)] == 0).all()
            total = values(v.grad).sum()  # the weights of each row that sees a key sum to 1
            assert abs(total - keep.any(1).sum()) <= 4 * ALLOWED[dtype] * max(total, 1)


@pytest.mark.parametrize("framework", TRACED[1:])
def test_gradients_of_empty_rows_in_jax(framework: str) -> None:
    import jax

    for row in (ROWS["B10: causal, window of 2, left pad 2"], ROWS["B53: padding is no document"]):
        keep = seen(row)
        qkv = fixture(framework, "float32")
        loss = lambda *x: asp.attention(*x, mask=row.mask).sum()  # noqa: B023, E731
        dq, dk, dv = (values(g)[0, 0] for g in jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv))
        assert np.isfinite([dq, dk, dv]).all()
        assert (dq[~keep.any(1)] == 0).all()
        assert (dk[~keep.any(0)] == 0).all() and (dv[~keep.any(0)] == 0).all()


@pytest.mark.parametrize(
    ("framework", "dtype"), [case for case in EVERY_DTYPE if case.values != ("jax", "float64")]
)
def test_padding_as_a_bias(framework: str, dtype: str) -> None:
    """B02, B21: 0/-inf numbers are a bias and exclude; beside a mask both count."""
    with precision(framework, dtype):
        qkv = fixture(framework, dtype)
        bias = array([0, 0, -INF, -INF], framework, dtype)
        for one in ("auto", *NAMES):
            if one == "auto" or runs(one, *qkv, bias=bias):
                judge(asp.attention(*qkv, bias=bias, implementation=one), [7] * 4, dtype)
                out = asp.attention(*qkv, bias=bias, mask=Causal(), implementation=one)
                judge(out, [1, 7, 7, 7], dtype)
                low = array([[-INF] * 4, [0] * 4, [0] * 4, [-INF] * 4], framework, dtype)
                out = asp.attention(*qkv, bias=low, mask=Causal(), implementation=one)
                judge(out, [0, 7, 53.5, 0], dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_sequences_and_heads_keep_their_order(framework: str) -> None:
    """B19, B57, B67: different lengths per sequence; per head only where an axis says so."""
    qkv = fixture(framework, "float32", lead=(2, 2))
    by_head = array([[[1], [3]]], framework)
    for one in ("auto", *NAMES):
        if one != "auto" and not runs(one, *qkv):
            continue
        call = lambda mask: values(asp.attention(*qkv, mask=mask, implementation=one))[..., 0]  # noqa: B023, E731
        for mask in (ValidLens([1, 3]), ValidLens(array([1, 3], framework))):
            np.testing.assert_allclose(call(mask), np.broadcast_to([[[1]], [[53.5]]], (2, 2, 4)), rtol=1e-6)
        np.testing.assert_allclose(
            call(ValidLens(by_head)), np.broadcast_to([[[1], [53.5]]], (2, 2, 4)), rtol=1e-6
        )


@pytest.mark.parametrize("framework", TRACED[:1])
def test_packed_documents_with_empty_rows(framework: str) -> None:
    """B27: more queries than keys in each document, bottom right: 2, 1 and 3 empty rows; dq is 0 there."""
    lengths = np.array([3, 2, 4]), np.array([1, 1, 1])
    mask = Documents.from_lengths(*lengths, each=Causal("bottom_right"))
    q, k, v = (x.requires_grad_() for x in fixture(framework, "float64", 9, 3))
    empty = [0, 1, 3, 5, 6, 7]
    for one in NAMES:
        out = asp.attention(q, k, v, mask=mask, implementation=one)
        judge(out, [0, 0, 1, 0, 10, 0, 0, 0, 100], "float64")
        q.grad = None
        out.sum().backward()
        assert (q.grad[0, 0, empty] == 0).all() and q.grad.isfinite().all()


@pytest.mark.parametrize("framework", TRACED[:1])
def test_no_grad_changes_nothing(framework: str) -> None:
    """B88: with or without a gradient asked for, the same values and the full length."""
    import torch

    for name, row in ROWS.items():
        for one in NAMES:
            qkv = fixture(framework, "float32", row.L, row.S)
            with torch.no_grad():
                plain = asp.attention(*qkv, mask=row.mask, implementation=one)
            with torch.inference_mode():
                same_bits(asp.attention(*qkv, mask=row.mask, implementation=one), plain)
            asked = [x.clone().requires_grad_() for x in qkv]
            same_bits(asp.attention(*asked, mask=row.mask, implementation=one), plain), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_constant_row_of_very_negative_biases_is_uniform(framework: str) -> None:
    """B03: a finite bias, however low, is a number and not a mask; -inf is one."""
    lowest = float(np.finfo(np.float32).min)
    q, k, v = fixture(framework, "float32")
    bias = array([[lowest] * 4, [0] * 4, [-INF] * 4, [-lowest] * 4], framework, "float32")
    for one in ("auto", *NAMES):
        if one == "auto" or runs(one, q, k, v, bias=bias):
            out = asp.attention(q, k * 0, v, bias=bias, implementation=one)
            np.testing.assert_allclose(values(out)[0, 0, :, 0], [MEAN, MEAN, 0, MEAN], rtol=1e-6)
