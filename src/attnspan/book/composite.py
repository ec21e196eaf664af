"""Masks composed: padding and causal, and documents packed into one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds, near
from attnspan.masks import Causal, Documents, ValidLens
from attnspan.plots import plot_mask, show_heatmaps
from attnspan.plots.host import to_host

__all__ = ["EXPERIMENT"]

LENGTH = 6
DOCUMENTS = np.array([0, 0, 0, 0, 1, 1])


def _draw_torch() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.randn(2, LENGTH, LENGTH)


def _draw_jax() -> Any:
    import jax

    from attnspan.book.jax import normal

    return normal(jax.random.key(0), (2, LENGTH, LENGTH))


def _compute(scores: Any, lengths: Any, padding: Any, causal: Any) -> dict[str, Any]:
    return {
        "booleans": asp.masked_softmax(scores, mask=padding & causal),  # (B, L, S) by broadcasting
        "masks": asp.masked_softmax(scores, mask=ValidLens(lengths) & Causal()),
        "lengths and mask": asp.masked_softmax(scores, lengths, mask=Causal()),
        "packed": asp.masked_softmax(scores, mask=Documents(DOCUMENTS) & Causal()),
        "first alone": asp.masked_softmax(scores[:, :4, :4], mask=Causal()),
        "second alone": asp.masked_softmax(scores[:, 4:, 4:], mask=Causal()),
    }


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    chosen = find(framework)
    scores = chosen.draw(torch=_draw_torch, jax=_draw_jax)
    lengths = np.array([6, 3])
    causal = np.tril(np.ones((1, LENGTH, LENGTH), bool))  # (1, L, S)
    padding = np.arange(LENGTH)[None, None, :] < lengths[:, None, None]  # (B, 1, S)
    arrays = chosen.compiled(_compute)(scores, *(chosen.array(x) for x in (lengths, padding, causal)))
    found = {name: to_host(array) for name, array in arrays.items()}
    rows, packed = found["booleans"], found["packed"]
    visible = padding & causal
    packed_mask = Documents(DOCUMENTS) & Causal()
    block = (DOCUMENTS[:, None] == DOCUMENTS[None, :]) & causal[0]

    checks = [
        near("P5 weights of excluded pairs, the largest", 0.0, rows[~visible].max(), 0.0),
        near("P5 row sums", 1.0, rows.sum(-1), 1e-6),
        holds(
            "P5 keys that the last query sees, per sequence",
            "6 3",
            " ".join(str(n) for n in (rows[:, -1] > 0).sum(-1)),
            ((rows[:, -1] > 0).sum(-1) == lengths).all(),
        ),
        near(
            "boolean arrays beside ValidLens(lens) & Causal()",
            rows,
            found["masks"],
            1e-6,
            book="the same weights",
        ),
        near(
            "lengths and a mask in one call",
            rows,
            found["lengths and mask"],
            1e-6,
            book="the same weights",
        ),
        holds(
            "packed sequences: documents AND causal",
            "block-diagonal and lower triangular",
            f"{int(packed_mask.visible_pairs(LENGTH, LENGTH))} of {LENGTH**2} pairs visible",
            (packed_mask.dense(LENGTH, LENGTH) == block).all(),
        ),
        near(
            "the first document packed, beside the same alone",
            found["first alone"],
            packed[:, :4, :4],
            1e-6,
            book="the same weights",
        ),
        near(
            "the second document packed, beside the same alone",
            found["second alone"],
            packed[:, 4:, 4:],
            1e-6,
            book="the same weights",
        ),
    ]
    titles = ["length 6, causal", "length 3, causal", "packed 4 + 2, causal"]
    heat = show_heatmaps(
        [[rows[0], rows[1], packed[0]]], "Keys", "Queries", titles=titles, figsize=(7.2, 2.5)
    )
    picture = plot_mask(packed_mask, LENGTH, LENGTH, title="Documents & Causal", figsize=(2.7, 2.8))
    return checks, [
        Picture(
            "Weights under composed masks: a full sequence, one padded after three keys, and two "
            "documents of four and two tokens that share a sequence without seeing each other.",
            heat,
        ),
        Picture("The packed mask itself: blue pairs are visible.", picture),
    ]


EXPERIMENT = Experiment(
    name="composite",
    covers="S5, P5",
    title="Masks compose",
    claim=(
        "Padding AND causal is one boolean array by broadcasting, and documents AND causal packs "
        "several texts into one sequence with the weights that each has alone."
    ),
    measure=_measure,
)
