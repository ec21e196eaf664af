"""Bug reports O: what one is shown is what was used."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnspan as asp
from attnspan.masks import Causal, SlidingWindow, ValidLens
from attnspan.scores import Dot
from tests.cases.fixture import LIBRARIES, arrays, close, every_path, skip_refused


@every_path
def test_b91_the_weights_shown_are_those_used(library: str, implementation: str) -> None:
    q, k, v = arrays(library)
    options = {"score": Dot(), "mask": Causal() & ValidLens(2, pad="left")}
    skip_refused(implementation, q, k, v, options)
    record = asp.inspect(q, k, v, implementation=implementation, **options)
    weights = np.asarray(record.weights(), np.float64)[0, 0]
    close(weights, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 3 / 7, 4 / 7]])
    assert (weights[:2] == 0).all()
    close(weights @ np.asarray(v, np.float64)[0, 0], np.asarray(record.out)[0, 0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_b92_plots_take_any_dtype_and_gradients(dtype: str) -> None:
    pytest.importorskip("matplotlib")
    from attnspan.plots import show_heatmaps

    for weights in (
        torch.rand(3, 4, dtype=getattr(torch, dtype), requires_grad=True),
        jnp.ones((3, 4), dtype),
    ):
        shown = show_heatmaps(weights[None, None], xlabel="Keys", ylabel="Queries").axes[0].images[0]
        assert shown.get_array().dtype == np.float32
        assert shown.get_array().shape == (3, 4)


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_b94_a_picture_shows_pairs_and_says_where_it_does_not(library: str) -> None:
    mask = SlidingWindow(back=LIBRARIES[library](np.array([1])))
    assert mask.picture(4, 4).splitlines() == ["█···", "██··", "·██·", "··██"]
    assert mask.picture(8, 8, width=4).startswith("one cell is 2 queries x 2 keys")
