"""The layer DotProductAttention, with valid lengths and dropout that evaluation turns off."""

from __future__ import annotations

from typing import Any

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds, near
from attnspan.masks import ValidLens
from attnspan.plots import show_heatmaps
from attnspan.plots.host import to_host

__all__ = ["EXPERIMENT"]

LENGTHS = [2, 6]


def _draw_torch() -> tuple[Any, ...]:
    import torch

    torch.manual_seed(0)
    return torch.randn(2, 1, 2), torch.randn(2, 10, 2), torch.randn(2, 10, 4)


def _draw_jax() -> tuple[Any, ...]:
    import jax

    from attnspan.book.jax import normal

    shapes = ((2, 1, 2), (2, 10, 2), (2, 10, 4))
    return tuple(normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))


def _layer_torch(*arrays: Any) -> tuple[Any, Any]:
    from attnspan.torch import DotProductAttention

    layer = DotProductAttention(dropout=0.5).eval()
    return layer(*arrays), layer.attention_weights


def _layer_jax(*arrays: Any) -> tuple[Any, Any]:
    from flax import nnx

    from attnspan.jax import DotProductAttention

    layer = DotProductAttention(dropout=0.5, rngs=nnx.Rngs(0))
    return nnx.view(layer, deterministic=True)(*arrays)


def _function(queries: Any, keys: Any, values: Any, lengths: Any) -> tuple[Any, Any]:
    """Compute the layer's output without the layer, and once more from the inspected weights."""
    seen = asp.inspect(queries, keys, values, mask=ValidLens(lengths))
    return seen.out, seen.weights() @ values


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    chosen = find(framework)
    arrays = (*chosen.draw(torch=_draw_torch, jax=_draw_jax), chosen.array(LENGTHS))
    layer = chosen.compiled({"torch": _layer_torch, "jax": _layer_jax}[framework])
    out, weights = layer(*arrays)
    plain, weighed = chosen.compiled(_function)(*arrays)
    rows = to_host(weights)[:, 0]  # (B, S)
    beyond = [float(abs(row[n:]).max()) for row, n in zip(rows, LENGTHS, strict=True)]
    checks = [
        holds("P7 shape of the output", "(2, 1, 4)", tuple(out.shape), out.shape == (2, 1, 4)),
        near("P7 first sequence: weights from the third key on", 0.0, beyond[0], 0.0),
        near("P7 second sequence: weights from the seventh key on", 0.0, beyond[1], 0.0),
        holds(
            "P7 weights before that",
            "positive",
            f"{(rows[0] > 0).sum()} and {(rows[1] > 0).sum()} keys",
            (rows[0, :2] > 0).all() and (rows[1, :6] > 0).all(),
        ),
        near("P7 sums of the weights: dropout is off in evaluation", 1.0, rows.sum(-1), 1e-6),
        near("the layer beside the function", plain, out, 1e-6, book="the same output"),
        near(
            "the weights, applied to the values",
            out,
            weighed,
            1e-6,
            book="the same output",
        ),
    ]
    figure = show_heatmaps(to_host(weights).reshape(1, 1, 2, 10), "Keys", "Queries", figsize=(4.6, 1.8))
    caption = (
        "Weights of one query in each of two sequences: they vanish from the third key on in the "
        "first, and from the seventh on in the second."
    )
    return checks, [Picture(caption, figure)]


EXPERIMENT = Experiment(
    name="dot-product",
    covers="S7, P7",
    title="Scaled dot-product attention as a layer",
    claim=(
        "The layer weighs values by softmax(QKᵀ/√d) over the valid keys alone, and evaluation "
        "turns its dropout off."
    ),
    measure=_measure,
)
