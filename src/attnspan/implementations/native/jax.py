"""The kernel for JAX on the CPU, and its derivatives.

XLA calls the kernel from what it compiles, in and outside `jit`. First derivatives in reverse are the
kernel's, second ones those of the formula.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
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

Arrays = dict[str, Any]

_GRADIENTS = ("q", "k", "v", "key_bias", "bias", "slopes")
"""The arrays of a problem that have one."""
_INPUTS = (*_GRADIENTS, "align", "start", "stop", "bits", "seed", "out", "top", "inverse", "dout", "dlse")
_FORWARD = ("out", "lse", "top", "inverse", "entropy", "max_weight", "jacobian_norm")
_BACKWARD = ("dq", "dk", "dv", "dkey_bias", "dbias", "dslopes")
"""The places of the handlers' operands and results, in their order."""


def reasons_against(request: Request) -> list[str]:
    """Say what stands against JAX's arrays: where they are, or will be as far as that is known."""
    platforms = set()
    for _, x in request.arrays():
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            platforms |= {device.platform for device in x.devices()}
    platforms = platforms or {jax.default_backend()}
    return [f"it runs on the CPU, not on {one}" for one in sorted(platforms - {"cpu"})]


def attend(problem: Problem) -> tuple[Any, Any]:
    """Give (out, log-sum-exp) in the accumulation dtype, differentiable in reverse as often as one likes."""
    out, lse = _ordered(problem, looks=False)
    return out, lse


def attend_and_look(problem: Problem) -> tuple[Any, Any, Statistics]:
    """Give (out, log-sum-exp, statistics); the last are not differentiable."""
    out, lse, *stats = _ordered(problem, looks=True)
    entropy, max_weight, jacobian_norm = map(jax.lax.stop_gradient, stats)
    effective = jnp.where(max_weight == 0, 0.0, jnp.exp(entropy))
    return out, lse, Statistics(entropy, effective, max_weight, jacobian_norm)


def _ordered(problem: Problem, looks: bool) -> Any:
    """Run in the caller's order of axes: what stands in memory so is not brought into another."""
    own = _in_order(problem, problem.order)
    given = {name: x for name in _GRADIENTS if (x := getattr(own, name)) is not None}
    nothing: Arrays = dict.fromkeys(given)
    rest = replace(own, **nothing)
    given = dict(zip(given, _alike(given.values()), strict=True))
    out, lse, _, _, *stats = _compiled(looks, rest, given)
    return _swapped(out, problem.order), lse, *stats


def _alike(arrays: Iterable[Any]) -> list[Any]:
    """Let arrays vary over the axes of a mesh that any of them does, as shard_map asks of a call."""
    arrays = list(arrays)
    axes = frozenset().union(*map(_axes_of, arrays))
    return [_along(x, axes) for x in arrays]


def _along(x: Any, axes: frozenset[str]) -> Any:
    more = tuple(sorted(axes - _axes_of(x)))
    return jax.lax.pcast(x, more, to="varying") if more else x


def _axes_of(x: Any) -> frozenset[str]:
    varying: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return varying


def _swapped(x: Any, order: str) -> Any:
    return x.swapaxes(1, 2) if order == "BLHD" else x


def _in_order(problem: Problem, order: str) -> Problem:
    """Go from the order of axes of the formula to the one of the memory, or back."""
    p = problem
    return replace(p, q=_swapped(p.q, order), k=_swapped(p.k, order), v=_swapped(p.v, order))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(looks: bool, rest: Problem, given: Arrays) -> tuple[Any, ...]:
    return _forward(replace(rest, **given), _FORWARD if looks else _FORWARD[:4])


def _attend_fwd(looks: bool, rest: Any, given: Any) -> Any:
    wanted = {name: None for name, x in given.items() if x.perturbed}
    rest, given = jax.tree.map(lambda x: x.value, (rest, given))
    found = _attend(looks, rest, given)  # which another derivative may go through
    out, _, top, inverse = found[:4]
    return found, (wanted, rest, given, (out, top, inverse))


def _attend_bwd(looks: bool, kept: Any, arrived: Any) -> Any:
    wanted, rest, given, rows = kept
    dout, dlse = (None if _is_zero(x) else x for x in arrived[:2])
    if dout is None:
        dout = jnp.zeros_like(rows[0])
    found = _back(wanted, rest, given, rows, dout, dlse) if wanted else {}
    return None, {name: found.get(name) for name in given}


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
_compiled = jax.jit(_attend, static_argnums=0)  # outside jit too, or each call would trace it anew


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


@jax.custom_vjp
def _back(wanted: dict[str, None], rest: Problem, given: Arrays, rows: Any, dout: Any, dlse: Any) -> Arrays:
    """Give the gradients of what is wanted, by the kernel."""
    problem = replace(rest, **given)
    found = _backward(problem, wanted, rows, dout, dlse)
    return {name: found[name].astype(given[name].dtype) for name in wanted}


def _back_fwd(*arguments: Any) -> Any:
    return _back(*arguments), arguments


def _back_bwd(kept: Any, arrived: Arrays) -> Any:
    wanted, rest, given, _, dout, dlse = kept
    _, pull = jax.vjp(functools.partial(_by_formula, wanted, rest), given, dout, dlse)
    dgiven, ddout, ddlse = pull(arrived)
    # Of the kept rows nothing: the formula makes them anew.
    return wanted, None, dgiven, None, ddout, ddlse


_back.defvjp(_back_fwd, _back_bwd)


def _by_formula(wanted: dict[str, None], rest: Problem, given: Arrays, dout: Any, dlse: Any) -> Arrays:
    """Give the same gradients by the formula, differentiable themselves."""

    def run(some: Arrays) -> tuple[Any, Any]:
        problem = replace(rest, **{**given, **some})
        out, lse = formula(_in_order(problem, rest.order))
        live = lse != -float("inf")
        return _swapped(jnp.where(live[..., None], out, 0.0), rest.order), jnp.where(live, lse, 0.0)

    (_, lse), pull = jax.vjp(run, {name: given[name] for name in wanted})
    return pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))[0]


def _forward(problem: Problem, asked: tuple[str, ...]) -> tuple[Any, ...]:
    B, H, L, _ = _in_order(problem, problem.order).q.shape
    E, dtype = problem.v.shape[-1], problem.accumulation
    first = (B, L, H, E) if problem.order == "BLHD" else (B, H, L, E)
    shapes = dict.fromkeys(asked, (B, H, L)) | {"out": first}
    found = _call("forward", problem, {}, _FORWARD, {name: shapes[name] for name in asked}, dtype)
    return tuple(found[name] for name in asked)


def _backward(problem: Problem, wanted: dict[str, None], rows: Any, dout: Any, dlse: Any) -> Arrays:
    """Give gradients in the accumulation dtype and in the shape of what they belong to."""
    p, order = problem, problem.order
    (B, H, L, _), S = _in_order(p, order).q.shape, _in_order(p, order).k.shape[-2]
    one_row = (
        p.bias is not None and p.bias.shape[-2] == 1 and not p.softcap
    )  # summed over queries as a key bias is
    shapes: dict[str, tuple[int, ...]] = {}
    if "q" in wanted or "k" in wanted:
        shapes |= {"dq": p.q.shape, "dk": p.k.shape}
    if "v" in wanted:
        shapes["dv"] = p.v.shape
    if "key_bias" in wanted or ("bias" in wanted and one_row):
        shapes["dkey_bias"] = (B, H, 1, S)
    if "bias" in wanted and not one_row:
        shapes["dbias"] = p.bias.shape
    if "slopes" in wanted:
        shapes["dslopes"] = (B, H, L, 1)
    out, top, inverse = rows
    behind = {"out": out, "top": top, "inverse": inverse, "dout": dout, "dlse": dlse}
    found = _call("backward", p, behind, _BACKWARD, shapes, p.accumulation)
    grads = {
        name: found[f"d{name}"]
        for name in ("q", "k", "v", "key_bias", "bias", "slopes")
        if f"d{name}" in found
    }
    if "bias" in wanted and one_row:
        grads["bias"] = found["dkey_bias"]
    return {name: _summed_to(grads[name], getattr(p, name).shape) for name in wanted}


def _summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    axes = tuple(n for n, size in enumerate(shape) if size == 1 != x.shape[n])
    return x.sum(axes, keepdims=True) if axes else x


def _call(name: str, problem: Problem, behind: Arrays, places: Any, shapes: Any, dtype: Any) -> Arrays:
    """Hand over to XLA; what is not there takes no place."""
    _register()
    p = problem
    inputs = {one: behind[one] if one in behind else getattr(p, one, None) for one in _INPUTS}
    given = [one for one in _INPUTS if inputs[one] is not None]
    asked = [one for one in places if one in shapes]
    operands = _alike(inputs[one] for one in given)
    axes = _axes_of(operands[0])
    # expand_dims: under vmap, what is not mapped gets an axis of 1 and is not copied
    call = jax.ffi.ffi_call(
        f"attnspan_dot_{name}",
        [jax.ShapeDtypeStruct(shapes[one], dtype) for one in asked],
        vmap_method="expand_dims",
    )
    found = call(
        *operands,
        scale=np.float64(p.scale),
        softcap=np.float64(p.softcap),
        dropout=np.float64(p.dropout),
        draws=np.int64(p.draws),
        order=p.order,
        given=np.int64(sum(1 << n for n, one in enumerate(_INPUTS) if one in given)),
        asked=np.int64(sum(1 << n for n, one in enumerate(places) if one in asked)),
    )
    # XLA is not told over which axes of a mesh the results vary.
    return {one: _along(x, axes) for one, x in zip(asked, found, strict=True)}


@functools.cache
def _register() -> None:
    """Tell XLA of the kernel, once a process."""
    module = native.load()
    jax.ffi.register_ffi_target("attnspan_dot_forward", module.dot_forward_handler(), platform="cpu")
    jax.ffi.register_ffi_target("attnspan_dot_backward", module.dot_backward_handler(), platform="cpu")
