"""The kernel for PyTorch on the CPU: its calls, and which route a call takes.

Plain tensors whose gradient nobody asks for go straight to the kernel, others by way of an
autograd.Function; what a compiler, an export or a dispatch mode traces is a library operator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnspan.arrays import is_torch_compiling
from attnspan.implementations.native.kernel import Described, checked, run_backward, run_forward
from attnspan.implementations.native.problem import Problem
from attnspan.request import Request
from attnspan.statistics import Statistics

__all__ = [
    "GRADIENTS",
    "attend",
    "attend_and_look",
    "backward",
    "forward",
    "parted",
    "reasons_against",
    "record_of",
]

GRADIENTS = 6
"""So many of a problem's arrays, the first, have a gradient: q, k, v, key_bias, bias, slopes."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def reasons_against(request: Request) -> list[str]:
    """Say what stands against PyTorch's tensors."""
    tensors = [x for _, x in request.arrays() if isinstance(x, torch.Tensor)]
    if any(x.layout != torch.strided for x in tensors):
        return ["it takes dense tensors"]
    kinds = {type(x).__name__ for x in tensors if type(x) not in _PLAIN}
    if kinds and not _is_traced():
        return [f"it takes plain tensors, not {', '.join(sorted(kinds))}"]
    # An operator's tangent would be silently zero. The level of forward mode is read where the compiler
    # sees it, and compiles anew when it changes.
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    if is_torch_compiling() and (forward_mode or _compiles_transforms()):
        return ["its operator for torch.compile has no rules for torch.func's transforms and forward mode"]
    return []


@torch.compiler.assume_constant_result
def _compiles_transforms() -> bool:
    """Tell whether what is being compiled is inside torch.func's transforms; asked while it is traced."""
    return torch._C._functorch.maybe_current_level() is not None


def attend(problem: Problem) -> tuple[Any, Any]:
    """Give (out, log-sum-exp) in the accumulation dtype, differentiable in reverse as often as one likes."""
    out, lse, *_ = _run(problem, False)
    return out, lse


def attend_and_look(problem: Problem) -> tuple[Any, Any, Statistics]:
    """Give (out, log-sum-exp, statistics); the last are not differentiable."""
    out, lse, _, _, entropy, max_weight, jacobian_norm = _run(problem, True)
    effective = torch.where(max_weight == 0, 0.0, entropy.exp())
    return out, lse, Statistics(entropy, effective, max_weight, jacobian_norm)


def parted(problem: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Part a problem into its arrays, None where there is none, and its numbers; Problem() joins them."""
    p = problem
    arrays = p.q, p.k, p.v, p.key_bias, p.bias, p.slopes, p.align, p.start, p.stop, p.bits, p.seed
    return arrays, (p.scale, p.softcap, p.dropout, p.draws)  # strides say the order of axes


def _run(problem: Problem, looks: bool) -> tuple[Any, ...]:
    arrays, numbers = parted(problem)
    if _is_traced():
        from attnspan.implementations.native.torch_ops import dot

        return dot(*arrays, *numbers, looks)
    inside = torch._C._functorch.maybe_current_level() is not None
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays[:GRADIENTS])
    if inside or learns:
        from attnspan.implementations.native.torch_functions import Forward

        return Forward.apply(numbers, looks, *arrays)
    return forward(problem, looks)


def _is_traced() -> bool:
    """Tell whether operations are recorded, and so must be seen as such."""
    return is_torch_compiling() or torch._C._len_torch_dispatch_stack() > 0


def forward(problem: Problem, looks: bool) -> tuple[Any, ...]:
    """Run the forward pass: out, lse, top, inverse, and with `looks` entropy, max_weight, jacobian_norm."""
    problem = problem.map_arrays(_walkable)
    (B, H, L, _), E = problem.q.shape, problem.v.shape[-1]
    dtype = problem.accumulation
    out = torch.empty((B, H, L, E), dtype=dtype, device="cpu")
    rows = [torch.empty((B, H, L), dtype=dtype, device="cpu") for _ in range(6 if looks else 3)]
    addresses = [x.data_ptr() for x in (problem.q, problem.k, problem.v, out, *rows)]
    run_forward(checked(problem, _described), addresses + [0] * (10 - len(addresses)))
    return out, *rows


def record_of(problem: Problem) -> Any:
    """Give the kernel's record of a problem that can be run as it lies in memory, else None."""
    if any(_walkable(x).data_ptr() != x.data_ptr() for _, x in problem.arrays()):
        return None
    return checked(problem, _described)


def backward(
    problem: Problem, out: Any, top: Any, inverse: Any, dout: Any, dlse: Any, wanted: list[bool]
) -> list[Any]:
    """Run the backward pass: the gradients of what is wanted of the first arrays, None for the others.

    They come in the accumulation dtype, and in the shape of what they belong to.
    """
    p, dtype = problem.map_arrays(_walkable), problem.accumulation
    if wanted[4] and 0 in p.bias.stride():  # to the kernel, what is repeated stands for one
        p = replace(p, bias=p.bias.contiguous())
    (B, H, L, _), S = p.q.shape, p.k.shape[-2]
    wants_q, wants_k, wants_v, wants_keys, wants_bias, wants_slopes = wanted
    one_row = (
        p.bias is not None and p.bias.shape[-2] == 1 and not p.softcap
    )  # summed over queries as a key bias is
    empty = lambda *shape: torch.empty(shape, dtype=dtype, device="cpu")  # noqa: E731
    zeros = lambda *shape: torch.zeros(shape, dtype=dtype, device="cpu")  # noqa: E731
    dq: Any = None
    dk = dv = dkeys = dbias = dslopes = dq
    if wants_q or wants_k:
        dq, dk = empty(*p.q.shape), zeros(*p.k.shape)
    if wants_v:
        dv = zeros(*p.v.shape)
    if wants_keys or (wants_bias and one_row):
        dkeys = zeros(B, H, 1, S)
    if wants_bias and not one_row:
        dbias = zeros(*p.bias.shape)
    if wants_slopes:
        dslopes = empty(B, H, L, 1)
    found = [0 if x is None else x.data_ptr() for x in (dq, dk, dv, dkeys, dbias, dslopes)]
    out, top, inverse = (x.contiguous() for x in (out, top, inverse))
    dout = _walkable(dout.to(dtype))
    dlse = None if dlse is None else _walkable(dlse.to(dtype)[..., None])
    kept = [x.data_ptr() for x in (p.q, p.k, p.v, out, top, inverse)]
    back = [_described(dout), None if dlse is None else _described(dlse)]
    run_backward(checked(p, _described), [*kept, *back, *found])
    if wants_bias and one_row:
        dbias = dkeys.sum_to_size(p.bias.shape)
    return [
        dq if wants_q else None,
        dk if wants_k else None,
        dv,
        dkeys.sum_to_size(p.key_bias.shape) if wants_keys else None,
        dbias,
        dslopes.sum_to_size(p.slopes.shape) if wants_slopes else None,
    ]


def _walkable(x: Any) -> Any:
    """Copy a tensor whose last axis is not dense, whose sign is only noted, or whose address is odd."""
    x = x.resolve_neg()
    if x.data_ptr() % x.element_size():
        return x.clone(memory_format=torch.contiguous_format)
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _described(x: Any) -> Described:
    return x.data_ptr(), tuple(x.shape), x.stride()
