"""Bits: eight keys a byte, the state of each tile, and packing block by block."""

import numpy as np
import pytest

from attnspan.arrays import pack_bits, unpack_bits
from attnspan.masks import Causal, Dense, Documents, FirstKeys, Nothing, Predicate, Strided, bits
from attnspan.masks.bits import EMPTY, FULL, PARTIAL, TILE, Bits, pack, tile_states

from .cases import LIBRARIES, arrays
from .test_contract import same

SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (7, 9), (8, 8), (23, 63), (24, 64), (25, 65), (49, 130)]


def random(shape, share=0.5):
    return np.random.default_rng(shape).random(shape) < share


@pytest.mark.parametrize("library", LIBRARIES)
def test_packing_and_unpacking(library):
    pytest.importorskip(library)
    arr = arrays(library)
    for S in (0, 1, 7, 8, 9, 24, 63, 65) if library != "jax" else (9,):
        x = random((2, 1, 3, S))
        words = pack_bits(arr(x))
        held = np.asarray(words)
        assert held.dtype == np.uint8 and held.shape == (2, 1, 3, -(-S // 8))
        for *at, byte in np.ndindex(*held.shape):
            wanted = sum(1 << n for n in range(8) if 8 * byte + n < S and x[(*at, 8 * byte + n)])
            assert held[(*at, byte)] == wanted
        same(unpack_bits(words, S), x)
        rows = Bits(words).dense(S, queries=slice(1, 3))
        same(rows, x[:, :, 1:3])


def states(x):
    """Tell the state of each tile by plain loops."""
    B, H, L, S = x.shape
    out = np.zeros((B, H, -(-L // TILE[0]), -(-S // TILE[1])), np.int8)
    for b, h, i, j in np.ndindex(*out.shape):
        part = x[b, h, i * TILE[0] : (i + 1) * TILE[0], j * TILE[1] : (j + 1) * TILE[1]]
        out[b, h, i, j] = FULL if part.all() else PARTIAL if part.any() else EMPTY
    return out


@pytest.mark.parametrize("library", LIBRARIES)
def test_tile_states(library):
    pytest.importorskip(library)
    arr = arrays(library)
    for L, S in SIZES if library != "jax" else [(25, 65)]:
        for share in (0.0, 0.001, 0.999, 1.0) if library != "jax" else (0.999,):
            x = random((2, 2, L, S), share)
            given = np.asarray(tile_states(Bits(pack_bits(arr(x))), L, S))
            assert given.dtype == np.int8
            np.testing.assert_array_equal(given, states(x), strict=True)


def test_tile_states_tell_all_three():
    x = np.zeros((1, 1, 50, 130), bool)
    x[..., :24, :64] = True
    x[..., 49, 129] = True  # the last tile is 2 x 2 pairs
    assert tile_states(Dense(x).bound(50, 130).bits, 50, 130).tolist() == [
        [[[FULL, EMPTY, EMPTY], [EMPTY, EMPTY, EMPTY], [EMPTY, EMPTY, PARTIAL]]]
    ]
    x[..., 48:, 128:] = True
    assert tile_states(Dense(x).bound(50, 130).bits, 50, 130)[0, 0, 2, 2] == FULL


def test_tile_states_of_negated_bits_do_not_count_what_lies_beyond():
    for L, S in SIZES[3:]:
        for mask in (
            ~Dense(random((L, S))),
            ~Dense(np.ones((L, S), bool)),
            ~(Strided(2, align=0) & Nothing()),
        ):
            bound = mask.bound(L, S)
            table = np.broadcast_to(np.asarray(bound.bits.dense(S)), (1, 1, L, S))
            np.testing.assert_array_equal(tile_states(bound.bits, L, S), states(table), strict=True)


@pytest.mark.parametrize(
    "shape", [(1, 1, 9, 11), (2, 1, 9, 11), (1, 3, 9, 11), (2, 3, 1, 11), (2, 3, 9, 1), (1, 1, 1, 1)]
)
def test_axes_of_size_one_stay_one(shape):
    x = random(shape)
    words = Dense(x).bound(9, 11).bits.words
    assert words.shape == (*shape[:3], 2)  # keys are packed, so their axis is written out
    same(Dense(x).dense(9, 11), np.broadcast_to(x, (*shape[:2], 9, 11)))
    assert (~Dense(x)).bound(9, 11).bits.words.shape == (*shape[:3], 2)
    assert (Dense(x) & Dense(x)).bound(9, 11).bits.words.shape == (*shape[:3], 2)
    assert (Dense(x) | FirstKeys(2)).bound(9, 11).bits.words.shape == (*shape[:3], 2)


def by_keys(q, k):
    return k % 3 == 0


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("block", [1, 11, 22, 34, 99, 10**6])
def test_packing_block_by_block_is_packing_at_once(monkeypatch, block, library):
    pytest.importorskip(library)
    L, S = 9, 11
    arr = arrays(library)
    masks = [
        Strided(arr([2, 3])),
        Dense(arr(random((2, 3, L, 1)))),
        Dense(arr(random((2, 1, 1, S)))),
        Documents(arr([0, 1] * 4 + [0]), arr([1, 0] * 5 + [1])),
        Predicate(lambda q, k: (q * k) % 3 == 1),
        Dense(arr(random((L, S)))) | Causal(align=1),
        ~(Strided(arr([[2, 3]])) & Causal()),
        Documents.from_lengths(arr([4, 3]), arr([5, 6]), each=Strided(2, align=0)),
        Dense(arr(random((2, 3, L, S)))) | Dense(arr(random((1, 1, 1, S)))),
    ]
    masks = [m.with_align(0) for m in masks]
    whole = [np.asarray(m.bound(L, S).bits.words) for m in masks]
    monkeypatch.setattr(bits, "_BLOCK", block)
    for mask, words in zip(masks, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(mask.bound(L, S).bits.words), words, strict=True)


def test_blocks_bound_what_is_held_unpacked(monkeypatch):
    asked = []

    def rows(i, j):
        asked.append((i, j))
        return random((1, 1, 40, 50))[:, :, i:j]

    monkeypatch.setattr(bits, "_BLOCK", 50 * 16)
    packed = pack(rows, 40, 50)
    assert asked == [(0, 16), (16, 32), (32, 40)]
    same(packed.dense(50), random((1, 1, 40, 50)))


def test_and_of_bits_is_their_and():
    a, b = random((1, 1, 5, 13)), random((2, 1, 5, 13))
    same((Bits(pack_bits(a)) & Bits(pack_bits(b))).dense(13), a & b)
