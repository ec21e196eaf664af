"""One query, as in decoding, has a loop of its own in the dot kernel: its answers and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan import native
from attnspan.biases import ALiBi
from attnspan.errors import AttnspanError
from attnspan.masks import Causal, Dense, FirstKeys, SlidingWindow, Strided, ValidLens
from tests.attention.asked import Asked, hold
from tests.attention.cases import Sizes
from tests.attention.helpers import EVERY_DTYPE, FRAMEWORKS, array, close, same_bits, values

try:
    native.load()
except AttnspanError as error:
    pytest.skip(str(error), allow_module_level=True)

LONG = Sizes(B=3, H=4, G=2, L=1, S=403, D=37, E=21)  # three tiles of keys, no width a multiple of lanes
WIDE = Sizes(B=1, H=2, G=1, L=1, S=9, D=80, E=160)
CASES = {
    "all keys": Asked(sizes=LONG),
    "wide": Asked(sizes=WIDE),
    "the last keys": Asked(sizes=LONG, mask="causal, bottom right"),
    "lengths, the first of them 0": Asked(sizes=LONG, mask="valid (B,)"),
    "bits": Asked(sizes=LONG, mask="strided"),
    "softcap": Asked(sizes=LONG, softcap=1.5, spread=2.0),
    "bias": Asked(sizes=LONG, bias="-BHLS", mask="valid (B,)"),
    "bias for all": Asked(sizes=LONG, bias="LS", softcap=2.0),
    "alibi": Asked(sizes=LONG, bias="alibi"),
    "sink": Asked(sizes=LONG, sink="1H", mask="valid (B,)"),
    "a bias of keys": Asked(sizes=LONG, score="gaussian"),
    "one width": Asked(sizes=Sizes(L=1, S=33, D=1, E=1)),
    "no width": Asked(sizes=Sizes(L=1, D=0, E=5)),
    "no values": Asked(sizes=Sizes(L=1, D=5, E=0)),
    "one key": Asked(sizes=Sizes(L=1, S=1)),
    "no key": Asked(sizes=Sizes(L=1, S=0)),
    "nothing": Asked(sizes=LONG, mask="nothing"),
    "large scores": Asked(sizes=LONG, spread=30.0),
}

# JAX hands over the same memory, and compiles each call anew: one dtype and two cases show it.
HANDED_OVER = [x for x in EVERY_DTYPE if x.values[0] != "jax" or x.values[1] == "float32"]


@pytest.mark.parametrize(
    ("framework", "dtype", "name"),
    [
        pytest.param(*x.values, name, marks=x.marks)
        for x in HANDED_OVER
        for name in (CASES if x.values[0] != "jax" else ("bits", "bias"))
    ],
)
def test_it_is_the_oracles(framework: str, dtype: str, name: str) -> None:
    hold(CASES[name], framework, dtype, ("native",))


def drawn(framework: str, L: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(L)
    shapes = ((3, 4, L, 37), (3, 2, 403, 37), (3, 2, 403, 21), (3, 4, L, 403))
    return [array(rng.standard_normal(shape), framework, dtype) for shape in shapes]


@pytest.mark.parametrize(("framework", "dtype"), HANDED_OVER)
def test_its_bits_are_those_of_a_row_among_many(framework: str, dtype: str) -> None:
    L = 40
    q, k, v, bias = drawn(framework, L, dtype)
    mask = SlidingWindow(300, align=363) & ~Strided(7, align=0) | FirstKeys(2)
    for softcap in (None, 1.5):
        everything = asp.attention(q, k, v, mask=mask, bias=bias, softcap=softcap, implementation="native")
        for i in (0, 17, L - 1):
            alone = SlidingWindow(300, align=363 + i) & ~Strided(7, align=i) | FirstKeys(2)
            row = slice(i, i + 1)
            out = asp.attention(
                q[..., row, :],
                k,
                v,
                mask=alone,
                bias=bias[..., row, :],
                softcap=softcap,
                implementation="native",
            )
            same_bits(out, everything[..., row, :])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_looking_at_it_changes_no_bit(framework: str) -> None:
    q, k, v, bias = drawn(framework, 1, "float32")
    options: dict[str, Any] = {"mask": ValidLens([403, 0, 100]), "bias": bias, "implementation": "native"}
    same_bits(asp.inspect(q, k, v, **options).out, asp.attention(q, k, v, **options))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mask", ["spans", "bits"])
def test_what_it_does_not_see_is_not_there(mask: str, bad: float) -> None:
    q, k, v, _ = drawn("numpy", 1, "float32")
    hidden = np.zeros(403, bool)
    hidden[250:] = True
    if mask == "bits":
        hidden[::5] = True
    seen = Dense(~hidden) if mask == "bits" else Causal(align=249)
    wanted = asp.attention(q, k, v, mask=seen, implementation="native")
    k[..., hidden, 3], v[..., hidden, 2] = bad, bad
    same_bits(asp.attention(q, k, v, mask=seen, implementation="native"), wanted)


def test_a_bad_key_or_value_that_it_sees_makes_its_output_nan() -> None:
    q, k, v, _ = drawn("numpy", 1, "float32")
    k[1, 0, 400, 5] = np.nan
    v[2, 1, 7, 0] = np.inf
    out = asp.attention(q, k, v, implementation="native")
    assert np.isnan(out[1, :2]).all()
    assert np.isnan(out[2, 2:, 0, 0]).all()
    whole = np.ones(out.shape, bool)
    whole[1, :2], whole[2, 2:] = False, False
    assert np.isfinite(out[whole]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS[:2])
def test_views_of_any_strides_have_the_same_bits(framework: str) -> None:
    q, k, v, _ = drawn(framework, 1, "float32")
    wanted = asp.attention(q, k, v, implementation="native")
    swapped = [array(np.swapaxes(values(x), 1, 2).copy(), framework, "float32") for x in (q, k, v)]
    views = [x.swapaxes(1, 2) for x in swapped]
    same_bits(asp.attention(*views, implementation="native"), wanted)
    twice = [array(np.repeat(values(x), 2, -1), framework, "float32")[..., ::2] for x in (q, k, v)]
    same_bits(asp.attention(*twice, implementation="native"), wanted)


@pytest.mark.parametrize("L", [1, 2, 40])
@pytest.mark.parametrize("name", ["bias", "alibi"])
def test_a_bias_comes_to_scores_that_stopped_at_the_end_of_the_range(name: str, L: int) -> None:
    q, k = np.full((1, 1, L, 4), 1e25, np.float32), np.full((1, 1, 2, 4), 1e25, np.float32)
    v = np.array([0.0, 1.0], np.float32)[None, None, :, None]
    bias = np.array([-1e38, 0.0], np.float32) if name == "bias" else ALiBi([1e38], align=2 - L)
    options: dict[str, Any] = {
        "bias": bias,
        "implementation": "native",
    }  # the last key is the last query's nearest
    assert asp.attention(q, k, v, **options)[0, 0, -1] == 1.0
    assert asp.inspect(q, k, v, **options).out[0, 0, -1] == 1.0


def test_scores_beyond_the_range_stop_at_its_end() -> None:
    q, k = np.full((1, 1, 1, 4), 1e25, np.float32), np.zeros((1, 1, 40, 4), np.float32)
    k[0, 0, 3], k[0, 0, 11] = 1e25, -1e25
    v = np.arange(40, dtype=np.float32)[None, None, :, None]
    out = asp.attention(q, k, v, implementation="native")
    close(out, np.array([[[[3.0]]]]), "float32", 40.0)
