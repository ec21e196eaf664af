"""The masked softmax, with a length per sequence and with a length per query."""

from __future__ import annotations

from typing import Any

import numpy as np

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds, near, printed_rows
from attnspan.plots import show_heatmaps
from attnspan.plots.host import to_host

__all__ = ["EXPERIMENT", "PER_QUERY", "PER_SEQUENCE"]

# P3; rows of both sequences, one after the other.
PER_SEQUENCE = {
    "torch": ".7005 .2995 0 0 / .5080 .4920 0 0 / .2296 .3997 .3707 0 / .1914 .4130 .3956 0",
    "jax": (
        ".4922724 .5077276 0 0 / .5997409 .40025908 0 0 / "
        ".3531402 .19856434 .4482954 0 / .31042197 .2873157 .40226236 0"
    ),
}
PER_QUERY = {
    "jax": (
        "1 0 0 0 / .35672572 .2543091 .38896522 0 / "
        ".43679553 .5632045 0 0 / .2580636 .2509437 .258296 .23269679"
    ),
}


def _draw_torch() -> tuple[Any, Any]:
    """Draw as the book does: this listing goes on where the one of P2 left the generator."""
    import torch

    torch.manual_seed(0)
    for d in (4, 4, 64, 64, 512, 512):
        torch.randn(256, d)
        torch.randn(256, 64, d)
    return torch.rand(2, 2, 4), torch.rand(2, 2, 4)


def _draw_jax() -> tuple[Any, Any]:
    import jax

    from attnspan.book.jax import uniform

    return uniform(jax.random.key(0), (2, 2, 4)), uniform(jax.random.key(1), (2, 2, 4))


def _compute(
    first: Any, second: Any, lengths: Any, lengths_per_query: Any, none_first: Any
) -> tuple[Any, ...]:
    return (
        asp.masked_softmax(first, lengths),
        asp.masked_softmax(second, lengths_per_query),
        asp.masked_softmax(first, none_first),
    )


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    chosen = find(framework)
    first, second = chosen.draw(torch=_draw_torch, jax=_draw_jax)
    lengths = [chosen.array(lens) for lens in ([2, 3], [[1, 3], [2, 4]], [0, 3])]
    arrays = chosen.compiled(_compute)(first, second, *lengths)
    per_sequence, per_query, empty = (to_host(weights) for weights in arrays)

    checks = printed_rows("P3 lengths (2, 3)", PER_SEQUENCE[framework], per_sequence)
    if framework in PER_QUERY:
        checks += printed_rows("P3 lengths ((1, 3), (2, 4))", PER_QUERY[framework], per_query)
    checks += _structure("lengths (2, 3)", per_sequence, [[2, 2], [3, 3]])
    checks += _structure("lengths ((1, 3), (2, 4))", per_query, [[1, 3], [2, 4]])
    checks.append(near("rows with no valid key, largest weight", 0.0, empty[0].max(), 0.0))
    checks.append(near("rows of the other sequence", per_sequence[1], empty[1], 0.0, book="unchanged"))
    figure = show_heatmaps(
        [[*per_sequence, *per_query]],
        "Keys",
        "Queries",
        titles=["length 2", "length 3", "lengths 1, 3", "lengths 2, 4"],
        figsize=(7.2, 1.5),
    )
    caption = (
        "Weights of two queries over four keys. Left, one length for each of two sequences; right, "
        "one length for each query. Keys beyond the length have weight 0."
    )
    return checks, [Picture(caption, figure)]


def _structure(name: str, rows: np.ndarray, lengths: list[list[int]]) -> list[Check]:
    """Check what holds for any scores: zeros beyond each length, rows that sum to 1."""
    beyond = max(
        float(abs(rows[b, i, length:]).max(initial=0.0))
        for b, per_row in enumerate(lengths)
        for i, length in enumerate(per_row)
    )
    return [
        holds(f"P3 {name}: weights beyond", "0", f"{beyond:g}", beyond == 0),
        near(f"P3 {name}: row sums", 1.0, rows.sum(-1), 1e-6),
    ]


EXPERIMENT = Experiment(
    name="softmax",
    covers="S3, P3",
    title="The masked softmax",
    claim=(
        "Keys beyond the valid length get weight exactly 0, the others share 1 as if the rest were "
        "not there, and a query with no valid key gets zeros, never NaN."
    ),
    measure=_measure,
)
