"""The additive score, for queries and keys of different widths."""

from __future__ import annotations

from math import sqrt
from typing import Any

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, near, printed_rows
from attnspan.plots import show_heatmaps
from attnspan.plots.host import to_host
from attnspan.scores import Additive

__all__ = ["EXPERIMENT", "WEIGHTS"]

# P8
WEIGHTS = {
    "torch": (
        ".1692 .1612 .1816 .1560 .1502 .1818 / .1664 .1849 .1657 .1338 .1623 .1870 / "
        ".1517 .2188 .1441 .1317 .2166 .1371"
    ),
    "jax": (
        ".13390937 .3772766 .17127123 .1027277 .06276076 .15205443 / "
        ".19218282 .31524566 .14511336 .08953383 .07662669 .18129766 / "
        ".15669951 .3378386 .15281527 .11713327 .09428051 .1412329"
    ),
}

SHAPES = ((3, 20), (6, 2), (8, 20), (8, 2), (8,))  # queries, keys, W_q, W_k, w_v


def _draw_torch() -> list[Any]:
    import torch

    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def _draw_jax() -> list[Any]:
    import jax

    from attnspan.book.jax import normal

    keys = jax.random.split(jax.random.key(0), 5)
    return [normal(key, shape) for key, shape in zip(keys, SHAPES, strict=True)]


def _compute(queries: Any, keys: Any, W_q: Any, W_k: Any, w_v: Any) -> tuple[Any, Any]:
    score = Additive(W_q / sqrt(20), W_k / sqrt(2), w_v / sqrt(8))
    pairs = score.pair(queries[:, None, :], keys[None, :, :])  # (L, S), each pair by itself
    return asp.inspect(queries, keys, keys, score=score).weights(), asp.masked_softmax(pairs)


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    chosen = find(framework)
    arrays = chosen.compiled(_compute)(*chosen.draw(torch=_draw_torch, jax=_draw_jax))
    weights, by_pairs = (to_host(array) for array in arrays)
    checks = printed_rows("P8", WEIGHTS[framework], weights)
    checks += [
        near("P8 row sums", 1.0, weights.sum(-1), 1e-6),
        near(
            "the score by its definition, pair by pair, through the masked softmax",
            by_pairs,
            weights,
            2e-6,
            book="the same weights",
        ),
    ]
    figure = show_heatmaps(weights[None, None], "Keys", "Queries", figsize=(4.0, 2.3))
    caption = "Additive attention of three queries of width 20 over six keys of width 2."
    return checks, [Picture(caption, figure)]


EXPERIMENT = Experiment(
    name="additive",
    covers="S8, P8",
    title="The additive score",
    claim=(
        "w_vᵀ tanh(W_q q + W_k k) compares queries and keys of different widths, because each is "
        "first mapped to the same hidden width."
    ),
    measure=_measure,
)
