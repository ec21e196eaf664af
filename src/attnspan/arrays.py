"""The three array libraries: whose array is this, may its values be looked at, which namespace.

Everything above this file is written once, against the array-API namespace `xp`. What the
standard lacks (packed bits, a batched binary search, stop-gradient) stands here, one short
branch a library. A library counts only if somebody already imported it.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from attnspan.errors import AttnspanError, MissingDependencyError, describe

__all__ = [
    "TITLES",
    "accumulation_dtype",
    "arange",
    "as_written",
    "constant",
    "counts",
    "cumulative_max",
    "cumulative_sum",
    "device_of",
    "fetch",
    "framework",
    "full_like_shape",
    "has_tangent",
    "is_array",
    "is_boolean",
    "is_floating",
    "is_integer",
    "is_torch_compiling",
    "is_transformed",
    "look",
    "namespace",
    "pack_bits",
    "pinned",
    "search_sorted",
    "segment",
    "stop_gradient",
    "unpack_bits",
    "xp_of",
]


TITLES = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX"}
"""The libraries as their makers write them."""


def framework(x: Any) -> str | None:
    """Name the library that `x` belongs to: "numpy", "torch", "jax", or None for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return None


def is_array(x: Any) -> bool:
    """Tell whether `x` is an array of one of the three libraries."""
    return framework(x) is not None


def namespace(name: str) -> Any:
    """Give the array-API namespace of a library by its name."""
    if name == "numpy":
        return np
    if name == "jax":
        return sys.modules["jax.numpy"]
    try:
        import array_api_compat.torch as xp
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            'PyTorch arrays need the package array-api-compat: pip install "attnspan[torch]"'
        ) from error
    return xp


def xp_of(x: Any) -> Any:
    """Give the array-API namespace of an array; NumPy's for anything that is none."""
    return namespace(framework(x) or "numpy")


def arange(n: int, like: Any, dtype: Any = None) -> Any:
    """Count from 0 to n in the library and on the device of `like`."""
    on = {"device": like.device} if framework(like) == "torch" else {}
    return xp_of(like).arange(n, dtype=dtype, **on)


def device_of(x: Any) -> Any:
    """Give the device new arrays must be made on (None leaves it to JAX, whose tracers have none)."""
    return x.device if framework(x) == "torch" else None


def is_torch_compiling() -> bool:
    """Tell whether torch.compile or torch.export is tracing this call."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def is_transformed(x: Any) -> bool:
    """Tell whether a torch tensor is inside torch.func's transforms or carries a forward tangent."""
    if is_torch_compiling():  # what is traced is differentiated by the compiler
        return False
    return _is_wrapped(x) or has_tangent(x)


def has_tangent(x: Any) -> bool:
    """Tell whether an array is seen to carry a forward tangent, or may in torch.func's transforms."""
    kind = framework(x)
    if kind == "torch":
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
            return False
        return _is_wrapped(x) or torch.autograd.forward_ad.unpack_dual(x).tangent is not None
    if kind == "jax":
        jax = sys.modules["jax"]
        while isinstance(x, jax.core.Tracer):  # a tracer of grad or vmap may hold one of jvp
            if isinstance(x, jax.interpreters.ad.JVPTracer):
                return True
            x = getattr(x, "primal", getattr(x, "val", None))
    return False


def _is_wrapped(x: Any) -> bool:
    """Tell whether a torch tensor is inside torch.func's transforms, outside torch.compile."""
    torch = sys.modules["torch"]
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x)


def look(x: Any) -> np.ndarray | None:
    """Give the values of `x` if looking costs nothing, else None.

    The one place that decides what "seen" means: NumPy, CPU torch and CPU JAX arrays outside
    compile, vmap and tracing. Everywhere else nothing synchronises and no value is checked.
    """
    kind = framework(x)
    if kind == "numpy":
        return None if is_torch_compiling() else np.asarray(x)
    if kind == "torch":
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return None
        inside = torch._C._functorch.maybe_current_level() is not None  # there even detach() wraps
        if x.device.type != "cpu" or inside:
            return None
        return _torch_to_numpy(x)
    if kind == "jax":
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return None
        if not x.is_fully_addressable or any(d.platform != "cpu" for d in x.devices()):
            return None
        return np.asarray(x)
    return None


def fetch(x: Any) -> np.ndarray:
    """Bring the values of `x` to the host because the caller asked for them, waiting if need be."""
    seen = look(x)
    if seen is not None:
        return seen
    kind = framework(x)
    try:
        if kind == "torch" and not is_torch_compiling():
            return _torch_to_numpy(x.cpu())
        if kind == "jax":
            return np.asarray(x)
    except Exception as error:
        raise AttnspanError(_NO_VALUES.format(describe(x))) from error
    raise AttnspanError(_NO_VALUES.format(describe(x)))


_NO_VALUES = (
    "the values of a traced array ({}) are not known here: ask this question outside jit, compile and vmap"
)


def _torch_to_numpy(x: Any) -> np.ndarray:
    x = x.detach().resolve_conj().resolve_neg()
    if str(x.dtype) == "torch.bfloat16":  # NumPy has no bfloat16; float32 holds it exactly
        x = x.float()
    return x.numpy()


def constant(x: Any, xp: Any, device: Any) -> Any:
    """Bring a host array (NumPy) into the library `xp`; arrays already there pass through.

    Integers narrower than 32 bits, or unsigned, become int64 (int32 in JAX), so that arithmetic with
    positions neither wraps nor fails; what does not fit becomes the largest that does.
    """
    if framework(x) == "numpy" and str(x.dtype) in ("int64", "uint64"):
        x = _saturated(x, np.int64 if device is not None or xp is np else np.int32)
    if framework(x) == "numpy" and str(x.dtype) == "bfloat16":  # of ml_dtypes, which PyTorch does not know
        x = x.astype(np.float32)
    if device is None:
        x = xp.asarray(x)
    elif framework(x) == "torch":
        x = x.to(device)  # torch.asarray would cut a parameter off from its gradient
    else:
        if framework(x) == "numpy" and not is_torch_compiling():
            # PyTorch takes no backward strides, and warns of memory it may not write to
            x = x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy()
        x = xp.asarray(x, device=device)
    if is_integer(x) and x.dtype not in (xp.int32, xp.int64):
        x = xp.astype(x, xp.int64 if device is not None or xp is np else xp.int32)
    return x


def _saturated(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Narrow 64-bit integers to `dtype` without wrapping; an array of that dtype passes through."""
    if x.dtype == dtype:
        return x
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.clip(x, 0 if x.dtype.kind == "u" else low, high).astype(dtype)


def full_like_shape(xp: Any, device: Any, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
    """Make an array of one value (JAX traces choose their own device)."""
    if device is None:
        return xp.full(shape, value, dtype=dtype)
    return xp.full(shape, value, dtype=dtype, device=device)


def is_boolean(x: Any) -> bool:
    """Tell whether an array holds booleans."""
    return str(x.dtype).removeprefix("torch.") == "bool"


def is_integer(x: Any) -> bool:
    """Tell whether an array holds integers (booleans are not)."""
    return str(x.dtype).removeprefix("torch.").startswith(("int", "uint"))


def is_floating(x: Any) -> bool:
    """Tell whether an array holds real floating-point numbers of 16, 32 or 64 bits."""
    return str(x.dtype).removeprefix("torch.") in ("float16", "bfloat16", "float32", "float64")


def accumulation_dtype(x: Any) -> Any:
    """Give the dtype sums over `x` run in: float64 for float64, else float32."""
    xp = xp_of(x)
    return xp.float64 if str(x.dtype).removeprefix("torch.") == "float64" else xp.float32


def as_written(x: Any) -> Any:
    """Give a context in which the library of `x` computes what is written, and no more.

    NumPy does not warn of what excluded entries may hold, and PyTorch's autocast does not turn
    sums meant for float32 into bfloat16.
    """
    kind = framework(x)
    if kind == "numpy":
        return np.errstate(over="ignore", invalid="ignore", divide="ignore")
    if kind == "torch":
        torch, device = sys.modules["torch"], x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.autocast(device, enabled=False)
    return nullcontext()


def pinned(x: Any) -> Any:
    """Keep the values of `x` the same for all who use them.

    XLA may compute an array once for each use, each rounded its own way, and then x == max(x) may hold
    nowhere. An optimization barrier goes too early to prevent that; what a loop carries stays.
    """
    if framework(x) != "jax" or not isinstance(x, sys.modules["jax"].core.Tracer):
        return x  # it stands in memory already
    jax = sys.modules["jax"]
    return jax.lax.fori_loop(0, 2, lambda i, y: jax.numpy.where(i == 0, x, y), jax.numpy.zeros_like(x))


def stop_gradient(x: Any) -> Any:
    """Cut `x` off from differentiation."""
    kind = framework(x)
    if kind == "torch":
        return x.detach()
    if kind == "jax":
        return sys.modules["jax"].lax.stop_gradient(x)
    return x


def pack_bits(x: Any) -> Any:
    """Pack booleans eight to a byte along the last axis; bit n of a byte is its n-th entry.

    Shapes: (..., S) bool to (..., ceil(S/8)) uint8; the missing entries of the last byte are 0.
    """
    kind = framework(x)
    if kind != "torch":
        xp = namespace(kind or "numpy")
        if 0 in x.shape:  # jax.numpy.packbits fails on these
            return xp.zeros((*x.shape[:-1], -(-x.shape[-1] // 8)), dtype=xp.uint8)
        return xp.packbits(x, axis=-1, bitorder="little")
    torch = sys.modules["torch"]
    x = torch.nn.functional.pad(x.to(torch.uint8), (0, -x.shape[-1] % 8))
    x = x.reshape(*x.shape[:-1], x.shape[-1] // 8, 8)
    byte = x[..., 0]
    for n in range(1, 8):
        byte = byte | (x[..., n] << n)
    return byte


def unpack_bits(x: Any, count: int) -> Any:
    """Undo `pack_bits`: (..., ceil(count/8)) uint8 to (..., count) bool."""
    kind = framework(x)
    if kind != "torch":
        xp = namespace(kind or "numpy")
        if 0 in x.shape:  # as in pack_bits
            return xp.zeros((*x.shape[:-1], count), dtype=bool)
        return xp.unpackbits(x, axis=-1, bitorder="little")[..., :count].astype(bool)
    torch = sys.modules["torch"]
    bits = (x[..., None] >> torch.arange(8, dtype=torch.uint8, device=x.device)) & 1
    return bits.reshape(*x.shape[:-1], x.shape[-1] * 8)[..., :count].to(torch.bool)


def segment(x: Any, axis: int, start: Any, count: int) -> Any:
    """Cut `count` entries out of an axis (a negative number); in JAX `start` may be traced."""
    if framework(x) == "jax":
        return sys.modules["jax"].lax.dynamic_slice_in_dim(x, start, count, x.ndim + axis)
    return x[(..., slice(start, start + count), *(slice(None),) * (-1 - axis))]


def counts(index: Any, size: int) -> Any:
    """Count how often each number of [0, size) stands in each row: (..., N) int to (..., size) int32."""
    kind = framework(index)
    shape = (*index.shape[:-1], size)
    if kind == "torch":
        torch = sys.modules["torch"]
        zero = torch.zeros(shape, dtype=torch.int32, device=index.device)
        return zero.scatter_add(-1, index.long(), torch.ones_like(index, dtype=torch.int32))
    if kind == "jax":
        jnp = sys.modules["jax.numpy"]
        flat = index.reshape((math.prod(index.shape[:-1]), index.shape[-1]))
        rows = jnp.arange(flat.shape[0])[:, None]
        return jnp.zeros((flat.shape[0], size), jnp.int32).at[rows, flat].add(1).reshape(shape)
    flat = index.reshape((math.prod(index.shape[:-1]), index.shape[-1])).astype(np.int64)
    flat = flat + np.arange(len(flat))[:, None] * size
    return np.bincount(flat.ravel(), minlength=math.prod(shape)).astype(np.int32).reshape(shape)


def cumulative_max(x: Any) -> Any:
    """Give the running maximum along the last axis."""
    kind = framework(x)
    if kind == "torch":
        return x.cummax(-1).values
    if kind == "jax":
        return sys.modules["jax"].lax.cummax(x, axis=x.ndim - 1)
    return np.maximum.accumulate(x, axis=-1)


def cumulative_sum(x: Any) -> Any:
    """Give the running sum along the last axis, in the dtype of `x`."""
    if framework(x) == "torch":
        return x.cumsum(-1, dtype=x.dtype)
    return xp_of(x).cumsum(x, axis=-1, dtype=x.dtype)


def search_sorted(sorted_rows: Any, values: Any, side: str) -> Any:
    """Binary search in each row: where `values` (B, M) would stand in `sorted_rows` (B, N); int32."""
    kind = framework(values)
    if kind == "torch":
        torch = sys.modules["torch"]
        if sorted_rows.dtype != values.dtype:
            sorted_rows, values = sorted_rows.to(torch.int64), values.to(torch.int64)
        if _is_wrapped(sorted_rows) or _is_wrapped(values):  # vmap would expand one of them, and torch warn
            none = 0 * (sorted_rows.sum(-1, keepdim=True) + values.sum(-1, keepdim=True))
            sorted_rows, values = sorted_rows + none, values + none
        return torch.searchsorted(
            sorted_rows.contiguous(), values.contiguous(), right=side == "right", out_int32=True
        )
    if kind == "jax":
        jax = sys.modules["jax"]
        return jax.vmap(lambda a, v: jax.numpy.searchsorted(a, v, side=side).astype("int32"))(
            sorted_rows, values
        )
    rows = [np.searchsorted(a, v, side=side) for a, v in zip(sorted_rows, values, strict=True)]  # type: ignore[call-overload]
    return np.stack(rows).astype(np.int32) if rows else np.zeros(values.shape, np.int32)
