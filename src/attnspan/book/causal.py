"""Causal masking as growing valid lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds, near
from attnspan.masks import Causal, ValidLens
from attnspan.plots import show_heatmaps
from attnspan.plots.host import to_host

__all__ = ["EXPERIMENT"]

LENGTH = 6


def _draw_torch() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.randn(1, LENGTH, LENGTH)


def _draw_jax() -> Any:
    import jax

    from attnspan.book.jax import normal

    return normal(jax.random.key(2), (1, LENGTH, LENGTH))


def _compute(scores: Any, lengths: Any) -> tuple[Any, Any]:
    return asp.masked_softmax(scores, lengths), asp.masked_softmax(scores, mask=Causal())


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    chosen = find(framework)
    scores = chosen.draw(torch=_draw_torch, jax=_draw_jax)
    lengths = chosen.array(np.arange(1, LENGTH + 1)[None])  # (1, L)
    arrays = chosen.compiled(_compute)(scores, lengths)
    weights, by_mask = (to_host(array) for array in arrays)
    rows = weights[0]
    below = np.tril(np.ones((LENGTH, LENGTH), bool))
    same = ValidLens(np.arange(1, LENGTH + 1)[None]).equals(Causal(), LENGTH, LENGTH)
    checks = [
        near("P4 weights above the diagonal, the largest", 0.0, rows[~below].max(), 0.0),
        holds(
            "P4 weights on and below the diagonal",
            "positive",
            f"smallest {rows[below].min():.3f}",
            (rows[below] > 0).all(),
        ),
        near("P4 row sums", 1.0, rows.sum(-1), 1e-6),
        near("P4 the first query sees itself alone", 1.0, rows[0, 0], 0.0),
        near(
            "lengths (1, …, 6) beside the mask Causal()",
            weights,
            by_mask,
            1e-6,
            book="the same weights",
        ),
        holds("the two masks as sets of pairs", "equal", "equal" if same else "not equal", same),
    ]
    figure = show_heatmaps(weights[None], "Keys", "Queries", figsize=(3.2, 2.7))
    caption = "Causal weights of one sequence of six: lower triangular, for query i sees the keys up to i."
    return checks, [Picture(caption, figure)]


EXPERIMENT = Experiment(
    name="causal",
    covers="S4, P4",
    title="Causal masking is a length per query",
    claim=(
        "Giving the queries of a sequence the valid lengths 1, 2, …, n makes the weights lower "
        "triangular: nobody sees the future."
    ),
    measure=_measure,
)
