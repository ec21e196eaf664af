"""These tests are many and small: one thread is faster than waking several."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from attnspan.implementations import tiled


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    if not importlib.util.find_spec("torch"):
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even these small requests into several tiles, whose sizes divide none of their lengths.

    Compilers take long over loops: only `test_tiled.py` has them do so.
    """
    if "compiled" not in request.node.name and "jax" not in request.node.name:
        monkeypatch.setattr(tiled, "TILE", (3, 2))
