"""Bug reports B to D: conventions, causal alignment, and options that dropped a mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnspan as asp
from attnspan.masks import Causal, Documents, Everything, Predicate, SlidingWindow, ValidLens
from attnspan.scores import Dot
from tests.cases.fixture import LIBRARIES, arrays, close, every_library, every_path, outputs

CAUSAL = [1, 7, 53.5, 432.1]
WINDOW = [1, 7, 64, 614.285714]


@every_path
def test_b17_true_may_attend(library: str, implementation: str) -> None:
    to = LIBRARIES[library]
    lower = np.tril(np.ones((4, 4), bool))
    close(outputs(library, implementation, to(lower)).ravel(), CAUSAL)
    upside_down = outputs(library, implementation, to(~lower)).ravel()
    close(upside_down, [480, 614.285714, 1000, 0])  # what was asked for, literally
    q, k, v = arrays(library)
    last = np.asarray(v).copy()
    last[..., 3, :] = -7
    changed = asp.attention(q, k, to(last), score=Dot(), mask=Causal())
    close(np.asarray(changed).ravel()[:3], CAUSAL[:3])


@every_library
def test_b18_b21_float_masks_are_refused_and_minus_inf_is_a_bias(library: str) -> None:
    to = LIBRARIES[library]
    q, k, v = arrays(library)
    additive = np.array([0, 0, -3e38, -3e38], np.float32)
    with pytest.raises(asp.ArgumentError, match=r"mask: given float32\[4\], needed booleans"):
        asp.attention(q, k, v, mask=to(additive))
    with pytest.raises(asp.ArgumentError, match="write mask != 0 for 1/0 values"):
        asp.attention(q, k, v, mask=to(np.array([1, 1, 0, 0], np.float32)))
    close(np.asarray(asp.attention(q, k, v, score=Dot(), bias=to(additive))).ravel(), [7] * 4)
    padding = to(np.array([0, 0, -np.inf, -np.inf], np.float32))
    both = asp.attention(q, k, v, score=Dot(), bias=padding, mask=Causal())
    close(np.asarray(both).ravel(), [1, 7, 7, 7])


@every_path
def test_b19_asymmetric_lengths(library: str, implementation: str) -> None:
    lens = LIBRARIES[library](np.array([1, 3]))
    out = outputs(library, implementation, ValidLens(lens), shape={"B": 2})
    close(out[0].ravel(), [1] * 4)
    close(out[1].ravel(), [53.5] * 4)


@every_path
def test_b22_integer_masks(library: str, implementation: str) -> None:
    to = LIBRARIES[library]
    close(outputs(library, implementation, to(np.array([1, 1, 0, 0]))).ravel(), [7] * 4)
    with pytest.raises(asp.ArgumentError, match="values from 0 to 2.*did you mean valid_lens.*Documents"):
        outputs(library, implementation, to(np.array([1, 1, 2, 0])))


@every_path
def test_b23_one_query_against_a_cache(library: str, implementation: str) -> None:
    step = {"L": 1}
    with pytest.raises(asp.ArgumentError, match="align: given nothing, for Causal over 1 queries and 4 keys"):
        outputs(library, implementation, Causal(), shape=step)
    close(outputs(library, implementation, Causal(), shape=step, align="bottom_right").ravel(), [432.1])
    close(outputs(library, implementation, Causal(), shape=step, align="top_left").ravel(), [1])
    close(outputs(library, implementation, Causal(), shape=step, align=2).ravel(), [53.5])
    two = outputs(library, implementation, Causal(align="bottom_right"), shape={"L": 2}, align="top_left")
    close(two.ravel(), [53.5, 432.1])  # a mask's own alignment wins


@every_path
def test_b24_more_queries_than_keys(library: str, implementation: str) -> None:
    shape = {"S": 2}
    bottom = outputs(library, implementation, Causal(align="bottom_right"), shape=shape)
    close(bottom.ravel(), [0, 0, 1, 7])
    top = outputs(library, implementation, Causal(align="top_left"), shape=shape)
    close(top.ravel(), [1, 7, 7, 7])


@every_path
@pytest.mark.parametrize("align", ["top_left", "bottom_right", 1])
@pytest.mark.parametrize("L", [1, 2, 3])
def test_b25_every_alignment_is_its_explicit_mask(
    library: str, implementation: str, align: object, L: int
) -> None:
    first = {"top_left": 0, "bottom_right": 4 - L}.get(align, align)  # type: ignore[call-overload]
    explicit = np.array([[j <= i + first for j in range(4)] for i in range(L)])
    symbolic = outputs(library, implementation, Causal(align=align), shape={"L": L})
    close(symbolic, outputs(library, implementation, LIBRARIES[library](explicit), shape={"L": L}))


def test_b27_backward_with_empty_causal_rows_in_packed_documents() -> None:
    mask = Documents.from_lengths([3, 2, 4], [1, 1, 1], each=Causal(align="bottom_right"))
    torch.manual_seed(0)
    q = torch.randn(1, 1, 9, 4, requires_grad=True)
    k, v = torch.randn(2, 1, 1, 3, 4)
    (g,) = torch.autograd.grad(asp.attention(q, k, v, mask=mask).square().sum(), q)
    empty = mask.empty_rows(9, 3)[0, 0]
    assert empty.tolist() == [True, True, False, True, False, True, True, True, False]
    assert torch.isfinite(g).all()
    assert (g[0, 0, torch.tensor(empty)] == 0).all()


@every_path
@pytest.mark.parametrize("ndim", [3, 4, 5])
@pytest.mark.parametrize("look", [False, True])
def test_b29_b30_no_option_drops_the_mask(library: str, implementation: str, ndim: int, look: bool) -> None:
    out = outputs(library, implementation, Causal(), shape={"ndim": ndim})
    close(out.ravel(), CAUSAL)
    if look:
        q, k, v = arrays(library, ndim=ndim)
        record = asp.inspect(q, k, v, score=Dot(), mask=Causal(), implementation=implementation)
        assert (np.asarray(record.out, np.float64) == out).all()
        weights = np.asarray(record.weights()).reshape(4, 4)
        assert (weights[np.triu_indices(4, 1)] == 0).all()
        assert (weights[np.tril_indices(4)] > 0).all()


@every_path
def test_b31_b32_causal_and_padding(library: str, implementation: str) -> None:
    close(outputs(library, implementation, Causal() & ValidLens(3)).ravel(), [1, 7, 53.5, 53.5])
    padding = LIBRARIES[library](np.array([True, True, True, False]))
    close(outputs(library, implementation, Causal() & padding).ravel(), [1, 7, 53.5, 53.5])
    close(outputs(library, implementation, padding & Causal()).ravel(), [1, 7, 53.5, 53.5])


@every_path
def test_b33_b40_a_window_needs_no_other_mask(library: str, implementation: str) -> None:
    close(outputs(library, implementation, SlidingWindow(back=1)).ravel(), WINDOW)
    close(outputs(library, implementation, SlidingWindow(back=1) & Everything()).ravel(), WINDOW)
    close(outputs(library, implementation, SlidingWindow.last(2)).ravel(), WINDOW)


@every_path
def test_b35_keep_masks_join_with_and_hide_masks_with_or(library: str, implementation: str) -> None:
    future = Predicate(lambda q, k: k > q)
    too_old = Predicate(lambda q, k: q - k > 1)
    close(outputs(library, implementation, ~(future | too_old)).ravel(), WINDOW)
    close(outputs(library, implementation, ~future & ~too_old).ravel(), WINDOW)


@every_path
def test_b36_b38_nothing_is_assumed_of_cross_attention(library: str, implementation: str) -> None:
    close(outputs(library, implementation, shape={"L": 2}).ravel(), [432.1, 432.1])
    close(outputs(library, implementation).ravel(), [432.1] * 4)


@every_path
def test_b37_widths_are_neighbours(library: str, implementation: str) -> None:
    def causal_window(back: int | None) -> np.ndarray:
        return outputs(library, implementation, Causal() & SlidingWindow(back=back)).ravel()

    close(causal_window(0), [1, 10, 100, 1000])
    for back in (3, 4, 100, None):
        close(causal_window(back), CAUSAL)
    for back in (-1, -2):
        with pytest.raises(asp.ArgumentError, match=f"back: given {back}, needed a number of neighbours, 0"):
            SlidingWindow(back=back)
    with pytest.raises(asp.ArgumentError, match="keys: given 0, needed 1 key or more"):
        SlidingWindow.last(0)


@every_path
def test_b39_every_path_honours_lengths(library: str, implementation: str) -> None:
    close(outputs(library, implementation, ValidLens(2)).ravel(), [7] * 4)
