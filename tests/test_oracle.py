"""The oracle against hand values, closed forms and promises; nothing else of the library is used here."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from attnspan import oracle

NAN, INF = math.nan, math.inf
STATISTICS = ("entropy", "max_weight", "jacobian_norm", "effective_keys")


def same(given, wanted, rtol=1e-12, atol=1e-12):
    """Equal in shape and value; a NaN on either side fails."""
    given, wanted = np.asarray(given), np.asarray(wanted, dtype=np.float64)
    assert given.dtype == np.float64
    assert given.shape == wanted.shape
    assert not np.isnan(given).any()
    assert not np.isnan(wanted).any()
    np.testing.assert_allclose(given, wanted, rtol=rtol, atol=atol, equal_nan=False)


def random(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def with_nan(array, at, value=NAN):
    array = array.copy()
    array[at] = value
    return array


def test_same_can_fail():
    for given, wanted in ((NAN, NAN), (NAN, 1), (1, NAN), (1, 1 + 1e-9), (INF, 1), ([1.0], 1)):
        with pytest.raises(AssertionError):
            same(np.float64(given), wanted)


def test_imports_numpy_and_the_standard_library_only():
    names = set()
    for node in ast.walk(ast.parse(Path(oracle.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or "").split(".")[0])
    assert names == {
        "__future__",
        "collections",
        "contextlib",
        "dataclasses",
        "inspect",
        "math",
        "numpy",
        "operator",
        "typing",
    }


# Fixture F: weights are small fractions, values show which key leaked in.


def same_document(*ids):
    return lambda i, j: ids[i] == ids[j] and ids[i] >= 0


TWO, RETURNING, PADDED = same_document(0, 0, 1, 1), same_document(0, 1, 0, 1), same_document(0, 0, 1, -1)

FIXTURE = {
    "none": (4, 4, lambda i, j: True, [432.1] * 4),
    "valid 0": (4, 4, lambda i, j: False, [0] * 4),
    "valid 1": (4, 4, lambda i, j: j < 1, [1] * 4),
    "valid 2": (4, 4, lambda i, j: j < 2, [7] * 4),
    "valid 3": (4, 4, lambda i, j: j < 3, [53.5] * 4),
    "causal": (4, 4, lambda i, j: j <= i, [1, 7, 53.5, 432.1]),
    "causal, valid 3": (4, 4, lambda i, j: j <= i and j < 3, [1, 7, 53.5, 53.5]),
    "causal, left pad 1": (4, 4, lambda i, j: 1 <= j <= i, [0, 10, 64, 480]),
    "causal, back 1": (4, 4, lambda i, j: i - 1 <= j <= i, [1, 7, 64, 4300 / 7]),
    "causal, back 2": (4, 4, lambda i, j: i - 2 <= j <= i, [1, 7, 53.5, 480]),
    "causal, back 1, left pad 2": (4, 4, lambda i, j: max(2, i - 1) <= j <= i, [0, 0, 100, 4300 / 7]),
    "causal, back 1, valid 2": (4, 4, lambda i, j: i - 1 <= j <= i and j < 2, [1, 7, 10, 0]),
    "back 1, ahead 1": (4, 4, lambda i, j: abs(i - j) <= 1, [7, 53.5, 480, 4300 / 7]),
    "documents, causal": (4, 4, lambda i, j: TWO(i, j) and j <= i, [1, 7, 100, 4300 / 7]),
    "documents": (4, 4, lambda i, j: TWO(i, j), [7, 7, 4300 / 7, 4300 / 7]),
    "returning documents, causal": (4, 4, lambda i, j: RETURNING(i, j) and j <= i, [1, 10, 75.25, 670]),
    "documents with padding": (4, 4, lambda i, j: PADDED(i, j), [7, 7, 100, 0]),
    "prefix 2": (4, 4, lambda i, j: j <= i or j < 2, [7, 7, 53.5, 432.1]),
    "prefix 2, valid 3": (4, 4, lambda i, j: (j <= i or j < 2) and j < 3, [7, 7, 53.5, 53.5]),
    "causal back 1, or first key": (4, 4, lambda i, j: i - 1 <= j <= i or j == 0, [1, 7, 53.5, 537.625]),
    "2 of 4, bottom right": (2, 4, lambda i, j: j <= i + 2, [53.5, 432.1]),
    "2 of 4, top left": (2, 4, lambda i, j: j <= i, [1, 7]),
    "4 of 2, bottom right": (4, 2, lambda i, j: j <= i - 2, [0, 0, 1, 7]),
    "4 of 2, top left": (4, 2, lambda i, j: j <= i, [1, 7, 7, 7]),
    "causal upside down": (4, 4, lambda i, j: j > i, [480, 4300 / 7, 1000, 0]),
}  # fmt: skip


def fixture(L=4, S=4):
    return (
        np.ones((1, 1, L, 1)),
        np.log(np.arange(1.0, S + 1)).reshape(1, 1, S, 1),
        10.0 ** np.arange(S).reshape(1, 1, S, 1),
    )


@pytest.mark.parametrize("name", FIXTURE)
def test_fixture_f(name):
    L, S, rule, wanted = FIXTURE[name]
    keep = np.zeros((L, S), dtype=bool)
    for i in range(L):
        for j in range(S):
            keep[i, j] = rule(i, j)
    q, k, v = fixture(L, S)
    for mask in (keep, keep[None, None], lambda b, h, i, j: keep[i, j]):
        r = oracle.attention(q, k, v, score="dot", keep=mask)
        same(r.out[0, 0, :, 0], wanted)
        for i in range(L):
            total = sum(j + 1 for j in range(S) if keep[i, j])
            same(r.weights[0, 0, i], [(j + 1) / total if keep[i, j] else 0 for j in range(S)])
            assert (r.weights[0, 0, i][~keep[i]] == 0).all()
            same(r.lse[0, 0, i], math.log(total) if total else -INF)
    r = oracle.attention(q, k, v, score="dot", bias=np.where(keep, 0, -INF))
    same(r.out[0, 0, :, 0], wanted)


# Against the whole formula written with arrays.


def dense(scores, v, keep=True, sink=None):
    """Return out, lse and weights of (..., L, S) scores, every row of which sees a key."""
    scores = np.where(keep, scores, -INF)
    lse = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - lse[..., None])
    out = weights @ v
    if sink is not None:
        out = out / (1 + np.exp(sink - lse))[..., None]
    return out, lse, weights


def check(r, out, lse, weights):
    same(r.out, out)
    same(r.lse, lse)
    same(r.weights, weights)
    for at in np.ndindex(*lse.shape):
        p = weights[at]
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        same(r.entropy[at], entropy)
        same(r.effective_keys[at], math.exp(entropy))
        same(r.max_weight[at], p.max())
        same(r.jacobian_norm[at], np.linalg.norm(np.diag(p) - np.outer(p, p)))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 2, 3)])
def test_leading_axes(lead):
    q, k, v = random((*lead, 3, 2), (*lead, 4, 2), (*lead, 4, 5))
    r = oracle.attention(q, k, v)
    check(r, *dense(q @ np.swapaxes(k, -1, -2) / math.sqrt(2), v))


@pytest.mark.parametrize("G", [1, 2, 4])
def test_grouped_heads(G):
    q, k, v = random((2, 4, 3, 2), (2, G, 5, 2), (2, G, 5, 3))
    r = oracle.attention(q, k, v, score="dot")
    for b in range(2):
        for h in range(4):
            g = {1: [0, 0, 0, 0], 2: [0, 0, 1, 1], 4: [0, 1, 2, 3]}[G][h]
            out, lse, weights = dense(q[b, h] @ k[b, g].T, v[b, g])
            same(r.out[b, h], out)
            same(r.lse[b, h], lse)
            same(r.weights[b, h], weights)


def test_axes_of_size_one_broadcast():
    q, k, v = random((2, 3, 4, 3, 2), (1, 1, 2, 5, 2), (2, 1, 2, 5, 1))
    r = oracle.attention(q, k, v)
    full = oracle.attention(q, np.broadcast_to(k, (2, 3, 2, 5, 2)), np.broadcast_to(v, (2, 3, 2, 5, 1)))
    same(r.out, full.out)
    same(r.lse, full.lse)


@pytest.mark.parametrize(
    "shape", [(b, h, m, s) for b in (1, 2) for h in (1, 3) for m in (1, 4) for s in (1, 5)]
)
def test_keep_and_bias_broadcast(shape):
    q, k, v, bias = random((2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 1), shape)
    scores = q @ np.swapaxes(k, -1, -2)
    check(oracle.attention(q, k, v, score="dot", bias=bias), *dense(scores + bias, v))
    keep = bias > -0.5
    wanted = np.broadcast_to(keep, scores.shape)
    r = oracle.attention(q, k, v, score="dot", keep=keep)
    assert ((r.weights > 0) == wanted).all()
    five = oracle.attention(*(x[:, None] for x in (q, k, v)), score="dot", keep=keep, bias=bias)
    assert ((five.weights[:, 0] > 0) == wanted).all()


def test_keep_without_heads():
    q, k, v = random((2, 3, 2), (2, 4, 2), (2, 4, 1))
    keep = np.arange(4) < np.array([1, 3])[:, None, None]
    wanted = dense(q @ np.swapaxes(k, -1, -2), v, keep)
    for mask in (keep, keep[:, None], lambda b, h, i, j: j < (1, 3)[b] and h == 0):
        check(oracle.attention(q, k, v, score="dot", keep=mask), *wanted)


def test_keep_function_gets_batch_head_query_key():
    q, k, v = random((2, 3, 2, 1), (2, 3, 4, 1), (2, 3, 4, 1))
    seen = set()
    oracle.attention(q, k, v, keep=lambda b, h, i, j: seen.add((b, h, i, j)) or False)
    assert seen == set(np.ndindex(2, 3, 2, 4))


# Scores.


def test_gaussian_hand_values():
    def distance(q, k, sigma=1.0):
        return -np.sum((q - k) ** 2) / (2 * sigma**2)

    r = oracle.attention([[3.0, 4.0]], [[0.0, 0.0]], [[1.0]], score=distance)
    same(r.lse, [-12.5])
    r = oracle.attention([[0.0]], [[0.0], [1.0], [2.0]], np.zeros((3, 1)), score=distance)
    same(r.weights, [[0.5741, 0.3482, 0.0777]], rtol=0, atol=6e-5)
    same(
        oracle.attention([[0.0]], [[0.0], [1.0], [2.0]], np.zeros((3, 1)), score="gaussian").weights,
        r.weights,
    )


@pytest.mark.parametrize(
    ("score", "wanted"),
    [
        ("dot", 3 * 1 + 4 * -2),
        ("scaled_dot", -5 / math.sqrt(2)),
        ("cosine", -5 / (5 * math.sqrt(5))),
        ("gaussian", -(4 + 36) / (2 * math.sqrt(2))),
        (lambda q, k: q[0] - k[1], 5),
        (lambda q, k, b, h: q[0] + 10 * b + 100 * h, 3),
        (lambda q, k, scale=7, power=1: scale * q[1] ** power, 28),
        (np.dot, -5),
    ],
)
def test_scores_by_hand(score, wanted):
    same(oracle.attention([[3.0, 4.0]], [[1.0, -2.0]], [[1.0]], score=score).lse, [wanted])


def test_score_sees_batch_and_head():
    q, k, v = random((2, 3, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1))
    r = oracle.attention(q, k, v, score=lambda q, k, b, h: 10 * b + h)
    same(r.lse, [[[0], [1], [2]], [[10], [11], [12]]])


def test_widths_may_differ_for_a_function():
    M = np.array([[0.0, 1, 2], [1, 0, -1]])
    q, k, v = random((2, 3, 2), (2, 4, 3), (2, 4, 1))
    r = oracle.attention(q, k, v, score=lambda q, k: q @ M @ k)
    check(r, *dense(q @ M @ np.swapaxes(k, -1, -2), v))


def test_cosine_of_a_zero_vector_is_zero():
    same(
        oracle.attention([[0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]], np.eye(2), score="cosine").out, [[0.5, 0.5]]
    )


def test_order_softcap_then_bias():
    q, k, v, bias = random((1, 2, 3), (1, 4, 3), (1, 4, 2), (2, 4))
    scores = q @ np.swapaxes(k, -1, -2)
    check(
        oracle.attention(q, k, v, score="dot", softcap=0.7, bias=bias),
        *dense(0.7 * np.tanh(scores / 0.7) + bias, v),
    )


@pytest.mark.parametrize(
    "sink", [0.3, [0.1, -2.0, 40.0], [[0.1], [3.0]], [[0.1, 1.0, -2.0], [3.0, 0.0, 5.0]], [[1.5]]]
)
def test_sink(sink):
    q, k, v = random((2, 3, 2, 2), (2, 3, 4, 2), (2, 3, 4, 1))
    plain, r = oracle.attention(q, k, v), oracle.attention(q, k, v, sink=sink)
    table = np.broadcast_to(np.asarray(sink), (2, 3))
    for b, h, i in np.ndindex(2, 3, 2):
        share = np.exp(plain.lse[b, h, i]) / (np.exp(plain.lse[b, h, i]) + np.exp(table[b, h]))
        same(r.out[b, h, i], plain.out[b, h, i] * share)
    for name in ("lse", "weights", *STATISTICS):
        same(getattr(r, name), getattr(plain, name), rtol=0, atol=0)


def test_sink_at_the_ends():
    q, k, v = fixture()
    same(oracle.attention(q, k, v, score="dot", sink=-INF).out[0, 0, :, 0], [432.1] * 4)
    same(oracle.attention(q, k, v, score="dot", sink=1e4).out, np.zeros((1, 1, 4, 1)))
    same(oracle.attention(q, k, v, score="dot", sink=INF).out, np.zeros((1, 1, 4, 1)))
    same(oracle.attention(q, k, v, score="dot", sink=5.0, keep=np.False_).out, np.zeros((1, 1, 4, 1)))


def test_large_scores_do_not_overflow():
    q, k = np.full((1, 1), 1e4), np.array([[1e4], [1e4 - 1e-4], [-1e4]])
    r = oracle.attention(q, k, np.eye(3), score="dot")
    same(r.weights, [[1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0]], rtol=1e-7)
    r = oracle.attention(q, k, np.eye(3), score="dot", bias=[-1.7e308, -1.7e308, 1.7e308])
    same(r.weights, [[0, 0, 1]])
    same(r.entropy, [0])


def test_statistics_of_saturated_rows_keep_their_digits():
    for gap in (40.0, 100.0, 500.0):
        r = oracle.attention([[1.0]], [[gap], [0.0]], np.zeros((2, 1)), score="dot")
        small = math.exp(-gap)
        same(r.jacobian_norm / (2 * small), [1], rtol=1e-9)  # all four entries are +-p(1 - p)
        same(r.entropy / (small * (gap + 1)), [1], rtol=1e-9)
        same(r.max_weight, [1])
    r = oracle.attention([[0.0]], np.zeros((4, 1)), np.zeros((4, 1)))
    same(r.jacobian_norm, [math.sqrt(4 * (3 / 16) ** 2 + 12 / 256)])
    same(r.effective_keys, [4])


# What sees nothing, and what is masked.


def assert_empty(r, at):
    for name in ("out", "weights", *STATISTICS):
        assert (getattr(r, name)[at] == 0).all()
    assert (r.lse[at] == -INF).all()


def test_empty_rows_with_anything_inside():
    q, k, v = random((2, 3, 2), (2, 4, 2), (2, 4, 3))
    keep = np.ones((3, 4), dtype=bool)
    keep[1] = False
    clean = oracle.attention(q, k, v, keep=keep)
    assert_empty(clean, (slice(None), 1))
    for value in (NAN, INF, -INF):
        r = oracle.attention(with_nan(q, (0, 1), value), k, v, keep=keep)
        for name in ("out", "lse", "weights", *STATISTICS):
            same(getattr(r, name), getattr(clean, name), rtol=0, atol=0)


@pytest.mark.parametrize(("L", "S"), [(0, 0), (0, 3), (3, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 2), (0, 2), (2, 0)])
def test_no_queries_or_no_keys(lead, L, S):
    q, k, v = random((*lead, L, 2), (*lead, S, 2), (*lead, S, 3))
    r = oracle.attention(q, k, v, bias=np.zeros((L, S)), sink=0.0, dropout=0.5, seed=1)
    assert r.out.shape == (*lead, L, 3)
    assert r.weights.shape == (*lead, L, S)
    assert all(getattr(r, name).shape == (*lead, L) for name in ("lse", *STATISTICS))
    if S == 0:
        assert_empty(r, ...)
    else:
        same(r.weights, np.ones((*lead, L, S)))
    grads = oracle.gradients(q, k, v, np.ones((*lead, L, 3)), np.ones((*lead, L)))
    assert [grads[name].shape for name in ("dq", "dk", "dv")] == [q.shape, k.shape, v.shape]
    assert not np.isnan(np.concatenate([x.ravel() for x in grads.values()])).any()


def test_widths_of_zero():
    r = oracle.attention(np.zeros((2, 0)), np.zeros((3, 0)), np.arange(3.0).reshape(3, 1))
    same(r.out, [[1], [1]])
    assert oracle.attention(np.zeros((2, 1)), np.zeros((3, 1)), np.zeros((3, 0))).out.shape == (2, 0)


def test_excluded_pairs_are_never_looked_at():
    q, k, v = random((2, 2, 3, 2), (2, 1, 4, 2), (2, 1, 4, 1))
    keep = np.random.default_rng(1).random((2, 2, 3, 4)) < 0.5
    bias = np.where(np.random.default_rng(2).random((3, 4)) < 0.3, -INF, 0.5)
    calls = []

    def score(q_i, k_j, b, h):
        i = [x.tobytes() for x in q[b, h]].index(q_i.tobytes())
        calls.append((b, h, i, [x.tobytes() for x in k[b, 0]].index(k_j.tobytes())))
        return 0.0

    oracle.attention(q, k, v, score=score, keep=keep, bias=bias)
    assert sorted(calls) == [at for at in np.ndindex(2, 2, 3, 4) if keep[at] and bias[at[2:]] == 0.5]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_unseen_keys_may_hold_anything(value):
    q, k, v = random((2, 3, 2), (2, 4, 2), (2, 4, 3))
    keep = np.ones((2, 3, 4), dtype=bool)
    keep[1, :, 2] = False
    poisoned = q, with_nan(k, (1, 2), value), with_nan(v, (1, 2, 0), value)
    masks = (
        {"keep": keep},
        {"bias": np.where(keep, 0.0, -INF)},
        {"keep": keep, "bias": np.where(keep, 0.0, NAN)},
    )
    clean = oracle.attention(q, k, v, keep=keep)
    for options in masks:
        r = oracle.attention(*poisoned, **options)
        for name in ("out", "lse", "weights", *STATISTICS):
            same(getattr(r, name), getattr(clean, name), rtol=0, atol=0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_makes_nan_exactly_the_rows_that_see_it(which, value):
    inputs = dict(zip("qkv", random((2, 4, 2), (2, 4, 2), (2, 4, 3)), strict=True))
    keep = np.tril(np.ones((4, 4), dtype=bool))
    clean = oracle.attention(**inputs, keep=keep, sink=0.1)
    inputs[which] = with_nan(inputs[which], (0, 2, 1), value)
    r = oracle.attention(**inputs, keep=keep, sink=0.1)
    hit = np.zeros((2, 4), dtype=bool)
    hit[0, 2 : 3 if which == "q" else 4] = True
    assert np.isnan(r.out[hit]).all()
    same(r.out[~hit], clean.out[~hit], rtol=0, atol=0)
    for name in ("lse", "weights", *STATISTICS):
        given, wanted = getattr(r, name), getattr(clean, name)
        if which == "v":
            same(given, wanted, rtol=0, atol=0)
            continue
        same(given[~hit], wanted[~hit], rtol=0, atol=0)
        if name == "weights":
            assert (np.isnan(given[hit]) == np.broadcast_to(keep, (2, 4, 4))[hit]).all()
            assert (given[hit][~np.isnan(given[hit])] == 0).all()
        else:
            assert np.isnan(given[hit]).all()


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "gaussian", lambda q, k: 0.0])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_no_score_hides_what_is_not_finite(score, value):
    """A distance from infinity is -inf, and a constant looks at nothing: the row is NaN all the same."""
    q, k, v = random((1, 2), (3, 2), (3, 1))
    for r in (
        oracle.attention(with_nan(q, (0, 0), value), k, v, score=score),
        oracle.attention(q, with_nan(k, (1, 0), value), v, score=score),
    ):
        assert np.isnan([*r.out.ravel(), *r.lse, *r.weights.ravel(), *r.entropy]).all()


def test_a_value_of_weight_zero_or_dropped_is_still_seen():
    r = oracle.attention([[1.0]], [[2000.0], [0.0]], [[1.0], [NAN]], score="dot")
    assert np.isnan(r.out).all()
    same(r.weights, [[1, 0]])
    assert np.isnan(oracle.attention([[1.0]], [[1.0]], [[INF]], dropout=1.0, seed=0).out).all()


def test_scores_that_are_not_finite():
    def with_score(value):
        return oracle.attention(
            [[0.0]], [[0.0], [1.0]], [[3.0], [5.0]], score=lambda q, k: value if k[0] else 0.0
        )

    same(with_score(-INF).out, [[3]])
    same(oracle.attention([[0.0]], [[0.0]], [[NAN]], score=lambda q, k: -INF).out, [[0]])
    for value in (NAN, INF):
        r = with_score(value)
        assert np.isnan([*r.out.ravel(), *r.lse, *r.weights.ravel(), *r.entropy]).all()
    assert np.isnan(oracle.attention([[0.0]], [[0.0]], [[1.0]], bias=[[NAN]]).out).all()


# Dropout.


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, wanted):
    assert " ".join(f"{word:08x}" for word in oracle.philox4x32(counter, key)) == wanted


def test_keep_bits_with_arrays():
    """The same bits from NumPy's uint32 arithmetic and a threshold on all keys at once."""
    seed, n, p = 0xF123456789ABCDEF, 5, 0.3
    bits = oracle.keep_bits(seed, n, 6, 1000, p)
    assert bits.dtype == bool
    assert bits.shape == (6, 1000)
    j = np.arange(1000, dtype=np.uint32)
    for i in range(6):
        r1, r2, _, _ = (np.uint32(r) for r in oracle.philox4x32((i, n, 0, 0), (0x89ABCDEF, 0xF1234567)))
        x = r1 ^ (j * np.uint32(0x9E3779B9))
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= x >> np.uint32(15)
        x ^= r2
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        assert x.dtype == np.uint32
        assert (bits[i] == (x >= math.floor(p * 2**32))).all()
        if i == 0:  # the threshold itself is kept
            assert oracle.keep_bits(seed, n, 1, 1, int(x[0]) / 2**32).all()
            assert not oracle.keep_bits(seed, n, 1, 1, (int(x[0]) + 1) / 2**32).any()


def test_keep_bits_statistics():
    for p in (0.1, 0.5, 0.9):
        bits = oracle.keep_bits(7, 0, 100, 200, p)
        assert abs(bits.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / bits.size)
        for axis in (0, 1):
            m = bits.shape[axis]
            assert (abs(bits.mean(axis) - (1 - p)) < 5.5 * math.sqrt(p * (1 - p) / m)).all()
    half = [oracle.keep_bits(s, n, 100, 200, 0.5) for s, n in ((7, 0), (7, 1), (8, 0), (7 + 2**32, 0))]
    half += [half[0][1:], half[0][:, 1:]]
    for a in range(1, len(half)):
        first = half[0][: half[a].shape[0], : half[a].shape[1]]
        assert abs((first == half[a]).mean() - 0.5) < 5 * 0.5 / math.sqrt(first.size)


def test_keep_bits_seed_words_and_ends():
    bits = oracle.keep_bits(-3, 2, 4, 50, 0.5)
    assert (bits == oracle.keep_bits(2**64 - 3, 2, 4, 50, 0.5)).all()
    assert (bits == oracle.keep_bits(np.int64(-3), 2, 4, 50, 0.5)).all()
    assert (bits[:3, :20] == oracle.keep_bits(-3, 2, 3, 20, 0.5)).all()
    assert (oracle.keep_bits(1, 0, 5, 50, 0.2) | ~oracle.keep_bits(1, 0, 5, 50, 0.7)).all()
    assert oracle.keep_bits(0, 0, 3, 3, 0.0).all()
    assert not oracle.keep_bits(0, 0, 3, 3, 1.0).any()


@pytest.mark.parametrize("lead", [(), (2,), (2, 4), (2, 3, 4)])
def test_dropout_acts_on_the_weights(lead):
    heads = (*lead[:-1], 2) if len(lead) > 1 else lead
    q, k, v = random((*lead, 3, 2), (*heads, 5, 2), (*heads, 5, 2))
    plain = oracle.attention(q, k, v, sink=0.2)
    r = oracle.attention(q, k, v, sink=0.2, dropout=0.4, seed=11)
    for name in ("lse", "weights", *STATISTICS):
        same(getattr(r, name), getattr(plain, name), rtol=0, atol=0)
    values = np.repeat(v, 2, axis=-3) if len(lead) > 1 else v
    for n, at in enumerate(np.ndindex(*lead)):
        kept = oracle.keep_bits(11, n, 3, 5, 0.4)
        share = 1 / (1 + np.exp(0.2 - plain.lse[at]))
        same(r.out[at], share[:, None] * (plain.weights[at] * kept / 0.6) @ values[at])
    same(oracle.attention(q, k, v, dropout=1.0, seed=1).out, np.zeros((*lead, 3, 2)))


def test_dropout_keeps_the_mean():
    r = oracle.attention(np.zeros((4, 1)), np.zeros((900, 1)), np.ones((900, 1)), dropout=0.5, seed=3)
    assert (abs(r.out - 1) < 5 / 30).all()
    assert len(set(r.out.ravel().tolist())) > 1


# Gradients.


def analytic(q, k, v, g_out, g_lse, keep):
    """Differentiate unscaled dot attention of (B, L, D) by its closed form."""
    _, _, p = dense(q @ np.swapaxes(k, -1, -2), v, keep)
    dp = g_out @ np.swapaxes(v, -1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + g_lse[..., None])
    return {"dq": ds @ k, "dk": np.swapaxes(ds, -1, -2) @ q, "dv": np.swapaxes(p, -1, -2) @ g_out, "ds": ds}


def test_gradients_of_the_dot_score():
    q, k, v, g_out, g_lse = random((2, 3, 2), (2, 4, 2), (2, 4, 3), (2, 3, 3), (2, 3))
    keep = np.tril(np.ones((3, 4), dtype=bool))
    for x in (q, k, v, g_out, g_lse):
        x.setflags(write=False)
    grads = oracle.gradients(q, k, v, g_out, g_lse, score="dot", keep=keep, bias=np.zeros((3, 4)))
    wanted = analytic(q, k, v, g_out, g_lse, keep)
    for name in ("dq", "dk", "dv"):
        same(grads[name], wanted[name], rtol=0, atol=1e-9)
    same(grads["dbias"], wanted["ds"].sum(0), rtol=0, atol=1e-9)
    assert set(grads) == {"dq", "dk", "dv", "dbias"}


def test_gradients_with_groups_bias_softcap_sink_and_dropout_agree_with_directional():
    shapes = {"q": (2, 2, 2, 2), "k": (1, 1, 3, 2), "v": (2, 1, 3, 1), "bias": (2, 1, 3), "sink": (2,)}
    inputs = dict(zip(shapes, random(*shapes.values()), strict=True))
    inputs["bias"] = inputs["bias"][:, None]
    along = dict(zip(shapes, random(*(x.shape for x in inputs.values()), seed=1), strict=True))
    g_out, g_lse = random((2, 2, 2, 1), (2, 2, 2), seed=2)
    options = {"softcap": 2.0, "dropout": 0.3, "seed": 5, "g_out": g_out, "g_lse": g_lse}
    grads = oracle.gradients(**inputs, **options)
    assert all(grads["d" + name].shape == x.shape for name, x in inputs.items())
    assert all((grads["d" + name] != 0).any() for name in inputs)
    for names in (["q"], ["k"], ["v"], ["bias"], ["sink"], [*inputs]):
        wanted = sum((grads["d" + name] * along[name]).sum() for name in names)
        given = oracle.directional(**inputs, **options, along={name: along[name] for name in names})
        same(np.float64(given), wanted, rtol=0, atol=1e-7)


def test_gradient_of_the_sink_and_of_dropped_values():
    q, k, v = random((1, 2, 2, 2), (1, 1, 3, 2), (1, 1, 3, 1))
    g = np.ones((1, 2, 2, 1))
    plain = oracle.attention(q, k, v)
    for sink in (0.5, np.array([0.5, 0.5]), np.array([[0.5]])):
        grads = oracle.gradients(q, k, v, g, sink=sink)
        share = 1 / (1 + np.exp(0.5 - plain.lse))
        wanted = (-share * (1 - share) * plain.out[..., 0]).sum(-1)[0]
        assert grads["dsink"].shape == np.shape(sink)
        same(
            grads["dsink"],
            wanted if np.shape(sink) == (2,) else wanted.sum().reshape(np.shape(sink)),
            0,
            1e-9,
        )
    grads = oracle.gradients(q, k, v, g, dropout=0.5, seed=2)
    wanted = sum(plain.weights[0, h] * oracle.keep_bits(2, h, 2, 3, 0.5) / 0.5 for h in range(2)).sum(0)
    same(grads["dv"][0, 0, :, 0], wanted, rtol=0, atol=1e-9)
    assert (oracle.gradients(q, k, v, g, sink=-INF)["dsink"] == 0).all()


def test_gaussian_gradient_at_zero_distance_is_zero():
    x = np.array([[1.0, 2.0]])
    grads = oracle.gradients(x, x, np.ones((1, 1)), np.ones((1, 1)), np.ones(1), score="gaussian")
    same(grads["dq"], [[0, 0]])
    same(grads["dk"], [[0, 0]])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_unseen_entries_get_exactly_zero_whatever_they_hold(value):
    q, k, v, g_out, g_lse = random((2, 3, 2), (2, 4, 2), (2, 4, 1), (2, 3, 1), (2, 3))
    keep = np.ones((2, 3, 4), dtype=bool)
    keep[0, :, 1] = keep[1, 2] = False
    bias = np.zeros((2, 3, 4))
    bias[0, 0, 3] = -INF
    options = {"keep": keep, "score": "dot"}
    clean = oracle.gradients(q, k, v, g_out, g_lse, bias=bias, **options)
    poisoned = oracle.gradients(
        with_nan(q, (1, 2), value),
        with_nan(k, (0, 1), value),
        with_nan(v, (0, 1), value),
        with_nan(g_out, (1, 2), value),
        with_nan(g_lse, (1, 2), value),
        bias=with_nan(bias, (1, 2), value),
        **options,
    )
    for name in clean:
        same(poisoned[name], clean[name], rtol=0, atol=0)
    assert (clean["dq"][1, 2] == 0).all()
    assert (clean["dk"][0, 1] == 0).all()
    assert (clean["dv"][0, 1] == 0).all()
    assert (clean["dbias"][1, 2] == 0).all()
    assert clean["dbias"][0, 0, 3] == 0
    assert (clean["dq"][0] != 0).all()
    along = {"q": np.ones_like(q), "k": np.ones_like(k)}
    assert math.isfinite(
        oracle.directional(with_nan(q, (1, 2), value), k, v, g_out, g_lse, along=along, **options)
    )


def test_a_seen_nan_stays_with_the_rows_that_see_it():
    q, k, v, g = random((2, 2, 2), (2, 3, 2), (2, 3, 1), (2, 2, 1))
    keep = np.array([[True, True, False], [False, False, False]])
    grads = oracle.gradients(q, with_nan(k, (0, 1)), v, g, keep=keep)
    clean = oracle.gradients(q, k, v, g, keep=keep)
    for name in ("dk", "dv"):
        assert np.isnan(grads[name][0, :2]).all()
        assert (grads[name][0, 2] == 0).all()
    assert np.isnan(grads["dq"][0, 0]).all()
    assert (grads["dq"][0, 1] == 0).all()
    for name in ("dq", "dk", "dv"):
        same(grads[name][1], clean[name][1], rtol=0, atol=0)


# Refusals.

X = np.zeros((2, 4, 3, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"q": X[0, 0, 0], "k": X[0, 0, 0], "v": X[0, 0, 0]},
            ValueError,
            "needed one number of axes, 2 or more",
        ),
        ({"q": X[0]}, ValueError, "needed one number of axes"),
        ({"v": X[:, :, :2]}, ValueError, r"\(2, 4, 3, 2\), \(2, 4, 2, 2\), needed .* as many keys as values"),
        ({"k": X[:, :3], "v": X[:, :3]}, ValueError, "divides H = 4"),
        ({"k": X[:, :2]}, ValueError, "one number G"),
        ({"k": np.zeros((3, 4, 3, 2)), "v": np.zeros((3, 4, 3, 2))}, ValueError, "equal size, or 1"),
        ({"k": X[..., :1]}, ValueError, "score: given 'scaled_dot', widths 2, 1; needed equal ones"),
        ({"score": "euclid"}, ValueError, "score: given 'euclid'"),
        ({"score": lambda q: 0.0}, TypeError, "score: given 1 parameters"),
        ({"score": lambda q, k, b: 0.0}, TypeError, "score: given 3 parameters"),
        ({"score": 3}, TypeError, "callable"),
        ({"keep": np.ones((3, 3))}, TypeError, "keep: given float64, needed booleans"),
        ({"keep": np.ones((3, 3), dtype=int)}, TypeError, "keep: given int64"),
        ({"keep": np.ones((2, 3, 3), dtype=bool)}, ValueError, r"keep: given shape \(2, 3, 3\)"),
        ({"keep": np.ones((3, 4), dtype=bool)}, ValueError, r"broadcasts to \(2, 4, 3, 3\)"),
        ({"bias": np.ones((4, 3, 3))}, ValueError, "bias: given shape"),
        ({"softcap": 0.0}, ValueError, "softcap: given 0.0, needed a number above 0"),
        ({"softcap": NAN}, ValueError, "softcap: given nan"),
        ({"sink": np.zeros(2)}, ValueError, "sink: given shape"),
        ({"sink": np.zeros((1, 2, 4))}, ValueError, "sink: given shape"),
        ({"dropout": 0.1}, ValueError, "seed: given None"),
        ({"dropout": -0.1, "seed": 0}, ValueError, r"dropout: given -0.1, needed a rate in \[0, 1\]"),
        ({"dropout": NAN, "seed": 0}, ValueError, "dropout: given nan"),
        ({"dropout": 0.1, "seed": 0.5}, TypeError, "integer"),
    ],
)
def test_refusals(arguments, error, text):
    with pytest.raises(error, match=text):
        oracle.attention(**{"q": X, "k": X, "v": X, **arguments})


def test_refusals_of_derivatives_and_words():
    g = np.zeros((2, 4, 3, 2))
    with pytest.raises(ValueError, match="g_out, g_lse: given"):
        oracle.gradients(X, X, X, g[..., :1])
    with pytest.raises(ValueError, match="g_out, g_lse: given"):
        oracle.gradients(X, X, X, g, g)
    with pytest.raises(ValueError, match=r"along\['q'\]: given \(2,\)"):
        oracle.directional(X, X, X, g, along={"q": np.zeros(2)})
    with pytest.raises(ValueError, match=r"along\['sink'\]: given \(\), needed None"):
        oracle.directional(X, X, X, g, along={"sink": 1.0})
    with pytest.raises(ValueError, match="unpack"):
        oracle.philox4x32((0, 0, 0), (0, 0))
    assert math.isnan(oracle.directional(with_nan(X, (0, 0, 0)), X, X, g, along={}))


def test_result_is_frozen():
    r = oracle.attention([[1.0]], [[1.0]], [[1.0]])
    with pytest.raises(AttributeError):
        r.out = None
