"""The front door: attention(), inspect() and plan() take the same arguments."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import as_written, fetch, framework, is_array, is_torch_compiling
from attnspan.errors import AttnspanError, describe, refusal
from attnspan.implementations import eager
from attnspan.planner import Plan, choose, looker, plan_of
from attnspan.repeated import again, key_of, remember
from attnspan.request import Request, request_of
from attnspan.shapes import outer
from attnspan.statistics import Statistics
from attnspan.values import Value

__all__ = ["Inspection", "attended", "attention", "inspect", "inspected", "plan"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Any = None,
    mask: Any = None,
    bias: Any = None,
    softcap: Any = None,
    sink: Any = None,
    align: Any = None,
    dropout: float = 0.0,
    rng: Any = None,
    implementation: str = "auto",
) -> Any:
    r"""Compute attention with any score and any mask.

    .. math:: o_i = \sum_j \operatorname{softmax}_j(a(q_i, k_j) + b_{ij})\, v_j,
              \quad j \text{ over the keys that query } i \text{ sees}

    In this order: score with all its constants, softcap · tanh(score / softcap), bias, mask, softmax,
    dropout. A query that sees no key gives 0, with gradient 0. What is masked does not exist: it may
    hold anything, NaN included. A non-finite key or value makes NaN exactly the rows that see it.

    Parameters
    ----------
    q, k, v : array
        ``(..., L, D)``, ``(..., S, D)``, ``(..., S, E)``: NumPy, PyTorch or JAX, one floating dtype.
        3-D ``(B, L, D)``, or 4-D ``(B, H, L, D)`` with heads; k and v may have G heads where G
        divides H, and query head h uses key/value head h // (H/G).
    score : Score or callable, optional
        How well a key matches; by default ``ScaledDot()``. A function gets some of the queries
        ``(..., L, D)`` and of the keys ``(..., S, D)``, in the caller's number of axes, and returns
        their scores ``(..., L, S)``: a long call is cut into tiles. Arrays it learns from are bound by
        name, ``functools.partial(fn, W=W)``.
    mask : Mask or bool array, optional
        Which keys a query sees, True = may attend; by default all.
    bias : array or ALiBi, optional
        Added to the scores; an array broadcasts to ``(..., L, S)`` and has its gradient in its own
        shape and dtype. -inf excludes.
    softcap : float, optional
        Caps the scores smoothly [2]_.
    sink : float or array, optional
        A logit in the denominator only, a number or ``(B|1, H|1)`` one per head:
        out · σ(lse - sink) [3]_.
    align : {"top_left", "bottom_right"}, int or integer array, optional
        The key position at which query 0 stands, for every mask and bias that left it unsaid.
    dropout : float
        The share of weights dropped after the softmax; the others are scaled by 1/(1 - p). Acts
        whenever it is not 0, and needs `rng`.
    rng : int, 0-d integer array, JAX key or torch.Generator, optional
        The seed; the same bits in every framework and implementation.
    implementation : str
        "auto", or a name; a named one runs or raises with its reasons.

    Returns
    -------
    array
        ``(..., L, E)``, in q's dtype. float16 and bfloat16 are summed in float32.

    Raises
    ------
    ArgumentError
        For arguments that don't fit each other; the message says what was given, what is needed
        and the likely fix.
    NotSupportedError
        If the named implementation cannot do this.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, equation 1.
    .. [2] Gemma Team, "Gemma 2: improving open language models at a practical size", 2024, section 2.
    .. [3] Xiao et al., "Efficient streaming language models with attention sinks", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import attnspan as asp
    >>> from attnspan.masks import Causal, ValidLens
    >>> q = np.ones((1, 3, 2)); k = np.ones((1, 3, 2)); v = np.arange(3.0).reshape(1, 3, 1)
    >>> asp.attention(q, k, v, mask=Causal() & ValidLens([2])).ravel().tolist()
    [0.0, 0.5, 0.5]
    """
    key = None
    if bias is None and sink is None and rng is None and not dropout:
        key = key_of(q, k, v, score, mask, softcap, align, implementation)
        if key is not None and (out := again(key, q, k, v)) is not None:
            return out
    request = request_of(
        q, k, v, score=score, mask=mask, bias=bias, softcap=softcap, sink=sink, align=align,
        dropout=dropout, rng=rng,
    )  # fmt: skip
    return attended(request, implementation, key)


def attended(request: Request, implementation: str, key: Any = None) -> Any:
    """Compute what `attention` returns for a request; with a key, a call that repeats is kept."""
    chosen = choose(request, implementation)
    with as_written(request.q):
        out = chosen.attend(request)
    if key is not None:
        remember(key, request, chosen)
    return outer(out, request.sizes.ndim, 2)


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Any = None,
    mask: Any = None,
    bias: Any = None,
    softcap: Any = None,
    sink: Any = None,
    align: Any = None,
    dropout: float = 0.0,
    rng: Any = None,
    implementation: str = "auto",
) -> Plan:
    """Explain what `attention` would run with these arguments, and compute nothing.

    Parameters
    ----------
    q, k, v, score, mask, bias, softcap, sink, align, dropout, rng, implementation
        As in `attention`.

    Returns
    -------
    Plan
        What runs, what was refused and why, how the mask is kept, and the cost; it prints.

    Raises
    ------
    ArgumentError, NotSupportedError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> import attnspan as asp
    >>> from attnspan.masks import Causal
    >>> x = np.ones((1, 4, 2))
    >>> p = asp.plan(x, x, x, mask=Causal(), implementation="tiled")
    >>> p.implementation, p.cost.pairs
    ('tiled', 10)
    """
    request = request_of(
        q, k, v, score=score, mask=mask, bias=bias, softcap=softcap, sink=sink, align=align,
        dropout=dropout, rng=rng, draw=False,
    )  # fmt: skip
    return plan_of(request, implementation)


def inspect(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Any = None,
    mask: Any = None,
    bias: Any = None,
    softcap: Any = None,
    sink: Any = None,
    align: Any = None,
    dropout: float = 0.0,
    rng: Any = None,
    implementation: str = "auto",
) -> Inspection:
    """Compute attention and keep what one may want to look at; looking changes nothing.

    `out` comes from the very path `attention` takes, bit for bit. Log-sum-exp and statistics come from the
    same pass where the native kernel computes, elsewhere from passes of their own over q and k, in tiles
    where that can be; weights are written out when asked for.

    Parameters
    ----------
    q, k, v, score, mask, bias, softcap, sink, align, dropout, rng, implementation
        As in `attention`.

    Returns
    -------
    Inspection
        `out`, `lse`, `stats`, `plan`, and `weights(rows=None, heads=None)`; a pytree under jit.

    Raises
    ------
    ArgumentError, NotSupportedError
        As `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> import attnspan as asp
    >>> from attnspan.masks import Causal
    >>> x = np.ones((1, 2, 4))
    >>> r = asp.inspect(x, x, x, mask=Causal())
    >>> r.weights().tolist()
    [[[1.0, 0.0], [0.5, 0.5]]]
    >>> r.stats.effective_keys.round(3).tolist()
    [[1.0, 2.0]]
    """
    request = request_of(
        q, k, v, score=score, mask=mask, bias=bias, softcap=softcap, sink=sink, align=align,
        dropout=dropout, rng=rng,
    )  # fmt: skip
    return inspected(request, implementation)


def inspected(request: Request, implementation: str) -> Inspection:
    """Compute what `inspect` returns for a request."""
    ndim = request.sizes.ndim
    with as_written(request.q):
        chosen = choose(request, implementation)
        if chosen.attend_and_look is not None:
            out, lse, stats = chosen.attend_and_look(request)
        else:
            out = chosen.attend(request)
            lse, stats = looker(request, chosen)(_apart(request))
    return Inspection(
        out=outer(out, ndim, 2),
        lse=outer(lse, ndim, 1),
        stats=stats.map_arrays(lambda x: outer(x, ndim, 1)),
        request=request,
        plan=plan_of(request, implementation),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Value):
    """What one attention call did.

    Attributes
    ----------
    out : array
        ``(..., L, E)``: what `attention` returns, bit for bit.
    lse : array
        ``(..., L)``: natural log-sum-exp of the scores with all constants, before dropout, without the
        sink; differentiable; -inf where a query sees no key.
    stats : Statistics
        entropy, effective_keys, max_weight, jacobian_norm, each ``(..., L)``; not differentiable.
    request : Request
        What was asked for.
    plan : Plan
        What ran and why.
    """

    out: Any
    lse: Any
    stats: Statistics
    request: Request
    plan: Plan

    def weights(self, rows: Any = None, heads: Any = None) -> Any:
        """Compute the attention weights, before dropout and without the sink.

        Parameters
        ----------
        rows : int, slice or sequence of int, optional
            Queries; by default all. Only these are computed, in O(rows · S) memory where the mask is
            kept as intervals.
        heads : int, slice or sequence of int, optional
            Heads; by default all. Only these are computed; a score that is a function is asked for all.

        Returns
        -------
        array
            ``(..., H, L, S)`` in the accumulation dtype, or the chosen rows and heads of it.
        """
        request = self.request
        if len(request.q.shape) != max(request.sizes.ndim, 4):
            raise refusal(
                "weights",
                f"a record that left vmap (its queries are {describe(request.q)})",
                f"queries of {request.sizes.ndim} axes, as they were given",
                "call weights() inside vmap, and return the weights",
            )
        if heads is not None and request.sizes.ndim < 4:
            raise refusal("heads", heads, "None: these queries have no axis of heads")
        picked = _index(request, rows, request.sizes.L, "rows")
        chosen = _index(request, heads, request.sizes.H, "heads")
        try:
            with as_written(request.q):
                weights, _ = eager.weights_of(request, picked, chosen)
        except Exception as error:
            if type(error).__name__ != "UnexpectedTracerError":  # of JAX
                raise
            raise AttnspanError(
                "weights: given a record that left jit, grad or vmap while its score holds an array of the "
                "trace, needed the score's arrays to be known; call weights() inside, and return the weights"
            ) from error
        return outer(weights, request.sizes.ndim, 2)


def _index(request: Request, chosen: Any, n: int, what: str) -> Any:
    """Turn a choice of rows or heads into something that indexes an axis of length n."""
    if isinstance(chosen, slice):
        chosen = None if chosen == slice(None) else list(range(n))[chosen]
    if chosen is None:
        return None
    if isinstance(chosen, list) and not chosen:
        chosen = np.zeros(0, np.int64)
    numbers = np.atleast_1d(np.asarray(chosen)) if not is_array(chosen) else np.atleast_1d(fetch(chosen))
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise refusal(what, chosen, f"an integer, a slice or a list of integers between {-n} and {n - 1}")
    if any(not -n <= int(i) < n for i in numbers):
        raise refusal(what, str(numbers.tolist()), f"numbers between {-n} and {n - 1}")
    spots = [int(i) % n for i in numbers]
    on = {"device": request.q.device} if request.kind == "torch" else {}
    return request.xp.asarray(spots, dtype=request.xp.int32, **on)


def _apart(request: Request) -> Request:
    """Keep the second pass apart: a compiler that fused it with the first would move bits of out."""
    if request.kind == "jax":
        jax = sys.modules["jax"]
        leaves, tree = jax.tree_util.tree_flatten(request)
        return jax.tree_util.tree_unflatten(tree, jax.lax.optimization_barrier(leaves))
    if request.kind == "torch" and is_torch_compiling():
        from attnspan.torch_ops import opaque

        return request.map_arrays(lambda x: opaque(x) if framework(x) == "torch" else x)
    return request
