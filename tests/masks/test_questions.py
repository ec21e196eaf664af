"""The questions a mask answers, against plain loops over the definition; and fixture F, by hand."""

import tracemalloc
from functools import cache

import numpy as np
import pytest

from attnspan.errors import AttnspanError
from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    FirstKeys,
    Nothing,
    PrefixLM,
    Sliced,
    SlidingWindow,
    Strided,
    ValidLens,
    exact,
)

from .cases import LIBRARIES, arrays
from .examples import classes, examples

CLASSES = classes()


@cache
def asked(library="numpy"):
    """List (mask, table, L, S): examples of every class, fewer where arrays are slow to make."""
    few = {"numpy": [(L, S) for L in (0, 1, 3, 4) for S in (0, 1, 4, 5)], "torch": [(0, 2), (4, 4), (3, 5)]}
    names = CLASSES if library != "jax" else ["Causal", "Dense", "Documents", "Strided", "ValidLens"]
    return [
        (case.mask, case.table(L, S), L, S)
        for L, S in few.get(library, [(4, 4)])
        for name in names
        for case in examples(name, L, S, arrays(library), most=1 if library != "jax" else 3)
    ]


# Fixture F: what the public reports expect, as matrices written by hand ------------------------

BOTTOM, TOP = {"align": "bottom_right"}, {"align": "top_left"}
SINK = (SlidingWindow(back=1) | FirstKeys(1)) & Causal()
F = [
    ("none", Everything(), "#### #### #### ####", [432.1] * 4),
    ("B08: valid_len 0", ValidLens(0), ".... .... .... ....", [0] * 4),
    ("valid_len 1", ValidLens(1), "#... #... #... #...", [1] * 4),
    ("B39, B59: valid_len 2", ValidLens(2), "##.. ##.. ##.. ##..", [7] * 4),
    ("valid_len 3", ValidLens(3), "###. ###. ###. ###.", [53.5] * 4),
    ("B59: queries too", ValidLens(2, query_lens=2), "##.. ##.. .... ....", [7, 7, 0, 0]),
    ("B16: read upside-down", ~ValidLens(2), "..## ..## ..## ..##", [614.2857] * 4),
    ("B17: causal", Causal(), "#... ##.. ###. ####", [1, 7, 53.5, 432.1]),
    ("B17: upside-down", ~Causal(), ".### ..## ...# ....", [480, 614.2857, 1000, 0]),
    ("B31: causal, valid_len 3", Causal() & ValidLens(3), "#... ##.. ###. ###.", [1, 7, 53.5, 53.5]),
    ("B45: left pad 1", Causal() & ValidLens(3, pad="left"), ".... .#.. .##. .###", [0, 10, 64, 480]),
    ("B40: window of 2", SlidingWindow(back=1), "#... ##.. .##. ..##", [1, 7, 64, 614.2857]),
    ("B40: last 2", SlidingWindow.last(2), "#... ##.. .##. ..##", [1, 7, 64, 614.2857]),
    ("B40: window of 3", SlidingWindow(back=2), "#... ##.. ###. .###", [1, 7, 53.5, 480]),
    ("B37: self only", SlidingWindow.last(1), "#... .#.. ..#. ...#", [1, 10, 100, 1000]),
    ("B37: 4 is all", SlidingWindow.last(4), "#... ##.. ###. ####", [1, 7, 53.5, 432.1]),
    ("B37: 100 is all", SlidingWindow.last(100), "#... ##.. ###. ####", [1, 7, 53.5, 432.1]),
    ("B37: no limit", SlidingWindow(back=None), "#... ##.. ###. ####", [1, 7, 53.5, 432.1]),
    ("B35: hide | hide", ~(~Causal() | ~SlidingWindow(back=1)), "#... ##.. .##. ..##", [1, 7, 64, 614.2857]),
    (
        "B10: window 2, left pad 2",
        SlidingWindow(back=1) & ValidLens(2, pad="left"),
        ".... .... ..#. ..##",
        [0, 0, 100, 614.2857],
    ),
    (
        "B10: window 2, valid_len 2",
        SlidingWindow(back=1) & ValidLens(2),
        "#... ##.. .#.. ....",
        [1, 7, 10, 0],
    ),
    ("B41: radius 1", SlidingWindow(back=1, ahead=1), "##.. ###. .### ..##", [7, 53.5, 480, 614.2857]),
    (
        "B52: documents, causal",
        Documents([0, 0, 1, 1]) & Causal(),
        "#... ##.. ..#. ..##",
        [1, 7, 100, 614.2857],
    ),
    ("B55: documents", Documents.from_lengths([2, 2]), "##.. ##.. ..## ..##", [7, 7, 614.2857, 614.2857]),
    ("B56: offsets", Documents.from_offsets([0, 2, 4]), "##.. ##.. ..## ..##", [7, 7, 614.2857, 614.2857]),
    ("B56: returning", Documents([0, 1, 0, 1]) & Causal(), "#... .#.. #.#. .#.#", [1, 10, 75.25, 670]),
    ("B53: padding", Documents([0, 0, 1, -1]), "##.. ##.. ..#. ....", [7, 7, 100, 0]),
    ("B43: prefix 0", PrefixLM(0), "#... ##.. ###. ####", [1, 7, 53.5, 432.1]),
    ("B43: prefix 1", PrefixLM(1), "#... ##.. ###. ####", [1, 7, 53.5, 432.1]),
    ("B43: prefix 2", PrefixLM(2), "##.. ##.. ###. ####", [7, 7, 53.5, 432.1]),
    ("B43: prefix 4", PrefixLM(4), "#### #### #### ####", [432.1] * 4),
    ("prefix 2, valid_len 3", PrefixLM(2) & ValidLens(3), "##.. ##.. ###. ###.", [7, 7, 53.5, 53.5]),
    ("sink + causal window 2", SINK, "#... ##.. ###. #.##", [1, 7, 53.5, 537.625]),
    ("B23: decode", Causal(**BOTTOM), "####", [432.1]),
    ("B23: decode, top-left", Causal(**TOP), "#...", [1]),
    ("B23: two queries", Causal(**BOTTOM), "###. ####", [53.5, 432.1]),
    ("B23: two queries, top-left", Causal(**TOP), "#... ##..", [1, 7]),
    ("B25: three queries", Causal(**BOTTOM), "##.. ###. ####", [7, 53.5, 432.1]),
    ("B24: more queries", Causal(**BOTTOM), ".. .. #. ##", [0, 0, 1, 7]),
    ("B24: more queries, top-left", Causal(**TOP), "#. ## ## ##", [1, 7, 7, 7]),
    ("B36: cross attention", Everything(), "#### ####", [432.1] * 2),
    (
        "B01: row 3 hidden",
        Causal() & ~Dense([[False]] * 3 + [[True]]),
        "#... ##.. ###. ....",
        [1, 7, 53.5, 0],
    ),
]


@pytest.mark.parametrize(("mask", "drawn", "outputs"), [f[1:] for f in F], ids=[f[0] for f in F])
def test_fixture_f(mask, drawn, outputs):
    rows = drawn.split()
    L, S = len(rows), len(rows[0])
    wanted = np.array([[c == "#" for c in row] for row in rows])
    np.testing.assert_array_equal(mask.dense(L, S)[0, 0], wanted)
    assert mask.picture(L, S) == "\n".join(rows).replace("#", "█").replace(".", "·")
    weights = wanted * np.arange(1.0, S + 1)  # keys are ln 1, ln 2, ...: softmax weighs them 1, 2, ...
    mixed = (weights @ 10.0 ** np.arange(S)) / np.maximum(weights.sum(axis=1), 1)
    np.testing.assert_allclose(mixed, outputs, rtol=1e-6, equal_nan=False)


def test_b19_b57_lengths_are_of_sequences():
    table = ValidLens([1, 3]).dense(4, 4)
    assert table.shape == (2, 1, 4, 4)
    assert table[:, 0].sum(axis=-1).tolist() == [[1] * 4, [3] * 4]
    heads = ValidLens([[1, 3]]).dense(4, 4)
    assert heads.shape == (1, 2, 4, 4)
    assert heads[0].sum(axis=-1).tolist() == [[1] * 4, [3] * 4]


def test_b27_more_queries_than_keys_in_each_document():
    mask = Documents.from_lengths([3, 2, 4], [1, 1, 1], each=Causal(align="bottom_right"))
    assert mask.empty_rows(9, 3)[0, 0].tolist() == [True, True, False, True, False, True, True, True, False]


def test_b52_ids_are_not_validity():
    assert not Documents([1, 1, 2, 2]).equals(ValidLens(4), 4, 4)
    assert Documents([1, 1, 2, 2]).equals(Documents.from_lengths([2, 2]), 4, 4)


def test_b55_the_order_of_documents_is_free():
    order = [4, 5, 0, 1, 2, 3]
    plain = Documents.from_lengths([4, 2], each=Causal()).dense(6, 6)[0, 0]
    moved = Documents.from_lengths([2, 4], each=Causal()).dense(6, 6)[0, 0]
    np.testing.assert_array_equal(moved, plain[np.ix_(order, order)])


@pytest.mark.parametrize(
    "shape", [(b, h, q, k) for b in (1, 2) for h in (1, 3) for q in (1, 4) for k in (1, 4)]
)
def test_b61_every_axis_may_be_one(shape):
    whole = np.arange(4)[None, None, None, :] < np.array([1, 3])[:, None, None, None]
    array = np.broadcast_to(whole, (2, 3, 4, 4))[: shape[0], : shape[1], : shape[2], : shape[3]]
    table = Dense(array).dense(4, 4)
    np.testing.assert_array_equal(table, np.broadcast_to(array, (*shape[:2], 4, 4)))


# Questions ----------------------------------------------------------------------------------------


def test_empty_rows():
    for mask, table, L, S in asked():
        given = mask.empty_rows(L, S)
        np.testing.assert_array_equal(given, ~table.any(axis=-1), strict=True)


@pytest.mark.parametrize("library", LIBRARIES)
def test_visible_pairs(library):
    pytest.importorskip(library)
    for mask, table, L, S in asked(library):
        wanted = int(table.sum())
        pairs = mask.pairs_per_head(L, S)
        assert all(n in (1, m) for n, m in zip(pairs.shape, table.shape, strict=False))
        np.testing.assert_array_equal(np.broadcast_to(pairs, table.shape[:2]), table.sum(axis=(2, 3)))
        if pairs.shape == table.shape[:2]:
            given = mask.visible_pairs(L, S)
            assert type(given) is int and given == wanted


def wrong_row(table):
    """Find the first (batch, head, query) that sees anything but a prefix."""
    for at in np.ndindex(*table.shape[:3]):
        n = int(table[at].sum())
        if not table[at][:n].all():
            return *at, n
    return None


@pytest.mark.parametrize("library", LIBRARIES)
def test_as_valid_lens(library):
    pytest.importorskip(library)
    answered = refused = 0
    for mask, table, L, S in asked(library):
        wrong = wrong_row(table)
        if wrong is None:
            given = mask.as_valid_lens(L, S)
            assert given.dtype == np.int32
            np.testing.assert_array_equal(np.broadcast_to(given, table.shape[:3]), table.sum(axis=-1))
            answered += 1
        else:
            b, h, q, n = wrong
            text = rf"not expressible as valid lengths: query {q} \(batch {b}, head {h}\) sees {n} keys, "
            with pytest.raises(AttnspanError, match=text):
                mask.as_valid_lens(L, S)
            refused += 1
    assert answered > 4
    assert refused > 4


def drawn(table, L, S, width=64):
    """Draw a table by plain loops."""
    down, across = max(1, -(-L // width)), max(1, -(-S // width))
    lines = []
    if (down, across) != (1, 1):
        lines = [f"one cell is {down} queries x {across} keys: █ all visible, ▒ some, · none"]
    B, H = table.shape[:2]
    for b, h in np.ndindex(B, H):
        if B * H > 1:
            lines.append(f"batch {b}, head {h}:" if H > 1 else f"batch {b}:")
        for i in range(0, L, down):
            row = ""
            for j in range(0, S, across):
                part = table[b, h, i : i + down, j : j + across]
                row += "█" if part.all() else "▒" if part.any() else "·"
            lines.append(row)
    return "\n".join(lines)


def test_picture():
    for mask, table, L, S in asked():
        if L:  # without queries a picture has no lines, so it names no heads either
            assert mask.picture(L, S) == drawn(table, L, S)
        else:
            assert "█" not in mask.picture(L, S)


def test_b94_picture_of_a_long_mask_says_what_a_cell_is():
    shapes = [(130, 200, 64), (65, 64, 64), (9, 7, 4), (64, 64, 64), (3, 200, 10)]
    for L, S, width in shapes:
        for mask in (
            Causal(align=0),
            SlidingWindow(back=9, align=0) & ValidLens([S // 3, S]),
            ValidLens([[S // 2], [S]]),  # all queries alike
            Strided(2, align=0),
            Dense(np.arange(S) % 64 < 50),  # bits, all queries alike
            FirstKeys(S // 2) & ~SlidingWindow(back=3, align=0),
        ):
            table = np.asarray(mask.dense(L, S))
            assert mask.picture(L, S, width=width) == drawn(table, L, S, width)


@pytest.mark.parametrize("library", LIBRARIES)
def test_equals(library):
    pytest.importorskip(library)
    rng = np.random.default_rng(0)
    for mask, table, L, S in asked(library):
        assert mask.equals(Dense(table), L, S)
        assert mask.equals(table, L, S)
        if table.size:
            other = table.copy()
            other[tuple(rng.integers(n) for n in table.shape)] ^= True
            assert not mask.equals(Dense(other), L, S)
            assert not Dense(other).equals(mask, L, S)


def test_equals_compares_meaning_and_eq_structure():
    assert Causal().equals(SlidingWindow(back=None, ahead=0), 5, 5)
    assert Causal() != SlidingWindow(back=None, ahead=0)
    assert not ValidLens([1, 2]).equals(ValidLens([1, 2, 2]), 3, 3)
    assert ValidLens([2, 2]).equals(ValidLens(2), 3, 3)
    assert not (Strided(2) & ValidLens([1, 2])).equals(Strided(2) & ValidLens([1, 2, 2]), 3, 3)


def test_slice():
    parts = [slice(None), slice(1, 3), slice(-2, None), slice(2, 2), slice(3, 1), slice(0, 99)]
    for mask, table, L, S in asked()[::2]:
        for queries, keys in zip(parts, [*parts[2:], *parts[:2]], strict=True):
            wanted = table[:, :, queries, keys]
            part = mask.slice(L, S, queries=queries, keys=keys)
            assert type(part) is Sliced
            np.testing.assert_array_equal(part.dense(*wanted.shape[2:]), wanted, strict=True)
            again = part.slice(*wanted.shape[2:], queries=slice(1, None), keys=slice(None, -1))
            wanted = wanted[:, :, 1:, :-1]
            np.testing.assert_array_equal(again.dense(*wanted.shape[2:]), wanted, strict=True)


def test_lengths_may_be_integers_of_numpy():
    n = np.int64(4)
    lens = ValidLens([[0, 1, 2, 3]])  # one per query, because there are 4
    np.testing.assert_array_equal(lens.dense(n, n)[0, 0].sum(axis=-1), [0, 1, 2, 3])
    assert Causal().visible_pairs(n, 4) == Causal().visible_pairs(4, n) == 10
    assert Causal().slice(n, n) == Causal().slice(4, 4)
    assert repr(Causal().slice(n, n)) == "Sliced(Causal(), (4, 4), (0, 4), (0, 4))"


def test_no_sequences():
    none, ids = np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
    for mask in (
        ValidLens(none),
        Strided(none),
        Documents(ids, each=Causal()),
        Documents(ids, contiguous=False),
        Documents.from_lengths(np.zeros((0, 2), np.int64), each=Causal()),
        Causal() & ~Dense(np.zeros((0, 1, 3, 3), bool)),
    ):
        assert mask.dense(3, 3).shape == (0, 1, 3, 3)
        assert mask.empty_rows(3, 3).shape == (0, 1, 3)
        assert mask.visible_pairs(3, 3) == 0
        assert mask.as_valid_lens(3, 3).shape == (0, 1, 3)
        assert mask.picture(3, 3) == ""


def test_with_align_fills_what_was_left_unsaid():
    inner = Documents.from_lengths([1, 1], each=Causal())
    mask = (Causal() & ~SlidingWindow(back=1, align=3)) | PrefixLM(1) | Strided(2) | inner
    said = mask.with_align("bottom_right")
    a = {"align": "bottom_right"}
    wanted = (Causal(**a) & ~SlidingWindow(back=1, align=3)) | PrefixLM(1, **a) | Strided(2, **a) | inner
    assert said == wanted
    assert Causal().with_align(2).equals(Causal(align=2), 3, 5)


# Sizes ----------------------------------------------------------------------------------------------


def peak(ask):
    """Measure the most bytes NumPy and Python held while asking."""
    tracemalloc.start()
    try:
        answer = ask()
        return answer, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_million_positions_take_tens_of_megabytes():
    n = 1_000_000
    ids = np.arange(n) // 1000
    packed = Documents.from_lengths([1000] * 1000)
    for documents in (Documents(ids), packed):
        mask = Causal() & SlidingWindow(back=255) & documents
        bound, most = peak(lambda mask=mask: mask.bound(n, n))
        assert bound.bits is None and bound.spans.R == 1
        assert most < 100e6
        pairs, most = peak(lambda mask=mask: mask.visible_pairs(n, n))
        assert pairs == 1000 * (1000 * 256 - 255 * 256 // 2)
        assert most < 100e6
        assert not mask.empty_rows(n, n).any()


def test_b82_a_window_of_65536_takes_two_megabytes():
    spans = SlidingWindow(back=127).spans(65536, 65536)
    assert spans.start.nbytes + spans.stop.nbytes < 2e6
    assert spans.start.shape == (1, 1, 65536, 1)
    assert peak(lambda: SlidingWindow(back=127).spans(65536, 65536))[1] < 8e6


def test_questions_of_a_hundred_thousand_positions():
    n = 100_000
    assert Causal().visible_pairs(n, n) == n * (n + 1) // 2
    assert (~Causal()).visible_pairs(n, n) == n * (n - 1) // 2
    assert Nothing().visible_pairs(n, n) == 0
    same = SlidingWindow(back=None, ahead=0)
    (answer, other), most = peak(
        lambda: (Causal().equals(same, n, n), Causal().equals(Causal(align=1), n, n))
    )
    assert (answer, other) == (True, False)
    lens, held = peak(lambda: Causal().as_valid_lens(n, n))
    np.testing.assert_array_equal(lens[0, 0], np.arange(1, n + 1))
    assert max(most, held) < 20e6
    text, held = peak(lambda: (Causal() & SlidingWindow(back=9999)).picture(n, n, width=8))
    assert held < 20e6
    assert text.splitlines()[:2] == [
        "one cell is 12500 queries x 12500 keys: █ all visible, ▒ some, · none",
        "▒·······",
    ]


def test_bits_are_walked_in_blocks(monkeypatch):
    n = 4000
    bound = (Strided(2) & Causal()).bound(n, n)
    monkeypatch.setattr(exact, "_BLOCK", 2**20)  # n x n booleans are 16 MB
    pairs, most = peak(lambda: int(exact.pairs(bound, n, n).sum()))
    assert pairs == sum(q // 2 + 1 for q in range(n))
    assert most < 8e6
    assert peak(lambda: exact.equal(bound, bound, n, n))[1] < 8e6
    text, most = peak(lambda: exact.picture(bound, n, n, 4))
    assert text.splitlines()[1:] == ["▒···", "▒▒··", "▒▒▒·", "▒▒▒▒"]
    assert most < 8e6
