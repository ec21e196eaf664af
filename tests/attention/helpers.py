"""What the tests of attention share: frameworks, tolerances, and how results are compared."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.arrays import fetch
from attnspan.implementations import IMPLEMENTATIONS
from attnspan.request import request_of

NAN, INF = math.nan, math.inf

FRAMEWORKS = tuple(
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"no {name}"))
    for name in ("numpy", "torch", "jax")
)
TRACED = FRAMEWORKS[1:]  # those that differentiate and compile
DTYPES = {
    "numpy": ("float16", "float32", "float64"),
    "torch": ("float16", "bfloat16", "float32", "float64"),
    "jax": ("float16", "bfloat16", "float32", "float64"),
}
EVERY_DTYPE = tuple(
    pytest.param(*f.values, dtype, marks=f.marks) for f in FRAMEWORKS for dtype in DTYPES[f.values[0]]
)
EVERY_IMPLEMENTATION = tuple(
    pytest.param(*f.values, one.name, marks=f.marks) for f in FRAMEWORKS for one in IMPLEMENTATIONS
)
NAMES = tuple(one.name for one in IMPLEMENTATIONS)


def cases(names: Iterable[str], in_jax: Container[str]) -> list[Any]:
    """Cross frameworks and names; JAX compiles every operation of each, so most of its wait for the sweep."""
    return [
        pytest.param(
            str(f.values[0]),
            name,
            marks=[*f.marks, *([] if f.values != ("jax",) or name in in_jax else [pytest.mark.sweep])],
        )
        for f in FRAMEWORKS
        for name in names
    ]


# Tolerances: |given - wanted| <= arithmetic * scale + rounding * |wanted|, where scale is the largest
# value that enters the sum (at least 1). The arithmetic runs in float64 for float64 and else in float32, a
# few dozen roundings of 6e-8; half types are rounded once more on the way out, by half a unit of their
# last place (and float16 loses what lies below its smallest number). PyTorch's flash kernel also rounds
# the weights to the half type before they meet the values.
@dataclass(frozen=True)
class Tolerance:
    arithmetic: float
    rounding: float = 0.0
    smallest: float = 0.0


TOLERANCES = {
    "float64": Tolerance(1e-12),
    "float32": Tolerance(2e-6),
    "float16": Tolerance(2e-6, 2.0**-11, 2.0**-25),
    "bfloat16": Tolerance(2e-6, 2.0**-8),
}
ROUNDS_WEIGHTS = {"sdpa"}


def close(given: Any, wanted: Any, dtype: str, scale: float = 1.0, weights: float = 0.0) -> None:
    """Hold a result against the oracle's; a NaN on either side fails, an infinity must be the same.

    `weights` is the largest value that a rounded weight multiplies.
    """
    given, wanted = np.asarray(given, np.float64), np.asarray(wanted, np.float64)
    assert given.shape == wanted.shape
    assert not np.isnan(given).any(), "NaN in what was computed"
    assert not np.isnan(wanted).any(), "NaN in the oracle"
    infinite = np.isinf(wanted)
    assert (given[infinite] == wanted[infinite]).all()
    given, wanted = np.where(infinite, 0, given), np.where(infinite, 0, wanted)
    t = TOLERANCES[dtype]
    allowed = t.arithmetic * max(scale, 1.0) + t.rounding * (np.abs(wanted) + weights) + t.smallest
    beyond = np.max(np.abs(given - wanted) - allowed, initial=-INF)
    assert beyond <= 0, f"{beyond:.3g} beyond what {dtype} allows\n{given}\n{wanted}"


def same_bits(given: Any, wanted: Any) -> None:
    """Hold two results of the library against each other: dtype, shape and every bit (NaN equals NaN)."""
    assert given.dtype == wanted.dtype
    given, wanted = raw(given), raw(wanted)
    assert given.shape == wanted.shape
    assert given.tobytes() == wanted.tobytes(), f"{given}\n{wanted}"


# Frameworks ------------------------------------------------------------------------------------------


def precision(framework: str, dtype: str) -> contextlib.AbstractContextManager:
    """Let JAX have float64 where the test is about it."""
    if framework == "jax" and dtype == "float64":
        import jax

        return jax.enable_x64(True)
    return contextlib.nullcontext()


def rounded(x: Any, dtype: str) -> np.ndarray:
    """Give float64 values that `dtype` holds exactly."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return x.astype(dtype).astype(np.float64)
        bits = x.astype(np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to even; NaN is not drawn here
    return np.where(np.isnan(x), NAN, nearest.astype(np.uint32).view(np.float32))


def array(x: Any, framework: str, dtype: str | None = None) -> Any:
    """Bring a NumPy array (or list) into a framework; dtype None keeps integers and booleans."""
    x = np.asarray(x)
    if framework == "torch":
        import torch

        return torch.tensor(x) if dtype is None else torch.tensor(x).to(getattr(torch, dtype))
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x) if dtype is None else jnp.asarray(x, dtype=dtype)
    return x if dtype is None else x.astype(dtype)


def raw(x: Any) -> np.ndarray:
    """Bring a result to NumPy in its own dtype (bfloat16 as the float32 that holds it)."""
    return np.array(fetch(x), order="C")


def values(x: Any) -> np.ndarray:
    """Bring a result to float64."""
    return np.asarray(raw(x), np.float64)


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


# Implementations -------------------------------------------------------------------------------------


def reasons(name: str, *qkv: Any, **options: Any) -> list[str]:
    """Give an implementation's own reasons against a call."""
    (one,) = (x for x in IMPLEMENTATIONS if x.name == name)
    return one.reasons_against(request_of(*qkv, **options))


def runs(name: str, *qkv: Any, **options: Any) -> bool:
    """Tell whether an implementation takes a call; where it doesn't, naming it must list its reasons."""
    against = reasons(name, *qkv, **options)
    if against:
        with pytest.raises(asp.NotSupportedError) as caught:
            asp.attention(*qkv, **options, implementation=name)
        assert f"implementation={name!r} cannot do this" in str(caught.value)
        assert all(reason in str(caught.value) for reason in against)
    return not against
