"""The kernel for JAX on the CPU: two XLA FFI calls, and their derivatives.

Under vmap a call runs once for each element of the mapped axes, as a plain loop would.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan import native
from attnspan.implementations.native.problem import Problem, formula
from attnspan.request import Request
from attnspan.statistics import Statistics

__all__ = ["attend", "attend_and_look", "reasons_against"]

_LEAVES = ("q", "k", "v", "key_bias", "bias", "slopes")
"""The arrays of a problem that have gradients."""

_OPTIONAL = ("key_bias", "bias", "slopes", "align", "start", "stop", "bits", "seed")
"""The operands that may be missing; which are there is said in the bits of one number."""


def reasons_against(request: Request) -> list[str]:
    """Say where JAX's arrays are not on the CPU."""
    arrays = [
        x for _, x in request.arrays() if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    ]
    platforms = {d.platform for x in arrays for d in x.devices()} or {jax.default_backend()}
    others = sorted(platforms - {"cpu"})
    return [f"it runs on the CPU, and the arrays are on {', '.join(others)}"] if others else []


def attend(problem: Problem) -> tuple[Any, Any]:
    """Give (out, log-sum-exp) in the accumulation dtype, differentiable in reverse as often as one likes."""
    rest, leaves = _parted(problem)
    return _attend(False, rest, leaves)[:2]


def attend_and_look(problem: Problem) -> tuple[Any, Any, Statistics]:
    """Give (out, log-sum-exp, statistics); the last are not differentiable."""
    rest, leaves = _parted(problem)
    out, lse, *stats = _attend(True, rest, leaves)
    entropy, max_weight, jacobian_norm = map(jax.lax.stop_gradient, stats)
    effective = jnp.where(max_weight == 0, 0.0, jnp.exp(entropy))
    return out, lse, Statistics(entropy, effective, max_weight, jacobian_norm)


def _parted(problem: Problem) -> tuple[Problem, dict[str, Any]]:
    """Split off the arrays that have gradients."""
    leaves = {name: getattr(problem, name) for name in _LEAVES}
    leaves = {name: jnp.asarray(x) for name, x in leaves.items() if x is not None}
    return replace(problem, **dict.fromkeys(_LEAVES)), leaves


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(looks: bool, rest: Problem, leaves: dict[str, Any]) -> tuple[Any, ...]:
    out, lse, _, _, *stats = _forward(looks, rest, leaves)
    return out, lse, *stats


def _attend_forward(looks: bool, rest: Problem, leaves: dict[str, Any]) -> Any:
    out, lse, top, inverse, *stats = _forward(looks, rest, leaves)
    return (out, lse, *stats), (rest, leaves, (out, top, inverse))


def _attend_backward(looks: bool, kept: Any, arrived: Any) -> Any:
    rest, leaves, saved = kept
    return None, _back(rest, leaves, saved, *arrived[:2])


_attend.defvjp(_attend_forward, _attend_backward)


@jax.custom_vjp
def _back(rest: Problem, leaves: dict[str, Any], saved: Any, dout: Any, dlse: Any) -> dict[str, Any]:
    """Give the gradients of the leaves; their own derivative is that of the formula."""
    return _backward(rest, leaves, saved, dout, dlse)


def _back_forward(rest: Problem, leaves: dict[str, Any], saved: Any, dout: Any, dlse: Any) -> Any:
    return _back(rest, leaves, saved, dout, dlse), (rest, leaves, saved, dout, dlse)


def _back_backward(kept: Any, arrived: Any) -> Any:
    rest, leaves, saved, dout, dlse = kept

    def gradients(leaves: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
        (_, lse), pull = jax.vjp(lambda leaves: formula(replace(rest, **leaves)), leaves)
        live = jax.lax.stop_gradient(lse) != -jnp.inf  # what arrives at an empty row may be anything
        return pull((jnp.where(live[..., None], dout, 0.0), jnp.where(live, dlse, 0.0)))[0]

    dleaves, ddout, ddlse = jax.vjp(gradients, leaves, dout, dlse)[1](arrived)
    return None, dleaves, jax.tree.map(jnp.zeros_like, saved), ddout, ddlse


_back.defvjp(_back_forward, _back_backward)


def _forward(looks: bool, rest: Problem, leaves: dict[str, Any]) -> Any:
    """Call the forward pass: out, lse, top, inverse, and with `looks` entropy, max_weight, jacobian_norm."""
    problem = replace(rest, **leaves)
    (B, H, L, _), E, dtype = problem.q.shape, problem.v.shape[-1], problem.accumulation
    out = jax.ShapeDtypeStruct((B, H, L, E), dtype)
    row = jax.ShapeDtypeStruct((B, H, L), dtype)
    results = [_shape_in_order(out, problem), *[row] * (6 if looks else 3)]
    operands = [_in_order(x, problem) for x in (problem.q, problem.k, problem.v)]
    call = jax.ffi.ffi_call(_target("dot_forward"), results, vmap_method="expand_dims")
    out, *rows = call(*operands, *_given(problem), **_numbers(problem), looks=looks)
    return _in_order(out, problem), *rows


def _backward(rest: Problem, leaves: dict[str, Any], saved: Any, dout: Any, dlse: Any) -> dict[str, Any]:
    """Call the backward pass; the gradients come in the dtype and shape of the leaves."""
    p = replace(rest, **leaves)
    (B, H, L, _), S, dtype = p.q.shape, p.k.shape[-2], p.accumulation
    out, top, inverse = saved
    one_row = p.bias is not None and p.bias.shape[-2] == 1  # summed over queries as a key bias is
    shapes = {name: _shape_in_order(jax.ShapeDtypeStruct(leaves[name].shape, dtype), p) for name in "qkv"}
    keys = p.key_bias is not None or one_row
    if keys:
        shapes["keys"] = jax.ShapeDtypeStruct((B, H, 1, S), dtype)
    if p.bias is not None and not one_row:
        shapes["bias"] = jax.ShapeDtypeStruct(p.bias.shape, dtype)
    if p.slopes is not None:
        shapes["slopes"] = jax.ShapeDtypeStruct((B, H, L), dtype)
    operands = [_in_order(x, p) for x in (p.q, p.k, p.v, out)]
    operands += [top, inverse, _in_order(dout, p), dlse, *_given(p)]
    call = jax.ffi.ffi_call(_target("dot_backward"), list(shapes.values()), vmap_method="expand_dims")
    asked = {"keys": keys, "bias": "bias" in shapes, "slopes": "slopes" in shapes}
    found = dict(zip(shapes, call(*operands, **_numbers(p), **asked), strict=True))
    grads = {name: _in_order(found[name], p) for name in "qkv"}
    if p.key_bias is not None:
        grads["key_bias"] = _summed_to(found["keys"], p.key_bias.shape)
    if p.bias is not None:
        grads["bias"] = _summed_to(found["keys"], p.bias.shape) if one_row else found["bias"]
    if p.slopes is not None:
        grads["slopes"] = _summed_to(found["slopes"][..., None], p.slopes.shape)
    return {name: g.astype(leaves[name].dtype) for name, g in grads.items()}


def _summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if m == 1 and n != 1)
    return x.sum(axes, keepdims=True) if axes else x


def _in_order(x: Any, problem: Problem) -> Any:
    """Bring heads and positions to the order that they have in memory, or back: XLA cancels the two."""
    return x.swapaxes(-3, -2) if problem.swapped else x


def _shape_in_order(x: Any, problem: Problem) -> Any:
    (B, H, L, n), dtype = x.shape, x.dtype
    return jax.ShapeDtypeStruct((B, L, H, n), dtype) if problem.swapped else x


def _given(problem: Problem) -> list[Any]:
    return [x for x in (getattr(problem, name) for name in _OPTIONAL) if x is not None]


def _numbers(problem: Problem) -> dict[str, Any]:
    present = sum(1 << n for n, name in enumerate(_OPTIONAL) if getattr(problem, name) is not None)
    return {
        "scale": np.float64(problem.scale),
        "softcap": np.float64(problem.softcap),
        "dropout": np.float64(problem.dropout),
        "draws": np.int64(problem.draws),
        "present": np.int64(present),
        "swapped": problem.swapped,
    }


@functools.cache
def _target(name: str) -> str:
    """Tell XLA of a handler, once a process, and give its name there."""
    handler = getattr(native.load(), f"{name}_handler")()
    jax.ffi.register_ffi_target(f"attnspan_{name}", handler, platform="cpu")
    return f"attnspan_{name}"
