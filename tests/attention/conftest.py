"""These tests are many and small: starting threads and optimizing programs would take most of their time.

What an optimizer might move is tested where it is asked for (`test_inspect.py`), and in the sweep.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


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


@pytest.fixture(autouse=True, scope="package")
def quick_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    if not importlib.util.find_spec("jax") or request.config.option.markexpr == "sweep":
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
