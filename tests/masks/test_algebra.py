"""Masks combined with &, | and ~: random expressions against the pair-by-pair combination of their rules."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attnspan import masks
from attnspan.masks import Dense, Everything, Nothing, Predicate, Strided
from attnspan.masks import spans as algebra
from attnspan.masks.bound import frame_of
from attnspan.masks.spans import Spans

from . import cases
from .cases import arrays
from .test_contract import check_form, covered, same

B, H = 2, 3


def quick(examples=40, **more):
    """Settings of a plain run: the same examples each time."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=checks, **{"derandomize": True, **more}
    )


sizes = st.tuples(st.integers(0, 6), st.integers(0, 6))
NUMPY = arrays("numpy")


def parameter(values):
    """A number for all, (B,) one per sequence, or (B|1, H|1) one per head."""
    heads = st.lists(values, min_size=H, max_size=H)
    return st.one_of(
        values,
        st.lists(values, min_size=B, max_size=B),
        st.lists(heads, min_size=1, max_size=1),
        st.lists(st.lists(values, min_size=1, max_size=1), min_size=B, max_size=B),
        st.lists(heads, min_size=B, max_size=B),
    )


def align(L, S):
    said = st.one_of(st.sampled_from(["top_left", "bottom_right"]), parameter(st.integers(-3, 9)))
    return st.one_of(st.none(), said) if L == S else said


def counts(total):
    """Lengths of one to four documents that fit, some of them empty."""
    cuts = st.lists(st.integers(0, total), min_size=4, max_size=4).map(sorted)
    return cuts.map(lambda c: [c[0], c[1] - c[0], c[2] - c[1], c[3] - c[2]])


def whole(total):
    """Lengths of four documents that fill all positions."""
    cuts = st.lists(st.integers(0, total), min_size=3, max_size=3).map(sorted)
    return cuts.map(lambda c: [c[0], c[1] - c[0], c[2] - c[1], total - c[2]])


def maybe_batch(one):
    return st.one_of(one, st.lists(one, min_size=B, max_size=B))


@st.composite
def inner(draw, depth=1):
    """A mask to be run inside each document: its alignment said, and without a length of its own."""
    kind = draw(
        st.sampled_from(
            ["causal", "window", "valid", "first", "strided", "not", "or", "and"][: 5 + 3 * depth]
        )
    )
    at = draw(st.one_of(st.sampled_from(["top_left", "bottom_right"]), st.integers(-2, 3)))
    if kind == "causal":
        return cases.causal(NUMPY, at)
    if kind == "window":
        return cases.window(NUMPY, draw(st.integers(0, 3)), draw(st.one_of(st.none(), st.integers(0, 2))), at)
    if kind == "valid":
        lens = draw(parameter(st.integers(0, 4)))
        if isinstance(lens, list) and isinstance(lens[0], list):  # two axes might mean queries
            lens = [[[n] for n in row] for row in lens]
        return cases.valid(NUMPY, lens, draw(st.sampled_from(["left", "right"])))
    if kind == "first":
        return cases.first(NUMPY, draw(parameter(st.integers(0, 3))))
    if kind == "strided":
        return cases.strided(NUMPY, step := draw(st.integers(1, 3)), draw(st.integers(0, step - 1)), at)
    if kind == "not":
        return cases.negated(draw(inner(0)))
    return {"or": cases.either, "and": cases.both}[kind](draw(inner(0)), draw(inner(0)))


@st.composite
def leaf(draw, L, S, intervals=False):
    kinds = [
        "causal",
        "window",
        "valid",
        "first",
        "prefix",
        "packed",
        "offsets",
        "everything",
        "nothing",
        "slice",
    ]
    if not intervals:
        kinds += ["strided", "ids", "key ids", "dense", "predicate", "each"]
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return cases.causal(NUMPY, draw(align(L, S)))
    if kind == "window":
        size = parameter(st.integers(0, 5))
        back, ahead = draw(st.one_of(st.none(), size)), draw(st.one_of(st.none(), size))
        return cases.window(NUMPY, back, ahead, draw(align(L, S)))
    if kind == "valid":
        queries = draw(st.one_of(st.none(), st.lists(st.integers(0, L), min_size=B, max_size=B)))
        if L not in (0, H) and draw(st.booleans()):
            lens = draw(st.lists(st.lists(st.integers(0, S), min_size=L, max_size=L), min_size=B, max_size=B))
            return cases.valid(NUMPY, lens, draw(st.sampled_from(["left", "right"])), queries, per_query=True)
        lens = draw(parameter(st.integers(0, S)))
        assume(L != H or not isinstance(lens, list) or not isinstance(lens[0], list) or len(lens[0]) != L)
        return cases.valid(NUMPY, lens, draw(st.sampled_from(["left", "right"])), queries)
    if kind == "first":
        return cases.first(NUMPY, draw(parameter(st.integers(0, 8))))
    if kind == "prefix":
        return cases.prefix(NUMPY, draw(parameter(st.integers(0, S))), draw(align(L, S)))
    if kind == "packed":
        keys = draw(st.none()) if L == S and draw(st.booleans()) else draw(maybe_batch(counts(S)))
        return cases.packed(NUMPY, draw(maybe_batch(counts(L))), keys)
    if kind == "offsets":
        return cases.packed(NUMPY, draw(maybe_batch(whole(L))), draw(maybe_batch(whole(S))), n=(L, S))
    if kind == "each":
        return cases.packed(NUMPY, draw(maybe_batch(counts(L))), draw(maybe_batch(counts(S))), draw(inner()))
    if kind == "slice":
        i, j, more = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
        bound = (L + i + more, S + j + more)
        return cases.sliced(draw(leaf(*bound, intervals=intervals)), bound, i, j, L, S)
    if kind == "strided":
        step = draw(parameter(st.integers(1, 4)))
        phase = draw(parameter(st.integers(0, 3 if isinstance(step, list) else step - 1)))
        return cases.strided(NUMPY, step, phase, draw(align(L, S)))
    if kind in ("ids", "key ids"):
        ids = st.integers(-1, 2)
        each = draw(st.one_of(st.none(), inner()))
        own = draw(maybe_batch(st.lists(ids, min_size=L, max_size=L)))
        keys = None
        if kind == "key ids" or L != S:
            keys = draw(maybe_batch(st.lists(ids, min_size=S, max_size=S)))
        return cases.documents(NUMPY, own, keys, each, draw(st.sampled_from([None, False])))
    if kind == "dense":
        shape = draw(
            st.sampled_from([(S,), (L, S), (1, S), (L, 1), (B, L, S), (B, 1, S), (1, H, L, S), (B, H, 1, 1)])
        )
        bits = draw(st.lists(st.booleans(), min_size=(n := int(np.prod(shape))), max_size=n))
        return cases.dense(NUMPY, np.array(bits, bool).reshape(shape))
    if kind == "predicate":
        return cases.predicate(draw(st.sampled_from([cases.rising, cases.distant])))
    return {"everything": cases.everything, "nothing": cases.nothing}[kind]()


@st.composite
def expression(draw, L, S, depth=3, intervals=False):
    kind = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaf(L, S, intervals=intervals))
    part = expression(L, S, depth - 1, intervals)
    if kind == "not":
        return cases.negated(draw(part))
    return {"and": cases.both, "or": cases.either}[kind](draw(part), draw(part))


def sized(intervals=False, count=1):
    """Draw (L, S) and expressions for them."""
    made = {"intervals": intervals}
    return sizes.flatmap(lambda n: st.tuples(st.just(n), *(expression(*n, **made) for _ in range(count))))


def table(case, L, S):
    """The rule written out, over all of B and H."""
    return np.broadcast_to(case.table(L, S), (B, H, L, S))


def wide(array):
    return np.broadcast_to(array, (B, H, *array.shape[2:]))


@quick(120)
@given(sized())
def test_expressions_show_what_their_rules_combine_to(drawn):
    check_expression(*drawn)


@pytest.mark.sweep
@quick(4000, derandomize=False)
@given(sized())
def test_expressions_of_all_kinds(drawn):
    check_expression(*drawn)


def check_expression(size, case):
    L, S = size
    mask, wanted = case.mask, table(case, L, S)
    bound = mask.bound(L, S)
    same(wide(mask.dense(L, S)), wanted)
    check_form(bound.spans, L, S, np.empty((case.B, case.H)))
    spanned = covered(bound.spans, L, S, wanted.shape)
    same(spanned if bound.bits is None else spanned & wide(bound.bits.dense(S)), wanted)
    assert (bound.bits is None) == (not mask.why_bits())
    same(wide(mask.empty_rows(L, S)[..., None])[..., 0], ~wanted.any(axis=-1))
    for q, k in [(q, k) for q in range(L) for k in range(S)][::5]:
        seen = np.asarray(mask.keep(q, k, L, S))
        same(
            np.broadcast_to(seen.reshape(seen.shape[:2] if seen.ndim == 4 else (1, 1)), (B, H)),
            wanted[:, :, q, k],
        )


@quick()
@given(sized(), st.tuples(*[st.integers(0, 6)] * 4))
def test_slices_are_slices_of_the_table(drawn, edges):
    (L, S), case = drawn
    queries, keys = slice(*sorted(edges[:2])), slice(*sorted(edges[2:]))
    wanted = table(case, L, S)[:, :, queries, keys]
    given_ = case.mask.slice(L, S, queries=queries, keys=keys).dense(*wanted.shape[2:])
    same(wide(given_), wanted)


@quick(30)
@given(sized(count=2))
def test_laws(drawn):
    (L, S), one, two = drawn
    a, b = one.mask, two.mask
    laws = [
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & b, b & a),
        (a | b, b | a),
        (a & a, a),
        (a | a, a),
        (a & (a | b), a),
        (a | (a & b), a),
        (a & Everything(), a),
        (a | Nothing(), a),
        (a & ~a, Nothing()),
        (a | ~a, Everything()),
    ]
    for left, right in laws:
        assert left.equals(right, L, S), f"{left} should be {right} over {(L, S)}"
    assert a.equals(b, L, S) == bool((table(one, L, S) == table(two, L, S)).all() or not L * S)


@quick()
@given(sized())
def test_spans_and_bits_say_the_same(drawn):
    (L, S), case = drawn
    written = Dense(np.array(case.table(L, S)))
    assert written.bound(L, S).bits is not None
    assert case.mask.equals(written, L, S)
    assert (case.mask & Strided(2, align=0)).equals(written & Strided(2, align=0), L, S)
    assert (~case.mask).equals(~written, L, S)
    assert case.mask.visible_pairs(L, S) * (B * H) == int(table(case, L, S).sum()) * int(
        np.prod(case.mask.pairs_per_head(L, S).shape)
    )


@quick()
@given(sized())
def test_repr_is_the_constructor_call(drawn):
    (L, S), case = drawn
    assume(L and S)  # a list says nothing of the other axes of an array without entries
    text = repr(case.mask)
    again = eval(text, {**vars(masks), "rising": cases.rising, "distant": cases.distant})
    assert repr(again) == text
    assert type(again) is type(case.mask)
    assert case.mask.equals(again, L, S)


@pytest.mark.parametrize(
    "text",
    [
        "Causal()",
        "Causal(align='bottom_right')",
        "SlidingWindow(back=2, ahead=None, align=3)",
        "ValidLens([1, 2], pad='left', query_lens=[0, 1])",
        "(SlidingWindow(back=255) | FirstKeys(4)) & Causal()",
        "Causal() & (Causal() & Causal())",
        "Causal() & Causal() & Causal()",
        "Causal() | (Causal() | Causal())",
        "Causal() & ~FirstKeys(1) | ~(Causal() & Nothing())",
        "~~Causal()",
        "Documents([0, 0, 1], key_ids=[1, 1, 0], each=Causal(align=0) & FirstKeys(1), contiguous=True)",
        "Documents.from_lengths([2, 1], key_lengths=[1, 2], each=~Causal(align=0))",
        "Documents.from_offsets([0, 2, 3], key_offsets=[0, 1, 3])",
        "Dense([[True, False]])",
        "Strided(2, phase=1)",
        "PrefixLM([[1], [2]])",
        "Predicate(rising, name='up')",
        "Sliced(Causal(), (4, 4), (0, 2), (1, 4))",
    ],
)
def test_repr_is_written_as_one_would(text):
    assert repr(eval(text, {**vars(masks), "rising": cases.rising})) == text


def test_repr_of_long_arrays_is_short():
    assert repr(masks.ValidLens(np.zeros(100, np.int64))) == "ValidLens(<int64[100]>)"
    assert len(repr(Predicate(lambda q, k: q > k))) < 120


# R, before trimming ------------------------------------------------------------------------------


def R(mask):
    """Count intervals as DESIGN.md does: 1, R(a) + R(b) - 1, R(a) + R(b), R(a) + 1."""
    if isinstance(mask, masks.And):
        return R(mask.left) + R(mask.right) - 1
    if isinstance(mask, masks.Or):
        return R(mask.left) + R(mask.right)
    if isinstance(mask, masks.Not):
        return R(mask.mask) + 1
    return R(mask.mask) if isinstance(mask, masks.Sliced) else 1


@quick()
@given(sized(intervals=True))
def test_R_follows_from_the_expression_alone(drawn):
    (L, S), case = drawn
    bound = case.mask.lower(frame_of(L, S, np, None))
    assert bound.bits is None
    assert R(case.mask) == bound.spans.R
    assert R(case.mask) >= case.mask.spans(L, S).R
    same(wide(covered(bound.spans, L, S, (case.B, case.H, L, S))), table(case, L, S))


@st.composite
def lists(draw, S):
    """Draw intervals in the bound form and the rows they stand for: (Spans, bool (3, S))."""
    rows = np.array(
        draw(st.lists(st.lists(st.booleans(), min_size=S, max_size=S), min_size=3, max_size=3)), bool
    )
    runs = []
    for row in rows.reshape(3, S):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row, [0]])))
        runs.append(list(zip(edges[::2], edges[1::2], strict=True)))
    width = max(1, *(len(r) for r in runs)) + draw(st.integers(0, 2))
    full = np.array([[*r, *[(S, S)] * (width - len(r))] for r in runs], np.int32).reshape(1, 1, 3, width, 2)
    return Spans(full[..., 0], full[..., 1]), rows.reshape(3, S)


@quick(80)
@given(st.integers(0, 9).flatmap(lambda S: st.tuples(st.just(S), lists(S), lists(S))))
def test_intersect_unite_complement(drawn):
    S, (a, x), (b, y) = drawn
    for given_, wanted, most in (
        (algebra.intersect(a, b, S), x & y, a.R + b.R - 1),
        (algebra.union(a, b, S), x | y, a.R + b.R),
        (algebra.complement(a, S), ~x, a.R + 1),
    ):
        assert most == given_.R
        short = algebra.trimmed(given_)
        check_form(short, 3, S, np.empty((1, 1)))
        for spans in (given_, short):
            np.testing.assert_array_equal(covered(spans, 3, S, (1, 1, 3, S))[0, 0], wanted)
            k = np.arange(S).reshape(1, 1, 1, S)
            np.testing.assert_array_equal(algebra.cover(spans, k)[0, 0], wanted)
    assert max(1, int((a.start < a.stop).sum(axis=-1).max())) == algebra.trimmed(a).R


def test_raw_intervals_are_brought_to_form():
    start = np.array([7, -3, 4, 2]).reshape(1, 1, 1, 4)
    stop = np.array([9, 1, 4, 3]).reshape(1, 1, 1, 4)
    spans = algebra.make_spans(start, stop, 8)
    assert spans.start.ravel().tolist() == [0, 2, 7, 8]
    assert spans.stop.ravel().tolist() == [1, 3, 8, 8]
    assert spans.start.dtype == spans.stop.dtype == np.int32


def test_boolean_arrays_stand_for_masks():
    array = np.array([[True, False, True]] * 3)
    for mask in (array & masks.Causal(), masks.Causal() & array, array.tolist() & masks.Causal()):
        assert mask.equals(Dense(array & np.tri(3, dtype=bool)), 3, 3)
    for mask in (array | masks.Causal(), masks.Causal() | array):
        assert mask.equals(Dense(array | np.tri(3, dtype=bool)), 3, 3)
    assert type((array & masks.Causal()).left) is Dense
    assert type((masks.Causal() | array).right) is Dense
