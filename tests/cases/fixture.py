"""Fixture F of the bug reports: four keys whose weights are .1 .2 .3 .4, and values that show what leaked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnspan as asp
from attnspan.implementations import IMPLEMENTATIONS
from attnspan.request import request_of
from attnspan.scores import Dot

LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "numpy": np.asarray,
    "torch": lambda x: torch.from_numpy(np.array(x)),
    "jax": jnp.asarray,
}
KEYS = np.log(np.array([1.0, 2.0, 3.0, 4.0], np.float32)).reshape(1, 1, 4, 1)
VALUES = np.array([1.0, 10.0, 100.0, 1000.0], np.float32).reshape(1, 1, 4, 1)


def arrays(library: str, B: int = 1, H: int = 1, L: int = 4, S: int = 4, ndim: int = 4) -> list[Any]:
    """q, k, v of fixture F, repeated over batch and heads."""
    q = np.ones((B, H, L, 1), np.float32)
    k, v = (np.broadcast_to(x[:, :, :S], (B, H, S, 1)) for x in (KEYS, VALUES))
    made = [q, k, v]
    if ndim == 3:
        made = [x[:, 0] for x in made]
    if ndim == 5:
        made = [x[:, None] for x in made]
    return [LIBRARIES[library](x) for x in made]


PATHS = [
    (library, one.name)
    for library in LIBRARIES
    for one in IMPLEMENTATIONS
    if not one.reasons_against(request_of(*arrays(library)))
]
every_path = pytest.mark.parametrize(("library", "implementation"), PATHS)
every_library = pytest.mark.parametrize("library", list(LIBRARIES))


def outputs(
    library: str,
    implementation: str,
    mask: Any = None,
    *,
    shape: dict[str, int] | None = None,
    **options: Any,
) -> np.ndarray:
    """Attend on fixture F; skips where this implementation says why it cannot."""
    q, k, v = arrays(library, **(shape or {}))
    options = {"score": Dot(), "mask": mask, **options}
    skip_refused(implementation, q, k, v, options)
    return np.asarray(asp.attention(q, k, v, implementation=implementation, **options), np.float64)


def skip_refused(implementation: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    one = next(one for one in IMPLEMENTATIONS if one.name == implementation)
    reasons = one.reasons_against(request_of(q, k, v, **options))
    if reasons:
        with pytest.raises(asp.NotSupportedError, match=implementation):
            asp.attention(q, k, v, implementation=implementation, **options)
        pytest.skip(f"{implementation} says: {'; '.join(reasons)}")


def close(ours: Any, right: Any, tolerance: float = 2e-6) -> None:
    """Compare, relative to the largest value; NaN on either side fails."""
    ours, right = np.asarray(ours, np.float64), np.asarray(right, np.float64)
    assert ours.shape == np.broadcast_shapes(ours.shape, right.shape)
    assert np.isfinite(ours).all(), ours
    assert np.isfinite(right).all(), right
    assert (np.abs(ours - right) <= tolerance * np.maximum(1, np.abs(right))).all(), (ours, right)
