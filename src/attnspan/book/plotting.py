"""The plots that the section uses, given arrays of every kind that a layer hands out."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds
from attnspan.masks import Causal, FirstKeys, SlidingWindow
from attnspan.plots import plot, plot_mask, show_heatmaps
from attnspan.plots.host import to_host

__all__ = ["EXPERIMENT"]

LENGTH = 8
MASKS = {
    "causal": Causal(),
    "window and first key": (SlidingWindow(back=2) | FirstKeys(1)) & Causal(),
}


def _draw_torch() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.randn(2, LENGTH, LENGTH, dtype=torch.bfloat16, requires_grad=True)


def _draw_jax() -> Any:
    import jax

    return jax.random.normal(jax.random.key(0), (2, LENGTH, LENGTH), dtype="bfloat16")


def _compute(scores: Any) -> list[Any]:
    return [asp.masked_softmax(scores, mask=mask) for mask in MASKS.values()]


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    scores = find(framework).draw(torch=_draw_torch, jax=_draw_jax)
    grid = find(framework).compiled(_compute)(scores)
    titles = [[f"{name}, batch {b}" for b in range(2)] for name in MASKS]
    heat = show_heatmaps(grid, "Keys", "Queries", titles=titles, figsize=(5.4, 4.7))
    *maps, bar = heat.axes
    entropies = [[_entropy(row) for row in weights[0]] for weights in grid]
    curves = plot(
        list(range(1, LENGTH + 1)),
        entropies,
        xlabel="query",
        ylabel="entropy (nats)",
        legend=list(MASKS),
        xscale="log",
    )
    (axes,) = curves.axes
    mask = plot_mask(MASKS["window and first key"], LENGTH, LENGTH, figsize=(2.7, 2.7))
    lines, legend = len(axes.get_lines()), axes.get_legend()
    entries = len(legend.get_texts()) if legend else 0
    named = [maps[0].get_ylabel(), maps[2].get_ylabel(), maps[2].get_xlabel(), maps[3].get_xlabel()]
    low, high = maps[0].get_images()[0].get_clim()
    shared = all(m.get_images()[0].get_clim() == (low, high) for m in maps)
    checks = [
        holds("curves: scale of the x-axis", "log", axes.get_xscale(), axes.get_xscale() == "log"),
        holds("curves: lines and legend", "2 2", f"{lines} {entries}", lines == entries == 2),
        holds("heat maps of bfloat16 weights: grid", "2 × 2", f"{len(maps)} maps", len(maps) == 4),
        holds(
            "heat maps: axis names",
            "Queries Queries Keys Keys",
            " ".join(named),
            named == ["Queries", "Queries", "Keys", "Keys"],
        ),
        holds(
            "heat maps: one colour scale and its bar",
            "shared",
            f"{low:.2f} to {high:.2f}",
            shared and bar not in maps,
        ),
    ]
    return checks, [
        Picture(
            "A grid of heat maps from bfloat16 weights: two masks down, two sequences across, one "
            "colour scale.",
            heat,
        ),
        Picture("Entropy of each query's weights: more visible keys, more entropy.", curves),
        Picture("The second mask, cell by cell: a window of two keys back, and the first key.", mask),
    ]


def _entropy(weights: Any) -> float:
    """Compute the entropy of one row of weights on the host, where 0 · log 0 is 0."""
    return -sum(p * log(p) for p in to_host(weights, np.float64) if p > 0)


EXPERIMENT = Experiment(
    name="plots",
    covers="S9",
    title="Curves and heat maps",
    claim=(
        "One call draws curves on a log axis with a legend, another a grid of weights in one colour "
        "scale, from arrays of any framework and dtype, gradients or not."
    ),
    measure=_measure,
)
