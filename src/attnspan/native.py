"""The native core: is it here, and its functions for arrays of each library.

`attnspan._native` is compiled when attnspan is installed. Where that failed everything but this file
works as before, and `load` says what is missing. NumPy's and PyTorch's arrays are handed over as
address, shape and strides; JAX's through an XLA FFI call, in and outside `jit`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

import numpy as np

from attnspan.arrays import (
    TITLES,
    accumulation_dtype,
    framework,
    is_floating,
    is_torch_compiling,
    is_transformed,
)
from attnspan.errors import ArgumentError, MissingDependencyError, describe, refusal
from attnspan.masks.bound import Bound

__all__ = ["default_threads", "load", "masked_softmax"]

TARGET = "attnspan_masked_softmax"
"""The name that XLA knows the function by."""


@functools.cache
def load() -> Any:
    """Give the compiled module.

    Raises
    ------
    MissingDependencyError
        If it was not compiled, or does not load here; the message says which.
    ArgumentError
        If the environment variable ATTNSPAN_ISA names no instruction set of this machine.
    """
    try:
        module = importlib.import_module("attnspan._native")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "the native core is not installed: it did not compile when attnspan was installed; "
            "`attnspan doctor` says how to see why"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(f"the native core does not load: {error}") from error
    try:
        module.isa()
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    return module


def default_threads() -> int:
    """Give as many threads as PyTorch uses, if it is there, and else as many as this process has cores."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def masked_softmax(
    scores: Any, bound: Bound, *, threads: int | None = None, executor: str = "auto"
) -> tuple[Any, Any]:
    """Give (weights, log-sum-exp) over the last axis, of the keys that a bound mask shows.

    What is excluded is not read, and a score of -inf excludes too. A row that sees nothing has
    weights 0 and log-sum-exp -inf; one that sees NaN or +inf is NaN where it sees, and 0 elsewhere.
    It has no gradient.

    Parameters
    ----------
    scores : array
        ``(B, H, L, S)``, any strides: NumPy, PyTorch on the CPU without gradient, or JAX.
    bound : Bound
        From ``mask.bound(L, S, like=scores)``.
    threads : int, optional
        For NumPy and PyTorch; JAX computes on XLA's own threads. No result depends on it.
    executor : str
        For NumPy and PyTorch: "pool" are threads of our own, "openmp" are those PyTorch has loaded,
        "auto" is openmp where it is loaded.

    Returns
    -------
    weights, lse : array
        ``(B, H, L, S)`` in the dtype of `scores`; ``(B, H, L)`` float64 for float64, else float32.

    Raises
    ------
    ArgumentError
        If an array is of another kind, shape or dtype, or the intervals are not in the bound form.
    MissingDependencyError
        As `load`.
    """
    kind = framework(scores)
    if kind is None or not is_floating(scores) or len(scores.shape) != 4:
        raise refusal("scores", scores, "a floating-point array (B, H, L, S)")
    arrays = [bound.spans.start, bound.spans.stop, *([bound.bits.words] if bound.bits else [])]
    for array, dtype in zip(arrays, ("int32", "int32", "uint8"), strict=False):
        if framework(array) != kind or str(array.dtype).removeprefix("torch.") != dtype:
            given = f"{describe(array)} of {TITLES.get(str(framework(array)), 'no array library')}"
            needed = f"{dtype} of {TITLES[kind]}"
            raise refusal("bound", given, needed, "bind with mask.bound(L, S, like=scores)")
        if len(array.shape) != 4:
            raise refusal("bound", array, "four axes (B|1, H|1, L|1, ...)")
    if kind == "jax":
        return _jax_softmax(scores, arrays)
    return _host_softmax(kind, scores, arrays, default_threads() if threads is None else threads, executor)


def _host_softmax(kind: str, scores: Any, arrays: list[Any], threads: int, executor: str) -> tuple[Any, Any]:
    if executor not in ("auto", "pool", "openmp"):
        raise refusal("executor", executor, "auto, pool or openmp")
    if not isinstance(threads, int) or threads < 1:
        raise refusal("threads", threads, "1 or more")
    module = load()
    if executor == "openmp" and not module.openmp_loaded():
        raise refusal("executor", executor, "auto or pool", "import torch first: OpenMP is not loaded")
    describe_array = _numpy_array if kind == "numpy" else _torch_array
    rows, dtype = tuple(scores.shape[:-1]), accumulation_dtype(scores)
    if kind == "numpy":
        arrays = [_walkable(x) for x in arrays]
        scores = _walkable(scores)
        weights, lse = np.empty(scores.shape, scores.dtype), np.empty((*rows, 1), dtype)
    else:
        _check_torch(scores)
        scores = scores.resolve_neg()
        torch = sys.modules["torch"]
        weights = torch.empty(scores.shape, dtype=scores.dtype)
        lse = torch.empty((*rows, 1), dtype=dtype)
    start, stop, *bits = map(describe_array, arrays)
    try:
        module.masked_softmax(
            dtype=str(scores.dtype).removeprefix("torch."),
            scores=describe_array(scores),
            start=start,
            stop=stop,
            bits=bits[0] if bits else None,
            weights=describe_array(weights),
            lse=describe_array(lse),
            threads=threads,
            executor=executor,
        )
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    return weights, lse[..., 0]


def _walkable(x: np.ndarray) -> np.ndarray:
    """Copy an array whose strides or address are no multiples of its elements', as in a packed record."""
    fits = x.flags.aligned and all(step % x.itemsize == 0 for step in x.strides)
    return x if fits else x.copy()


def _numpy_array(x: np.ndarray) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Give address, shape, and strides in elements."""
    strides = tuple(step // x.itemsize for step in x.strides)
    return x.__array_interface__["data"][0], x.shape, strides


def _torch_array(x: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), tuple(x.shape), x.stride()


def _check_torch(scores: Any) -> None:
    torch = sys.modules["torch"]
    if is_torch_compiling() or is_transformed(scores):
        raise refusal("scores", "a tensor inside torch.compile or torch.func", "a plain tensor")
    if scores.device.type != "cpu" or scores.layout != torch.strided:
        raise refusal("scores", f"a {scores.layout} tensor on {scores.device}", "a dense tensor on the CPU")
    if scores.requires_grad and torch.is_grad_enabled():
        raise refusal("scores", "a tensor that requires a gradient", "one that does not", "scores.detach()")


def _jax_softmax(scores: Any, arrays: list[Any]) -> tuple[Any, Any]:
    _register()
    jax = sys.modules["jax"]
    results = (
        jax.ShapeDtypeStruct(scores.shape, scores.dtype),
        jax.ShapeDtypeStruct(scores.shape[:-1], accumulation_dtype(scores)),
    )
    # expand_dims: under vmap, what is not mapped gets an axis of 1 and is not copied
    weights, lse = jax.ffi.ffi_call(TARGET, results, vmap_method="expand_dims")(scores, *arrays)
    return weights, lse


@functools.cache
def _register() -> None:
    """Tell XLA of the function, once a process."""
    handler = load().softmax_handler()
    importlib.import_module("jax.ffi").register_ffi_target(TARGET, handler, platform="cpu")
