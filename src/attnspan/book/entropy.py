"""Entropy of the weights and norm of the softmax Jacobian, with and without 1/√d."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from math import log

from attnspan.book.record import Check, Experiment, Picture, holds, near, printed
from attnspan.plots import plot

__all__ = ["CURVES", "EXPERIMENT", "NORMS", "WIDTHS"]

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)

# P1: the curve's points; the book plots them, and these digits come out of its PyTorch listing.
CURVES = {
    "torch": {
        "unscaled": "2.813 2.114 1.366 0.920 0.532 0.416 0.270 0.187",
        "scaled": "3.709 3.697 3.686 3.688 3.678 3.685 3.690 3.704",
    },
}

# P2: unscaled, scaled.
NORMS = {
    "torch": {4: "0.259 0.178", 64: "0.208 0.182", 512: "0.093 0.184"},
    "jax": {4: "0.258 0.178", 64: "0.218 0.184", 512: "0.103 0.186"},
}


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    attention_stats = import_module(f"attnspan.book.{framework}").attention_stats
    _seed(framework)  # the listing of P1: every unscaled call, then every scaled one
    unscaled = [attention_stats(d, scaled=False)[0] for d in WIDTHS]
    scaled = [attention_stats(d, scaled=True)[0] for d in WIDTHS]
    _seed(framework)  # the listing of P2: width by width
    norms = {d: [attention_stats(d, scaled=scale)[1] for scale in (False, True)] for d in NORMS[framework]}

    checks = [
        near("P1 uniform weights over 64 keys, ln 64 ≈ 4.2", 4.2, log(64), 0.05),
        near("P1 scaled entropy, smallest and largest", [3.7, 3.7], [min(scaled), max(scaled)], 0.05),
        holds("P1 unscaled entropy at d = 512", "below 0.2", f"{unscaled[-1]:.3f}", unscaled[-1] < 0.2),
        holds(
            "P1 unscaled entropy as d grows",
            "falls",
            " > ".join(f"{value:.2f}" for value in unscaled),
            all(a > b for a, b in pairwise(unscaled)),
        ),
    ]
    for name, text in CURVES.get(framework, {}).items():
        checks.append(
            printed(
                f"P1 {name} entropy, d = 4, 8, …, 512",
                text,
                unscaled if name == "unscaled" else scaled,
            )
        )
    for d, text in NORMS[framework].items():
        checks.append(printed(f"P2 Jacobian norm at d = {d}: unscaled, scaled", text, norms[d]))

    figure = plot(
        list(WIDTHS),
        [unscaled, scaled, [log(64)] * len(WIDTHS)],
        xlabel="width d",
        ylabel="entropy (nats)",
        legend=["unscaled", "scaled by 1/√d", "uniform, ln 64"],
        xscale="log",
        ylim=(0, 4.5),
        figsize=(4.4, 2.9),
    )
    caption = (
        "Mean entropy of attention over 64 random keys. Without scaling it falls towards 0 as the "
        "width grows: nearly all weight is on one key. With 1/√d it stays where it is."
    )
    return checks, [Picture(caption, figure)]


def _seed(framework: str) -> None:
    """Seed PyTorch before a listing; in JAX each call has its own key."""
    if framework == "torch":
        import torch

        torch.manual_seed(0)


EXPERIMENT = Experiment(
    name="entropy",
    covers="S2, P1, P2",
    title="Why scores are divided by √d",
    claim=(
        "Unscaled dot products of wide random vectors saturate the softmax, which leaves the "
        "weights one-hot and the gradient small; dividing by √d keeps both where they were at any width."
    ),
    measure=_measure,
)
