"""Both sides of a case: ours and a peer, forward and forward with backward, on the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.bench.cases import DOCUMENTS, WINDOW, Case

__all__ = ["Sides", "build", "ours_alone"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sides:
    """The calls to time: each forward gives (output,), each step (output, dq, dk, dv).

    Attributes
    ----------
    implementation : str
        What "auto" chose for ours.
    forward : (callable, callable)
        Ours and the peer's.
    step : (callable, callable) or None
        The same with backward, from a dense random gradient; None where the peer has no backward.
    back : callable
        Brings an array of the peer's into our layout, to compare.
    """

    implementation: str
    forward: tuple[Call, Call]
    step: tuple[Call, Call] | None
    back: Callable[[Any], Any] = lambda x: x


def build(case: Case, peer: str, lengths: tuple[int, ...]) -> Sides:
    """Make the inputs of a case and both its sides against one peer.

    Parameters
    ----------
    case : Case
    peer : str
        One of ``case.peers``.
    lengths : tuple of int
        Of the padded case.
    """
    return (_in_torch if case.framework == "torch" else _in_jax)(case, peer, lengths)


def ours_alone(case: Case) -> tuple[str, Call]:
    """Give what "auto" chose for a case without lengths, and a forward and backward call of it."""
    attend, named = _ours(case, ())
    if case.framework == "torch":
        *_, leaves, g = _torch_inputs(case)
        return named(*leaves), lambda: _torch_step(attend, leaves, g)
    import jax

    arrays = _jax_inputs(case)
    step = jax.jit(_jax_step(attend)).lower(*arrays).compile()  # compiling is not what is measured
    return _jax_named(named, arrays), lambda: jax.block_until_ready(step(*arrays))


def _numbers(case: Case) -> Iterator[np.ndarray]:
    """Draw q, k, v and the gradient of the output, one when asked for, so that no copy stands beside all."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal(case.shape, np.float32) for _ in range(4))


def _documents(L: int) -> np.ndarray:
    return (np.arange(L) * DOCUMENTS // L).astype(np.int32)


def _our_mask(case: Case, lengths: tuple[int, ...]) -> Any:
    from attnspan import masks

    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "causal": masks.Causal,
        "window": lambda: masks.SlidingWindow(back=WINDOW - 1),
        "documents": lambda: masks.Causal() & masks.Documents(_documents(case.shape[-2])),
        "padded": lambda: masks.ValidLens(list(lengths)),
    }
    return makers[case.mask]()


def _visible(case: Case, lengths: tuple[int, ...]) -> np.ndarray | None:
    """Write the mask out as the peers take it, from its definition: True = may attend."""
    if case.mask == "none":
        return None
    i = np.arange(case.shape[-2])[:, None]
    j = i.T
    if case.mask == "padded":
        return (j < np.array(lengths)[:, None])[:, None, None, :]
    seen = j <= i
    if case.mask == "window":
        seen &= i - j < WINDOW
    if case.mask == "documents":
        ids = _documents(len(i))
        seen &= ids[:, None] == ids
    return seen


def _ours(case: Case, lengths: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., str]]:
    """Give our attention of (q, k, v), and what tells its implementation."""
    import attnspan as asp

    options: dict[str, Any] = {"mask": _our_mask(case, lengths)}
    if case.dropout:
        options |= {"dropout": case.dropout, "rng": 0}

    def attend(q: Any, k: Any, v: Any) -> Any:
        if case.statistics:
            return asp.inspect(q, k, v, **options).out
        return asp.attention(q, k, v, **options)

    return attend, lambda q, k, v: asp.plan(q, k, v, **options).implementation


# --- PyTorch ----------------------------------------------------------------------------------


def _in_torch(case: Case, peer: str, lengths: tuple[int, ...]) -> Sides:
    plain, leaves, g = _torch_inputs(case)
    ours, named = _ours(case, lengths)
    other = _flex(case, lengths) if peer == "flex" else _torch_peer(case, peer, lengths)
    return Sides(
        implementation=named(*leaves),
        forward=(lambda: (ours(*plain),), lambda: (other(*plain),)),
        # FlexAttention has no backward on the CPU
        step=None
        if peer == "flex"
        else (lambda: _torch_step(ours, leaves, g), lambda: _torch_step(other, leaves, g)),
    )


def _torch_inputs(case: Case) -> tuple[list[Any], list[Any], Any]:
    """Give q, k, v without and with gradient, and the gradient of the output."""
    import torch

    *plain, g = (torch.from_numpy(x).to(getattr(torch, case.dtype)) for x in _numbers(case))
    return plain, [x.detach().requires_grad_() for x in plain], g


def _torch_step(attend: Callable[..., Any], leaves: list[Any], g: Any) -> tuple[Any, ...]:
    import torch

    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, g)


def _torch_peer(case: Case, peer: str, lengths: tuple[int, ...]) -> Callable[..., Any]:
    import torch

    import attnspan as asp

    sdpa = torch.nn.functional.scaled_dot_product_attention
    options: dict[str, Any] = {"dropout_p": case.dropout} if case.dropout else {}
    if case.mask == "causal":
        options["is_causal"] = True
    elif case.mask != "none":
        options["attn_mask"] = torch.from_numpy(_visible(case, lengths))
    return {
        "sdpa": lambda q, k, v: sdpa(q, k, v, **options),
        "sdpa with heads": lambda q, k, v: sdpa(q[:, None], k[:, None], v[:, None], **options)[:, 0],
        "attention": asp.attention,
    }[peer]


def _flex(case: Case, lengths: tuple[int, ...]) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    if case.mask == "none":
        return compiled
    B, _, L, _ = case.shape
    ids, lens = torch.from_numpy(_documents(L)), torch.tensor(lengths)
    rule = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
        "documents": lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]),
        "padded": lambda b, h, i, j: j < lens[b],
    }[case.mask]
    blocks = create_block_mask(rule, B if case.mask == "padded" else None, None, L, L, device="cpu")
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


# --- JAX --------------------------------------------------------------------------------------


def _in_jax(case: Case, peer: str, lengths: tuple[int, ...]) -> Sides:
    import jax

    arrays = _jax_inputs(case)
    ours, named = _ours(case, lengths)
    other = _jax_peer(case, peer, lengths)
    back = _turned if peer == "jax.nn" else lambda x: x
    theirs = [back(x) for x in arrays]  # jax.nn has its heads after the length

    def calls(attend: Callable[..., Any], given: list[Any]) -> tuple[Call, Call]:
        forward, step = jax.jit(lambda q, k, v: (attend(q, k, v),)), jax.jit(_jax_step(attend))
        return (
            lambda: jax.block_until_ready(forward(*given[:3])),
            lambda: jax.block_until_ready(step(*given)),
        )

    mine, yours = calls(ours, arrays), calls(other, theirs)
    return Sides(_jax_named(named, arrays), (mine[0], yours[0]), (mine[1], yours[1]), back)


def _jax_inputs(case: Case) -> list[Any]:
    import jax.numpy as jnp

    return [jnp.array(x, case.dtype) for x in _numbers(case)]


def _jax_named(named: Callable[..., str], arrays: list[Any]) -> str:
    """Tell what "auto" chooses for what jit sees."""
    import jax

    said: list[str] = []
    jax.eval_shape(lambda q, k, v: said.append(named(q, k, v)), *arrays[:3])
    return said[0]


def _jax_step(attend: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def step(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(g)

    return step


def _turned(x: Any) -> Any:
    return x.swapaxes(1, 2)


def _jax_peer(case: Case, peer: str, lengths: tuple[int, ...]) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    if peer == "jax.nn":
        options: dict[str, dict[str, Any]] = {
            "none": {},
            "causal": {"is_causal": True},
            "window": {"local_window_size": (WINDOW - 1, 0)},
        }
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options[case.mask])
    seen = _visible(case, lengths)

    def formula(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        return jax.nn.softmax(scores, axis=-1) @ v

    return formula
