"""Dropout: the counter's bits, the same in every framework, implementation and transform."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import oracle
from attnspan.arrays import namespace
from attnspan.dropout import keep_bits, row_words, seed_words
from attnspan.masks import Causal, ValidLens

from .asked import Asked
from .helpers import DTYPES, FRAMEWORKS, NAMES, TRACED, array, runs, same_bits, values

# Known answers of Philox4x32-10, published with Random123: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = (0, 1, -1, 12345, 2**32 - 1, 2**32, 2**32 + 7, -(2**40), 2**63, 2**64 - 1, 2**64 + 3)


def words(x: Any, framework: str) -> Any:
    """Bring 32-bit words to what the framework computes them in."""
    wide = {"numpy": "uint32", "torch": "int64", "jax": "uint32"}[framework]
    return array(np.asarray(x, np.int64).astype(wide), framework)


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_known_answers_of_the_oracle(counter: Any, key: Any, wanted: Any) -> None:
    assert oracle.philox4x32(counter, key) == wanted


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_known_answers(framework: str) -> None:
    """The library takes counters (i, n, 0, 0) alone: one published answer, the rest through the oracle."""
    with np.errstate(over="ignore"):
        r1, r2 = row_words(words([0], framework), words([0], framework), (0, 0))
        assert (int(values(r1)[0]), int(values(r2)[0])) == KNOWN[0][2][:2]
        rng = np.random.default_rng(0)
        i, n = rng.integers(0, 2**32, (2, 40))
        i[:3], n[:3] = (0, 2**32 - 1, 2**31), (2**32 - 1, 0, 2**31)
        for key in ((0, 0), (2**32 - 1, 2**32 - 1), (0xA4093822, 0x299F31D0)):
            r1, r2 = row_words(words(i, framework), words(n, framework), key)
            for at in range(40):
                wanted = oracle.philox4x32((i[at], n[at], 0, 0), key)
                assert (int(values(r1)[at]), int(values(r2)[at])) == wanted[:2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bits_are_the_oracles(framework: str) -> None:
    """Every seed modulo 2^64, every rate, n row-major over the leading axes."""
    queries = namespace(framework).arange(5)
    for seed in SEEDS:
        for p in (1e-9, 0.1, 0.5, 0.9, 1 - 2**-32) if seed == 1 else (0.3,):
            found = keep_bits(seed_words(seed, framework), queries, (2, 1, 3), 7, p)
            wanted = [oracle.keep_bits(seed, n, 5, 7, p) for n in range(6)]
            np.testing.assert_array_equal(values(found).reshape(6, 5, 7), wanted)


def kept(out: Any) -> np.ndarray:
    """Read the bits off an output of `reader`."""
    return values(out) != 0


def reader(
    framework: str, lead: tuple[int, ...], L: int = 4, S: int = 5, dtype: str = "float32"
) -> list[Any]:
    """Give q, k and v whose output is the weights themselves: all 1/S, or 0 where dropped."""
    arrays = np.zeros((*lead, L, 1)), np.zeros((*lead, S, 1)), np.broadcast_to(np.eye(S), (*lead, S, S))
    return [array(x, framework, dtype) for x in arrays]


def wanted_bits(seed: int, lead: tuple[int, ...], p: float, L: int = 4, S: int = 5) -> np.ndarray:
    bits = [oracle.keep_bits(seed, n, L, S, p) for n in range(math.prod(lead))]
    return np.array(bits).reshape(*lead, L, S)


@pytest.mark.parametrize(
    ("framework", "lead"),
    [
        pytest.param(*f.values, lead, marks=f.marks)
        for f in FRAMEWORKS
        for lead in ([(), (3,), (2, 3), (2, 2, 3)] if f.values != ("jax",) else [(2, 3)])
    ],
    ids=str,
)
def test_bits_of_every_rank(framework: str, lead: tuple[int, ...]) -> None:
    """n is b, b * H + h, and so on; whatever the mask and dtype."""
    for dtype in DTYPES[framework] if framework != "jax" else ("float32",):
        qkv = reader(framework, lead, dtype=dtype)
        for name in ("auto", *NAMES):
            if name == "auto" or runs(name, *qkv, dropout=0.4, rng=77):
                out = asp.attention(*qkv, dropout=0.4, rng=77, implementation=name)
                bits = wanted_bits(77, lead, 0.4)
                np.testing.assert_array_equal(kept(out), bits)
                np.testing.assert_allclose(values(out)[bits], 1 / 5 / 0.6, rtol=8e-3)
                out = asp.attention(*qkv, mask=Causal(0), dropout=0.4, rng=77, implementation=name)
                np.testing.assert_array_equal(kept(out), bits & np.tri(4, 5, dtype=bool))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_seeds_of_every_kind(framework: str) -> None:
    """Integers of any size and sign; 0-d arrays of NumPy and of the framework."""
    qkv = reader(framework, (3,))
    draw = lambda rng: kept(asp.attention(*qkv, dropout=0.5, rng=rng))  # noqa: E731
    for seed in SEEDS if framework != "jax" else SEEDS[-3:]:
        np.testing.assert_array_equal(draw(seed), wanted_bits(seed, (3,), 0.5))
    for seed in (5, -5, 2**31 - 1, -(2**31)):
        wanted = wanted_bits(seed, (3,), 0.5)
        for given in (np.int32(seed), np.array(seed, np.int64), array(np.int32(seed), framework)):
            np.testing.assert_array_equal(draw(given), wanted)
    np.testing.assert_array_equal(draw(np.uint64(2**64 - 1)), wanted_bits(-1, (3,), 0.5))
    np.testing.assert_array_equal(draw(np.array(2**40 + 9)), wanted_bits(2**40 + 9, (3,), 0.5))
    if framework == "torch":
        wide = array(np.int64(-(2**40)), framework)
        np.testing.assert_array_equal(draw(wide), wanted_bits(-(2**40), (3,), 0.5))


@pytest.mark.parametrize("framework", TRACED[1:])
def test_keys_and_traced_seeds_of_jax(framework: str) -> None:
    """A typed key, a raw key and a number that say the same draw the same, traced or not."""
    import jax

    qkv = reader(framework, (3,))
    draw = lambda rng: asp.attention(*qkv, dropout=0.5, rng=rng)  # noqa: E731
    traced = jax.jit(draw)
    wanted = wanted_bits(5, (3,), 0.5)
    for rng in (jax.random.key(5), jax.random.PRNGKey(5), jax.numpy.int32(5), jax.numpy.uint32(5)):
        np.testing.assert_array_equal(kept(draw(rng)), wanted)
        np.testing.assert_array_equal(kept(traced(rng)), wanted)
    np.testing.assert_array_equal(kept(traced(-5)), wanted_bits(-5, (3,), 0.5))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(kept(draw(jax.numpy.int64(-(2**40)))), wanted_bits(-(2**40), (3,), 0.5))
    one, two = jax.random.split(jax.random.key(5))
    assert (kept(draw(one)) != kept(draw(two))).any()
    with pytest.raises(asp.ArgumentError, match="one key; split keys are used one a call"):
        draw(jax.random.split(jax.random.key(5)))
    other = jax.random.key(5, impl="rbg")
    np.testing.assert_array_equal(kept(draw(other)), kept(traced(other)))


@pytest.mark.parametrize("framework", TRACED[:1])
def test_a_generator_of_torch(framework: str) -> None:
    """It is drawn from once a call: the same state gives the same bits, the next call others."""
    import torch

    qkv = reader(framework, (3,), 20, 30)
    draw = lambda g: kept(asp.attention(*qkv, dropout=0.5, rng=g))  # noqa: E731
    g = torch.Generator().manual_seed(3)
    first, second = draw(g), draw(g)
    assert (first != second).any()
    np.testing.assert_array_equal(draw(torch.Generator().manual_seed(3)), first)
    before = torch.get_rng_state()
    asp.attention(*qkv, dropout=0.5, rng=3)
    assert (torch.get_rng_state() == before).all()  # nobody's global state moves
    g = torch.Generator().manual_seed(3)
    r = asp.inspect(*qkv, dropout=0.5, rng=g)
    np.testing.assert_array_equal(kept(r.out), first)


@pytest.mark.parametrize("framework", TRACED[:1])
def test_bits_when_compiled(framework: str) -> None:
    """One graph; a seed that is an array is no constant of it."""
    import torch

    torch.compiler.reset()
    qkv = reader(framework, (2, 3))
    fn = torch.compile(
        lambda q, k, v, rng: asp.attention(q, k, v, mask=ValidLens(4), dropout=0.4, rng=rng),
        backend="aot_eager",
        fullgraph=True,
    )
    hidden = np.arange(5) < 4
    for seed in (9, -3, 2**40):
        out = fn(*qkv, torch.tensor(seed))
        np.testing.assert_array_equal(kept(out), wanted_bits(seed, (2, 3), 0.4) & hidden)
        same_bits(out, asp.attention(*qkv, mask=ValidLens(4), dropout=0.4, rng=seed))


@pytest.mark.parametrize("framework", TRACED)
def test_vmap_draws_what_a_loop_draws(framework: str) -> None:
    """One seed for all, a seed each, and over heads rather than sequences."""
    q, k, v = reader(framework, (3, 2))
    seeds = array(np.array([4, -4, 99], np.int32), framework)
    if framework == "torch":
        import torch

        vmap = torch.func.vmap
    else:
        import jax

        vmap = lambda fn, *axes: jax.jit(jax.vmap(fn, *axes))  # noqa: E731
    call = lambda q, k, v, rng: asp.attention(q, k, v, dropout=0.4, rng=rng)  # noqa: E731
    one = vmap(lambda q, k, v: call(q, k, v, 4))(q, k, v)
    each = vmap(call)(q, k, v, seeds)
    same = vmap(call, (None, None, None, 0))(q[0], k[0], v[0], seeds)
    for n, seed in enumerate((4, -4, 99)):
        np.testing.assert_array_equal(kept(one)[n], wanted_bits(4, (2,), 0.4))
        np.testing.assert_array_equal(kept(each)[n], wanted_bits(seed, (2,), 0.4))
        np.testing.assert_array_equal(kept(same)[n], wanted_bits(seed, (2,), 0.4))


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_mean_and_variance(framework: str) -> None:
    """B79: 4096 equal keys, values of 1: mean 1 within 0.05, and not constant."""
    q, k, v = (array(x, framework, "float32") for x in (np.zeros((8, 1, 1)), *[np.ones((8, 4096, 1))] * 2))
    for p in (0.1, 0.5):
        out = values(asp.attention(q, k, v, dropout=p, rng=1)).ravel()
        assert np.abs(out - 1).max() < 0.05 and out.std() > 0
        assert abs(out.mean() - 1) < 5 * math.sqrt(p / (1 - p) / out.size / 4096)


def test_bits_look_independent() -> None:
    """Rates within five standard deviations over keys, rows, heads and seeds; no two of them alike."""
    L = S = 128
    queries = np.arange(L)
    for p in (0.1, 0.5, 0.8):
        bits = np.array([keep_bits(seed_words(s, "numpy"), queries, (4,), S, p) for s in range(4)])
        sigma = math.sqrt(p * (1 - p))
        for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2), (2, 3)):
            count = math.prod(bits.shape[n] for n in axes)
            assert np.abs(bits.mean(axis=axes) - (1 - p)).max() < 5 * sigma / math.sqrt(count)
        z = (bits - (1 - p)) / sigma
        for axis in range(4):
            for shift in (1, 2, 3):
                product = z * np.roll(z, shift, axis=axis)
                assert abs(product.mean()) < 5 / math.sqrt(product.size)


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_the_mean_over_seeds_is_the_undropped_output(framework: str) -> None:
    """B78: dropout comes after the softmax; hidden pairs and empty rows stay exactly 0."""
    asked = Asked(mask="bits", bias="-BHLS")
    qkv, options = asked.library(asked.native(framework, "float64"), framework)
    plain = values(asp.attention(*qkv, **options))
    draws = np.array([values(asp.attention(*qkv, **options, dropout=0.5, rng=s)) for s in range(300)])
    assert (draws[:, plain == 0] == 0).all() and np.isfinite(draws).all()
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - plain) <= 5 * error + 1e-12).all()


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_dropout_acts_only_when_asked(framework: str) -> None:
    """B76: without it twice the same; a seed alone drops nothing; the same seed twice is the same."""
    asked = Asked(mask="causal", seed=4)
    qkv, options = asked.library(asked.native(framework, "float32"), framework)
    plain = asp.attention(*qkv, **options)
    same_bits(asp.attention(*qkv, **options), plain)
    same_bits(asp.attention(*qkv, **options, dropout=0.0, rng=5), plain)
    dropped = asp.attention(*qkv, **options, dropout=0.5, rng=5)
    same_bits(asp.attention(*qkv, **options, dropout=0.5, rng=5), dropped)
    assert (values(dropped) != values(plain)).any()
