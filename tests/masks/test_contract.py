"""Every mask class against its definition: `keep`, and once more a rule in plain Python.

Classes are discovered: a new one needs its line in `attnspan.masks` and an entry in `examples.EXAMPLES`.
A plain run takes some examples for each of the 49 shapes, always others; `-m sweep` takes them all.
"""

from itertools import pairwise

import numpy as np
import pytest

from attnspan.errors import AttnspanError
from attnspan.masks import And, Causal, FirstKeys, Mask, Not, Or, SlidingWindow, Strided
from attnspan.masks.parameters import MaskSizes

from .cases import LIBRARIES, Case, arrays
from .examples import EXAMPLES, SHAPES, classes, examples

CLASSES = classes()


def same(given, wanted):
    """Equal in dtype bool, shape and values."""
    given = np.asarray(given)
    assert given.dtype == bool
    assert given.shape == wanted.shape
    assert (given == wanted).all(), f"\n{given.astype(int)}\n{wanted.astype(int)}"


def library_of(x):
    return type(x).__module__.split(".")[0].removesuffix("lib")


def cell(mask, q, k, L, S):
    """Ask `keep` of one pair of plain integers; bool (B|1, H|1)."""
    seen = np.asarray(mask.keep(q, k, L, S))
    assert seen.dtype == bool
    assert seen.size == 1 or (seen.ndim == 4 and seen.shape[2:] == (1, 1)), seen.shape
    return seen.reshape(seen.shape[:2] if seen.ndim == 4 else (1, 1))


def check_form(spans, L, S, seen):
    """Bound form: int32 (B|1, H|1, L|1, R), sorted, disjoint, not touching, unused [S, S), trimmed."""
    start, stop = np.asarray(spans.start), np.asarray(spans.stop)
    assert start.dtype == stop.dtype == np.int32
    assert start.ndim == 4 and start.shape == stop.shape
    for n, most in zip(start.shape, (*seen.shape[:2], L), strict=False):
        assert n in (1, most)
    deepest = 1
    for at in np.ndindex(*start.shape[:-1]):
        runs = [(int(i), int(j)) for i, j in zip(start[at], stop[at], strict=True)]
        used = [run for run in runs if run != (S, S)]
        assert runs == used + [(S, S)] * (len(runs) - len(used)), "unused places stand last"
        edges = [-1, *(x for run in used for x in run)]
        assert all(x < y for x, y in pairwise(edges)), "sorted, disjoint, not touching"
        assert edges[-1] <= S
        deepest = max(deepest, len(used))
    assert start.shape[-1] == deepest, "trimmed"


def covered(spans, L, S, shape):
    """Write intervals out by plain loops."""
    start, stop = np.asarray(spans.start), np.asarray(spans.stop)
    out = np.zeros(shape, bool)
    for at in np.ndindex(*shape[:3]):
        row = tuple(i if n > 1 else 0 for i, n in zip(at, start.shape, strict=False))
        for i, j in zip(start[row], stop[row], strict=True):
            out[(*at, slice(i, j))] = True
    return out


def check(case, L, S, kind):
    """Hold one example to its rule, in every form the mask can be asked for."""
    mask, table = case.mask, case.table(L, S)
    for q, k in np.ndindex(L, S) if kind == "numpy" or L * S < 7 else [(L - 1, 0), (0, S - 1)]:
        same(np.broadcast_to(cell(mask, q, k, L, S), table.shape[:2]), table[:, :, q, k])
    bound = mask.bound(L, S)
    dense = mask.dense(L, S)
    same(dense, table)
    check_form(bound.spans, L, S, table)
    if any(True for _ in mask.arrays()):
        assert library_of(dense) == library_of(bound.spans.start) == kind
    spanned = covered(bound.spans, L, S, table.shape)
    if bound.bits is None:
        assert not mask.why_bits()
        same(spanned, table)
        same(covered(mask.spans(L, S), L, S, table.shape), table)
    else:
        assert mask.why_bits()
        words = np.asarray(bound.bits.words)
        assert words.dtype == np.uint8 and words.shape[-1] == -(-S // 8)
        same(spanned & table, table)
        with pytest.raises(AttnspanError, match="is kept as bits .*: ask bound\\(L, S\\)"):
            mask.spans(L, S)


def test_same_can_fail():
    for given, wanted in ((1.0, np.True_), (np.ones(2, bool), np.ones(3, bool)), (np.True_, np.False_)):
        with pytest.raises(AssertionError):
            same(given, wanted)


def test_every_exported_class_has_examples():
    assert set(EXAMPLES) == set(CLASSES)
    assert len(CLASSES) >= 16
    for name in CLASSES:
        found = [type(c.mask).__name__ for c in examples(name, 4, 4, arrays("numpy"))]
        assert name in found


def test_a_class_with_a_wrong_form_is_caught():
    class Wrong(Causal):
        def rows(self, q, L, S):
            return 0, q

    with pytest.raises(AssertionError):
        check(Case(Wrong(), lambda b, h, q, k, L, S: k <= q), 3, 3, "numpy")
    with pytest.raises(AssertionError):
        check(Case(Causal(), lambda b, h, q, k, L, S: k < q), 3, 3, "numpy")


@pytest.mark.parametrize("name", CLASSES)
def test_definition_numpy(name):
    arr = arrays("numpy")
    for L, S in SHAPES:
        for case in examples(name, L, S, arr, most=2):
            check(case, L, S, "numpy")


@pytest.mark.parametrize("name", CLASSES)
def test_definition_torch(name):
    pytest.importorskip("torch")
    for n, (L, S) in enumerate(SHAPES[CLASSES.index(name) % 2 :: 2]):
        for case in examples(name, L, S, arrays("torch", ("int32", "int64")[n % 2]), most=1):
            check(case, L, S, "torch")


def test_definition_jax():
    pytest.importorskip("jax")
    for case in examples("ValidLens", 3, 4, arrays("jax"), most=1):
        check(case, 3, 4, "jax")


def test_definition_jax_of_every_class():
    jax = pytest.importorskip("jax")
    plain = [
        name for name in CLASSES if name not in ("And", "Or", "Not", "Sliced")
    ]  # these are made of the rest
    asked = [(c, 3, 4) for name in plain for c in examples(name, 3, 4, arrays("jax"), most=1)]
    for name, L, S in (("Strided", 0, 2), ("Strided", 2, 0), ("Documents", 4, 4), ("Packed", 4, 4)):
        asked.append((examples(name, L, S, arrays("jax"))[-1], L, S))
    written = jax.jit(lambda: [c.mask.dense(L, S) for c, L, S in asked])()  # one compilation, not hundreds
    for (case, L, S), given in zip(asked, written, strict=True):
        same(given, case.table(L, S))


@pytest.mark.sweep
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", CLASSES)
def test_definition_everywhere(name, library):
    pytest.importorskip(library)
    slow = library == "jax"  # where every operation on every shape is compiled
    for L, S in SHAPES if not slow else [(0, 3), (3, 0), (4, 4), (3, 5)]:
        for case in examples(name, L, S, arrays(library), most=4 if slow else None):
            check(case, L, S, library)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint64"])
@pytest.mark.parametrize("name", ["ValidLens", "FirstKeys", "Packed", "SlidingWindow", "PrefixLM"])
def test_narrow_and_unsigned_arrays(name, dtype):
    for L, S in ((3, 5), (5, 5), (6, 2)):
        for case in examples(name, L, S, lambda x: _nonnegative(x, dtype), most=12):
            table = case.table(L, S)
            same(case.mask.dense(L, S), table)
            q, k = np.arange(L).reshape(L, 1), np.arange(S).reshape(1, S)
            same(np.broadcast_to(case.mask.keep(q, k, L, S), table.shape), table)


def _nonnegative(x, dtype):
    if not isinstance(x, list):
        return x
    a = np.array(x)
    return a.astype(dtype if a.dtype != bool and (a >= 0).all() else a.dtype)


@pytest.mark.parametrize("name", CLASSES)
def test_keep_takes_arrays_of_positions(name):
    for L, S in ((0, 3), (3, 0), (1, 1), (4, 4), (3, 5), (5, 3)):
        for case in examples(name, L, S, arrays("numpy"), most=5):
            table = case.table(L, S)
            q, k = np.arange(L).reshape(L, 1), np.arange(S).reshape(1, S)
            for lead in ((), (1, 1)):
                grid = (q.reshape(*lead, L, 1), k.reshape(*lead, 1, S))
                same(np.broadcast_to(case.mask.keep(*grid, L, S), table.shape), table)


@pytest.mark.parametrize("name", CLASSES)
def test_visible_writes_out_the_definition_for_some_queries(name):
    for L, S in ((4, 4), (3, 5), (1, 2)):
        for case in examples(name, L, S, arrays("numpy"), most=5):
            table, sizes = case.table(L, S), MaskSizes(L, S)
            for rows in (None, slice(1, 3), np.array([L - 1, 0, 0])):
                given = case.mask.visible(L, S, like=np.zeros(1), sizes=sizes, queries=rows)
                wanted = table if rows is None else table[:, :, rows]
                assert all(n in (1, m) for n, m in zip(given.shape, wanted.shape, strict=True))
                same(np.broadcast_to(given, wanted.shape), wanted)


def test_sizes_one_stay_one():
    for mask, shape in ((FirstKeys(2), (1, 1, 1, 1)), (FirstKeys([[1, 2]]), (1, 2, 1, 1))):
        assert mask.bound(5, 6).spans.start.shape == shape
    assert (Strided(2) & FirstKeys(2)).bound(5, 5).bits.words.shape == (1, 1, 5, 1)


def test_and_keeps_both_parts():
    bound = (SlidingWindow(back=1) & Strided(2)).bound(9, 9)
    alone = SlidingWindow(back=1).bound(9, 9)
    assert bound.bits is not None
    np.testing.assert_array_equal(bound.spans.start, alone.spans.start)
    np.testing.assert_array_equal(bound.spans.stop, alone.spans.stop)
    np.testing.assert_array_equal(bound.bits.words, Strided(2).bound(9, 9).bits.words)


def test_a_mask_of_ones_own_is_one_class():
    from dataclasses import dataclass

    @dataclass(frozen=True, eq=False, repr=False)
    class EvenKeys(Mask):
        """Every second key."""

        def keep(self, q, k, L=None, S=None):
            return (k % 2 == 0) & (q == q)

    check(Case(EvenKeys(), lambda b, h, q, k, L, S: k % 2 == 0), 3, 5, "numpy")
    case = Case(EvenKeys() & ~Causal(align=0), lambda b, h, q, k, L, S: k % 2 == 0 and k > q)
    check(case, 3, 5, "numpy")
    assert repr(EvenKeys() | Causal()) == "EvenKeys() | Causal()"


def test_operators_make_the_three_classes():
    a, b = Causal(), FirstKeys(1)
    assert (type(a & b), type(a | b), type(~a)) == (And, Or, Not)
