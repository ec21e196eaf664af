"""Bug reports E to H: windows, prefixes, dtypes, packing, shapes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnspan as asp
from attnspan.masks import Causal, Documents, PrefixLM, SlidingWindow, ValidLens
from attnspan.scores import Additive, Dot
from tests.cases.fixture import LIBRARIES, arrays, close, every_library, every_path, outputs

PACKED = [1, 7, 100, 614.285714]


@every_path
def test_b41_a_window_on_both_sides_says_each(library: str, implementation: str) -> None:
    both = SlidingWindow(back=1, ahead=1)
    close(outputs(library, implementation, both).ravel(), [7, 53.5, 480, 614.285714])


@every_path
def test_b43_prefix_boundaries(library: str, implementation: str) -> None:
    causal = [1, 7, 53.5, 432.1]
    right = {0: causal, 1: causal, 2: [7, 7, 53.5, 432.1], 4: [432.1] * 4}
    for length, expected in right.items():
        close(outputs(library, implementation, PrefixLM(length)).ravel(), expected)


HALF = [("torch", torch.float16), ("torch", torch.bfloat16), ("jax", jnp.float16), ("jax", jnp.bfloat16)]


def cast(library: str, x: Any, dtype: Any) -> Any:
    x = LIBRARIES[library](x)
    return x.to(dtype) if library == "torch" else x.astype(dtype)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x.float() if isinstance(x, torch.Tensor) else x, np.float64)


@pytest.mark.parametrize(("library", "dtype"), [*HALF, ("numpy", np.float16)])
def test_b45_two_masks_are_one_mask_in_every_dtype(library: str, dtype: Any) -> None:
    q, k, v = (cast(library, np.asarray(x), dtype) for x in arrays("numpy"))
    out = wide(asp.attention(q, k, v, score=Dot(), mask=Causal() & ValidLens(3, pad="left"))).ravel()
    close(out, [0, 10, 64, 480], 1e-2)
    assert out[0] == 0


@pytest.mark.parametrize(("library", "dtype"), [*HALF, ("numpy", np.float16)])
def test_b46_b47_b50_fillers_neither_leak_nor_overflow(library: str, dtype: Any) -> None:
    def softmax(scores: list[float], keep: list[bool]) -> list[float]:
        s = cast(library, np.array(scores, np.float32), dtype)
        return wide(asp.masked_softmax(s, mask=LIBRARIES[library](np.array(keep)))).tolist()

    assert softmax([-20, -20], [False, False]) == [0, 0]
    assert softmax([50, -50], [False, False]) == [0, 0]
    assert softmax([0, 9984], [True, False]) == [1, 0]
    assert softmax([0, 0, 12, 12], [True, True, False, False]) == [0.5, 0.5, 0, 0]


def test_b48_float64_stays_float64_and_no_infinity_appears() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 4, 8)))
        with jax.debug_infs(True):
            out = jax.jit(lambda x: asp.attention(x, x, x, mask=ValidLens(3)))(x)
        ours = np.asarray(out)
    assert ours.dtype == np.float64
    y = np.asarray(x)[..., :3, :]
    s = np.asarray(x) @ np.swapaxes(y, -1, -2) / np.sqrt(8)
    e = np.exp(s - s.max(-1, keepdims=True))
    close(ours, e / e.sum(-1, keepdims=True) @ y, 1e-12)


@every_path
def test_b52_b54_document_ids_are_no_mask_and_nothing_is_inferred(library: str, implementation: str) -> None:
    ids = LIBRARIES[library](np.array([0, 0, 1, 1]))
    close(outputs(library, implementation, Documents(ids) & Causal()).ravel(), PACKED)
    everything = LIBRARIES[library](np.ones(4, bool))
    close(outputs(library, implementation, Documents(ids) & Causal() & everything).ravel(), PACKED)


@every_path
def test_b53_padding_does_not_see_padding(library: str, implementation: str) -> None:
    mask = Documents(LIBRARIES[library](np.array([0, 0, 1, -1])))
    close(outputs(library, implementation, mask).ravel(), [7, 7, 100, 0])


@every_path
def test_b56_offsets_and_ids_say_the_same(library: str, implementation: str) -> None:
    to = LIBRARIES[library]
    offsets = Documents.from_offsets(to(np.array([0, 2, 4]))) & Causal()
    close(outputs(library, implementation, offsets).ravel(), PACKED)
    returning = Documents(to(np.array([0, 1, 0, 1]))) & Causal()
    close(outputs(library, implementation, returning).ravel(), [1, 10, 75.25, 670])
    for bad, message in (
        ([0, 2, 1, 4], "start at 0 and do not decrease"),
        ([1, 4], "start at 0 and do not decrease"),
        ([0, 2, 3], "documents that end at 4"),
    ):
        with pytest.raises(asp.ArgumentError, match=message):
            outputs(library, implementation, Documents.from_offsets(to(np.array(bad))))


@every_path
def test_b57_batch_and_heads_keep_their_order(library: str, implementation: str) -> None:
    lens = LIBRARIES[library](np.array([1, 3]))
    out = outputs(library, implementation, ValidLens(lens), shape={"B": 2, "H": 2})
    close(out[0].ravel(), [1] * 8)
    close(out[1].ravel(), [53.5] * 8)
    with pytest.raises(asp.ArgumentError, match="beside 4-D queries"):
        outputs(library, implementation, LIBRARIES[library](np.ones((4, 4, 4), bool)), shape={"B": 2, "H": 2})


@every_path
def test_b59_padding_hides_keys_and_query_lens_hide_queries(library: str, implementation: str) -> None:
    to = LIBRARIES[library]
    close(outputs(library, implementation, to(np.array([True, True, False, False]))).ravel(), [7] * 4)
    both = ValidLens(to(np.array([2])), query_lens=to(np.array([2])))
    close(outputs(library, implementation, both).ravel(), [7, 7, 0, 0])


@every_library
def test_b60_an_array_where_a_length_belongs(library: str) -> None:
    x = LIBRARIES[library](np.ones((2, 5, 8), np.float32))
    with pytest.raises(asp.ArgumentError, match=r"align: given float32\[2, 5, 8\]"):
        Causal(x)
    with pytest.raises(asp.ArgumentError, match=r"mask: given bool\[8, 8\], needed \(\.\.\., L, S\)"):
        asp.attention(x, x, x, mask=LIBRARIES[library](np.tril(np.ones((8, 8), bool))))


@every_path
@pytest.mark.parametrize("full", list(itertools.product([False, True], repeat=4)))
def test_b61_every_broadcast_of_a_mask_is_the_expanded_mask(
    library: str, implementation: str, full: tuple[bool, ...]
) -> None:
    sizes = (2, 3, 4, 4)
    shape = [n if whole else 1 for n, whole in zip(sizes, full, strict=True)]
    keep = np.random.default_rng(sum(shape)).random(shape) > 0.4
    keep.flat[0] = True
    right = outputs("numpy", "eager", np.broadcast_to(keep, sizes), shape={"B": 2, "H": 3})
    ours = outputs(library, implementation, LIBRARIES[library](keep), shape={"B": 2, "H": 3})
    close(ours, right)


@every_path
@pytest.mark.parametrize(("B", "L", "S"), [(1, 1, 2), (1, 3, 2), (2, 1, 2), (2, 3, 1)])
def test_b62_the_softmax_runs_over_keys(library: str, implementation: str, B: int, L: int, S: int) -> None:
    rng = np.random.default_rng(0)
    to = LIBRARIES[library]
    q, k, v = (to(rng.normal(size=(B, n, 2)).astype(np.float32)) for n in (L, S, S))
    W = to(rng.normal(size=(3, 2)).astype(np.float32))
    for score in (Dot(), Additive(W, W, W[:, 0])):
        weights = np.asarray(asp.inspect(q, k, v, score=score).weights())
        assert weights.shape == (B, L, S)
        close(weights.sum(-1), np.ones((B, L)))


def test_b67_padded_and_unpadded_additive_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5), torch.randn(2, 4, 6), torch.randn(2, 4, 7)
    score = Additive(torch.randn(8, 5), torch.randn(8, 6), torch.randn(8))
    padded = asp.attention(q, k, v, score=score, mask=ValidLens(torch.tensor([2, 4])))
    for b, n in enumerate((2, 4)):
        alone = asp.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], score=score)
        close(padded[b : b + 1], alone, 1e-6)
