"""Dot, scaled dot and Gaussian scores: what softmax removes, and when two scores are one."""

from __future__ import annotations

from math import sqrt
from typing import Any

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds, near
from attnspan.plots import show_heatmaps
from attnspan.plots.host import to_host
from attnspan.scores import Dot, Gaussian, ScaledDot

__all__ = ["EXPERIMENT"]

WIDTH = 16


def _draw_torch() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.randn(1, 64, WIDTH), torch.randn(1, 64, WIDTH)


def _draw_jax() -> tuple[Any, Any]:
    import jax

    from attnspan.book.jax import normal

    key_q, key_k = jax.random.split(jax.random.key(0))
    return normal(key_q, (1, 64, WIDTH)), normal(key_k, (1, 64, WIDTH))


def _compute(queries: Any, keys: Any) -> dict[str, Any]:
    """Attend to a few of the keys with each score, and to the same keys scaled to norm 1."""
    all_dots = Dot().pair(queries[:, :, None, :], keys[:, None, :, :])  # (1, L, S)
    queries, keys = queries[:, :6] / 2, keys[:, :10] / 2
    dots = all_dots[:, :6, :10] / 4
    norms = (keys * keys).sum(-1)
    unit_keys = keys / norms[..., None] ** 0.5
    return {
        "all dots": all_dots,
        "dot": _weights(queries, keys, Dot()),
        "scaled": _weights(queries, keys, ScaledDot()),
        "gaussian": _weights(queries, keys, Gaussian(bandwidth=1)),
        "dots over root": asp.masked_softmax(dots / sqrt(WIDTH)),
        "dots less norms": asp.masked_softmax(dots - norms[:, None, :] / 2),
        "unit dot": _weights(queries, unit_keys, Dot()),
        "unit gaussian": _weights(queries, unit_keys, Gaussian(bandwidth=1)),
    }


def _weights(queries: Any, keys: Any, score: Any) -> Any:
    return asp.inspect(queries, keys, keys, score=score).weights()


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    chosen = find(framework)
    arrays = chosen.compiled(_compute)(*chosen.draw(torch=_draw_torch, jax=_draw_jax))
    found = {name: to_host(array) for name, array in arrays.items()}
    spread = float(found["all dots"].std())
    apart = float(abs(found["dot"] - found["gaussian"]).max())

    checks = [
        near("dot scores over standard-normal inputs: standard deviation, √d", 4.0, spread, 0.2),
        near("the same scores over √d: standard deviation, 1", 1.0, spread / sqrt(WIDTH), 0.05),
        near(
            "the scaled score is the dot product over √d",
            found["dots over root"],
            found["scaled"],
            1e-6,
            book="the same weights",
        ),
        near(
            "the Gaussian without its −½‖q‖², which softmax removes",
            found["dots less norms"],
            found["gaussian"],
            2e-6,
            book="the same weights",
        ),
        near(
            "keys of equal norm: Gaussian and dot product",
            found["unit dot"],
            found["unit gaussian"],
            2e-6,
            book="the same weights",
        ),
        holds(
            "keys of unequal norm: Gaussian and dot product",
            "different weights",
            f"apart by up to {apart:.2f}",
            apart > 0.01,
        ),
    ]
    rows = [[found["dot"][0], found["gaussian"][0]], [found["unit dot"][0], found["unit gaussian"][0]]]
    titles = [["Dot, keys as drawn", "Gaussian, keys as drawn"], ["Dot, unit keys", "Gaussian, unit keys"]]
    figure = show_heatmaps(rows, "Keys", "Queries", titles=titles, figsize=(5.6, 4.0))
    caption = (
        "Weights of six queries over ten keys. Above, the Gaussian score prefers keys of small norm "
        "and the dot product does not; below, with all keys scaled to norm 1, the two agree."
    )
    return checks, [Picture(caption, figure)]


EXPERIMENT = Experiment(
    name="scores",
    covers="S1",
    title="Which terms of a score matter",
    claim=(
        "Of −½‖q − k‖² only qᵀk − ½‖k‖² survives the softmax, so with keys of equal norm the "
        "Gaussian and the dot product attend alike; dividing by √d keeps the scores at unit variance."
    ),
    measure=_measure,
)
