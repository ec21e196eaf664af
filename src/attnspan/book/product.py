"""The batch matrix product, the one heavy operation of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import attnspan as asp
from attnspan.book.frameworks import find
from attnspan.book.record import Check, Experiment, Picture, holds, near
from attnspan.errors import ArgumentError
from attnspan.scores import Dot
from attnspan.shapes import check_shape

__all__ = ["EXPERIMENT"]


def _compute(queries: Any, keys: Any, keys_transposed: Any) -> dict[str, Any]:
    product = queries @ keys_transposed
    seen = asp.inspect(queries, keys, keys, score=Dot())
    weights = seen.weights()
    return {
        "product": product,
        "softmax": asp.masked_softmax(product),
        "weights": weights,
        "weights times values": weights @ keys,
        "out": seen.out,
    }


def _measure(framework: str) -> tuple[list[Check], list[Picture]]:
    array = find(framework).array
    queries = np.linspace(-1, 1, 2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    keys = np.linspace(1, -2, 2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    transposed = np.swapaxes(keys, 1, 2).copy()
    found = find(framework).compiled(_compute)(array(queries), array(keys), array(transposed))
    product = found["product"]
    checks = [
        _has_shape("P6 (2, 3, 4) × (2, 4, 6)", product, (2, 3, 6)),
        _has_shape("weights of 3 queries over 6 keys", found["weights"], (2, 3, 6)),
        _has_shape("weights (2, 3, 6) × values (2, 6, 4)", found["out"], (2, 3, 4)),
        near(
            "softmax of the product, beside attention's own weights",
            found["softmax"],
            found["weights"],
            1e-6,
            book="the same weights",
        ),
        near(
            "weights × values as a batch product, beside attention's output",
            found["weights times values"],
            found["out"],
            1e-6,
            book="the same output",
        ),
        _refuses(product, (2, 6, 3)),
    ]
    return checks, []


def _has_shape(name: str, a: Any, shape: tuple[int, ...]) -> Check:
    try:
        check_shape(a, shape)
    except ArgumentError as error:
        return holds(name, str(shape), error, False)
    return holds(name, str(shape), tuple(a.shape), True)


def _refuses(a: Any, shape: tuple[int, ...]) -> Check:
    name = f"the shape check, asked for {shape}"
    try:
        check_shape(a, shape)
    except ArgumentError as error:
        return holds(name, "refused", error, True)
    return holds(name, "refused", "accepted", False)


EXPERIMENT = Experiment(
    name="product",
    covers="S6, P6",
    title="Attention is two batch products",
    claim=(
        "Multiplying n matrices (a, b) with n matrices (b, c) gives n matrices (a, c); queries times "
        "keys gives the scores, and weights times values gives the output."
    ),
    measure=_measure,
)
