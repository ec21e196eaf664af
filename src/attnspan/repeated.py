"""Calls that repeat: what a first call found out is kept, and later ones go straight to the kernel.

A call of PyTorch on the CPU with no arrays but q, k and v is known by shapes, strides, dtypes and numbers.
Everything else, compilers, transforms and dispatch modes too, takes the long way.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

from attnspan.arrays import is_torch_compiling
from attnspan.implementations import Implementation
from attnspan.request import Request
from attnspan.values import Value

__all__ = ["again", "key_of", "remember"]

_MOST = 256
_KNOWN: dict[tuple[Any, ...], _Known | None] = {}  # None: seen once, which is no reason to keep anything
_CHANGING = threading.Lock()


@dataclass(frozen=True)
class _Known:
    """What runs a call once more.

    Attributes
    ----------
    record : DotProblem
        The kernel's own: shapes, strides and mask, checked.
    rest, numbers : tuple
        The problem in parts, without q, k and v.
    shape : tuple of int
        The output's.
    dtype : torch.dtype
        What sums run in.
    """

    record: Any
    rest: tuple[Any, ...]
    numbers: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any


def key_of(
    q: Any, k: Any, v: Any, score: Any, mask: Any, softcap: Any, align: Any, implementation: str
) -> tuple[Any, ...] | None:
    """Give what a call is known by, or None where more than that has a say."""
    if is_torch_compiling() or (torch := sys.modules.get("torch")) is None:
        return None
    plain = (torch.Tensor, torch.nn.Parameter)
    if not (type(q) in plain and type(k) in plain and type(v) in plain):
        return None
    if implementation not in ("auto", "native") or not (_settled(score) and _settled(mask)):
        return None
    if type(softcap) not in (type(None), int, float) or type(align) not in (type(None), int, str):
        return None
    if q.is_nested or k.is_nested or v.is_nested:
        return None
    strided = torch.strided
    if not (q.is_cpu and k.is_cpu and v.is_cpu and q.layout is k.layout is v.layout is strided):
        return None
    if torch._C._functorch.maybe_current_level() is not None or torch._C._len_torch_dispatch_stack():
        return None
    if torch.autograd.forward_ad._current_level >= 0 or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    return (
        (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype),
        score,
        mask,
        (softcap, align, implementation),
    )


def _settled(value: Any) -> bool:
    """Tell whether a mask or score is made of numbers alone: arrays and functions may change."""
    return value is None or (isinstance(value, Value) and value.is_settled)


def again(key: tuple[Any, ...], q: Any, k: Any, v: Any) -> Any:
    """Give the output of a call that is known, or None."""
    known = _KNOWN.get(key)
    if known is None:
        return None
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if any(address % q.itemsize for address in addresses):
        return None
    torch = sys.modules["torch"]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        from attnspan.implementations.native.torch_functions import Again

        inner = (x if x.ndim == 4 else x.unsqueeze(1) for x in (q, k, v))
        out = Again.apply(known.record, known.rest, known.numbers, *inner)
        out = out if len(known.shape) == 4 else out.squeeze(1)
    else:
        out = torch.empty(known.shape, dtype=known.dtype, device="cpu")
        known.record.forward(*addresses, out.data_ptr(), 0, 0, 0, 0, 0, 0, torch.get_num_threads(), "auto")
    return out if known.dtype is q.dtype else out.to(q.dtype)


def remember(key: tuple[Any, ...], request: Request, chosen: Implementation) -> None:
    """Keep what a call found out, if it ran natively and nothing but numbers had a say in it."""
    from attnspan.implementations.native import NATIVE
    from attnspan.implementations.native.problem import is_plain, lowered

    sizes = request.sizes
    if chosen is not NATIVE or not is_plain(request) or sizes.ndim not in (3, 4):
        return
    if sys.modules["torch"].is_inference_mode_enabled():  # what it makes can't be saved for a gradient
        return
    if any(x.shape[:-3] != sizes.lead[:-1] for x in (request.q, request.k, request.v)):  # broadcast
        return
    if key not in _KNOWN:
        _keep(key, None)
        return
    from attnspan.implementations.native.torch import parted, record_of

    problem = lowered(request).problem
    record = record_of(problem)
    if record is None:
        return
    arrays, numbers = parted(problem)
    shape = (*sizes.lead, sizes.L, sizes.E) if sizes.ndim == 4 else (sizes.lead[0], sizes.L, sizes.E)
    _keep(key, _Known(record, arrays[3:], numbers, shape, problem.accumulation))


def _keep(key: tuple[Any, ...], known: _Known | None) -> None:
    with _CHANGING:
        if len(_KNOWN) >= _MOST:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[key] = known
