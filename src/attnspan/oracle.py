"""The definition: what attention means, in float64 NumPy and plain loops.

For query i of batch element b and head h, over the keys j that it may see::

    s_j   = score(q_i, k_j)                   with all its constants
    s_j   = softcap * tanh(s_j / softcap)     if a softcap is given
    s_j   = s_j + bias_ij                     a bias of -inf excludes the pair
    lse   = log sum_j exp(s_j)
    p_j   = exp(s_j - lse)                    the weights
    out_i = sigmoid(lse - sink) * sum_j p_j * kept_ij / (1 - dropout) * v_j

A query that sees no key has output 0, weights 0, lse -inf and statistics 0. An excluded pair is never
looked at. If a query that sees a key, or a key that it sees, is not finite, the query's row is NaN in
everything; if only a value that it sees is not finite, its output is NaN and the rest stays right.

Letters: B batch, H query heads, G key/value heads (query head h uses key/value head h // (H/G)),
L queries, S keys, Dq and Dk width of query and key (D where they agree), E width of value.

This module shares no code with what it judges: it imports NumPy alone, and no implementation imports it.
Use it to test masks, scores and kernels of your own, on small shapes: it is slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Result", "attention", "directional", "gradients", "keep_bits", "philox4x32"]


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What attention gives, all in float64; ``...`` are the leading axes of ``out``.

    ``out`` (..., L, E), after dropout and sink. The rest is before dropout and without the sink: ``lse``
    (..., L), natural, with all constants; ``weights`` (..., L, S), exp(score - lse), NaN at the keys seen
    where lse is NaN; and (..., L) each ``entropy``, -sum p log p; ``max_weight``; ``jacobian_norm``, the
    Frobenius norm of diag(p) - p p^T; ``effective_keys``, exp(entropy), 0 for an empty row.
    """

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    entropy: np.ndarray
    max_weight: np.ndarray
    jacobian_norm: np.ndarray
    effective_keys: np.ndarray


def attention(
    q: Any, k: Any, v: Any, *, score: str | Callable = "scaled_dot", keep: Any = None, bias: Any = None,
    softcap: float | None = None, sink: Any = None, dropout: float = 0.0, seed: int | None = None,
) -> Result:  # fmt: skip
    """Compute attention row by row; the formula is at the top of this module.

    Parameters
    ----------
    q, k, v : (..., L, Dq), (..., S, Dk), (..., S, E)
        As many leading axes in each: none, (B,), (B, H) or more. The first is B and the last of two or
        more is H, where k and v may have G heads; the others broadcast with size 1.
    score : str or function
        ``"dot"`` q.k, ``"scaled_dot"`` q.k / sqrt(D), ``"cosine"`` ``q.k / (|q| |k|)`` (0 if either is 0),
        ``"gaussian"`` ``-|q - k|^2 / (2 sqrt(D))``; or a function of one visible, finite query vector and key
        vector, called ``score(q_i, k_j, b, h)`` if four of its parameters have no default, and
        ``score(q_i, k_j)`` if two. -inf excludes the pair; NaN or +inf makes the row NaN.
    keep : boolean array or function, optional
        True = may attend. A function is called ``keep(b, h, i, j)``.
    bias, softcap, sink : optional
        An array, a number above 0; and (), (H,) or (B|1, H|1), a logit in the denominator only.
        ``keep`` and ``bias`` broadcast to (B, H, L, S), without heads also to (B, L, S).
    dropout, seed : float and int
        The part of the weights that is set to 0, and what decides which: see `keep_bits`.

    Raises
    ------
    ValueError, TypeError
        If shapes do not fit or a number is out of its range; if ``keep`` is not boolean or ``score`` takes
        neither two nor four parameters.

    Examples
    --------
    >>> q, k, v = np.ones((4, 1)), np.log([[1], [2], [3], [4]]), [[1], [10], [100], [1000]]
    >>> attention(q, k, v, score="dot", keep=lambda b, h, i, j: j <= i).out[:, 0].round(6).tolist()
    [1.0, 7.0, 53.5, 432.1]
    """
    options = {"keep": keep, "bias": bias, "softcap": softcap, "sink": sink}
    p = _prepare(q, k, v, score=score, dropout=dropout, seed=seed, **options)
    rows = p.visible.shape[:-1]
    out, weights = np.zeros((*rows, p.vectors["v"].shape[-1])), np.zeros(p.visible.shape)
    lse, entropy, largest, norm, effective = (np.zeros(rows) for _ in range(5))
    for at in np.ndindex(*rows):
        out[at], lse[at], weights[at], entropy[at] = _row(p, at)
        if lse[at] != -math.inf:
            largest[at], norm[at] = weights[at].max(), _jacobian_norm(weights[at])
            effective[at] = math.exp(entropy[at])
    return Result(out, lse, weights, entropy, largest, norm, effective)


def _row(p: _Problem, at: tuple) -> tuple[np.ndarray, float, np.ndarray, float]:
    """Return out (E,), lse, weights (S,) and entropy of the query at (*leading index, i)."""
    out, weights = np.zeros(p.vectors["v"].shape[-1]), np.zeros(p.visible.shape[-1])
    scores = {}
    for j in np.flatnonzero(p.visible[at]).tolist():
        q, k = p.read("q", at, j), p.read("k", at, j)
        finite = np.isfinite(q).all() and np.isfinite(k).all()
        scores[j] = float(p.score(q, k, *_batch_head(at[:-1]))) if finite else math.nan
        if p.softcap is not None:
            scores[j] = p.softcap * math.tanh(scores[j] / p.softcap)
        if "bias" in p.vectors:
            scores[j] += float(p.read("bias", at, j)[0])
    if any(math.isnan(s) or s == math.inf for s in scores.values()):
        weights[list(scores)] = math.nan
        return out + math.nan, math.nan, weights, math.nan
    seen = [j for j in scores if scores[j] != -math.inf]
    if not seen:
        return out, -math.inf, weights, 0.0
    # Relative to the largest, the exponentials sum to 1 + others: a saturated row keeps its digits.
    top = max(seen, key=scores.__getitem__)
    below = {j: scores[j] - scores[top] for j in seen}
    others = math.fsum(math.exp(below[j]) for j in seen if j != top)
    lse = scores[top] + math.log1p(others)
    weights[seen] = [math.exp(below[j]) / (1 + others) for j in seen]
    entropy = math.log1p(others) - math.fsum(weights[j] * below[j] for j in seen if weights[j] > 0)
    if not all(np.isfinite(p.read("v", at, j)).all() for j in seen):
        return out + math.nan, lse, weights, entropy
    for j in seen:
        if p.dropped is None or not p.dropped[at][j]:
            out += weights[j] / (1 - p.dropout) * p.read("v", at, j)
    if "sink" in p.vectors:  # sigmoid(lse - sink) = 1 / (1 + exp(sink - lse))
        out *= math.exp(-np.logaddexp(0, p.read("sink", at, top)[0] - lse))
    return out, lse, weights, entropy


def _jacobian_norm(weights: np.ndarray) -> float:
    """Take the matrix's own norm; its diagonal p_i - p_i^2 is p_i * (sum of the others): nothing cancels."""
    p = weights[weights != 0]
    others = np.where(np.eye(len(p), dtype=bool), 0, p)  # row i: all weights but the i-th
    jacobian = np.diag(p * others.sum(axis=1)) - p[:, None] * others
    largest = float(np.abs(jacobian).max())  # dividing by it keeps the squares from underflowing
    return 0.0 if largest == 0 else largest * float(np.linalg.norm(jacobian / largest))


_SCORES = {
    "dot": lambda q, k: np.dot(q, k),
    "scaled_dot": lambda q, k: np.dot(q / math.sqrt(max(len(q), 1)), k),
    "cosine": lambda q, k: np.dot(q / (math.hypot(*q) or 1), k / (math.hypot(*k) or 1)),
    "gaussian": lambda q, k: -np.sum((q - k) ** 2) / (2 * math.sqrt(max(len(q), 1))),
}


def philox4x32(counter: Any, key: Any, rounds: int = 10) -> tuple[int, int, int, int]:
    """Mix four words with two by Philox4x32, the counter-based generator of Salmon et al. (2011).

    A round takes (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), with
    M0 = 0xD2511F53 and M1 = 0xCD9E8D57; between rounds the key grows by (0x9E3779B9, 0xBB67AE85).
    ``counter`` is four integers and ``key`` two, taken modulo 2^32; another number of them is a ValueError.

    Examples
    --------
    >>> [f"{word:08x}" for word in philox4x32((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = (int(c) % 2**32 for c in counter)
    k0, k1 = (int(k) % 2**32 for k in key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def keep_bits(seed: int, n: int, L: int, S: int, p: float) -> np.ndarray:
    """Say which weights (L, S) of one batch element and head survive dropout: True = kept.

    (r1, r2, ., .) = Philox4x32-10 with counter (i, n, 0, 0) and the seed's low and high word as key; then,
    for key j and modulo 2^32::

        x = r1 ^ (j * 0x9E3779B9); x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15
        x ^= r2; x *= 0x846ca68b; x ^= x >> 16;  keep = x >= floor(p * 2^32)

    Parameters
    ----------
    seed, n : int
        Modulo 2^64; and the row-major index over the leading axes of the output: b, or b * H + h.
    p : float
        From 0 (keep all) to 1 (keep none); anything else is a ValueError.

    Examples
    --------
    >>> keep_bits(seed=0, n=0, L=2, S=3, p=0.0).tolist()
    [[True, True, True], [True, True, True]]
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: given {p!r}, needed a rate in [0, 1]")
    high, low = divmod(operator.index(seed) % 2**64, 2**32)
    kept = np.zeros((L, S), dtype=bool)
    for i in range(L):
        r1, r2, _, _ = philox4x32((i, n, 0, 0), (low, high))
        for j in range(S):
            x = r1 ^ (j * 0x9E3779B9 % 2**32)
            x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
            x = (x ^ (x >> 15) ^ r2) * 0x846CA68B % 2**32
            kept[i, j] = (x ^ (x >> 16)) >= math.floor(p * 2**32)
    return kept


def gradients(q: Any, k: Any, v: Any, g_out: Any, g_lse: Any = None, **options: Any) -> dict[str, np.ndarray]:
    """Differentiate sum(out * g_out) + sum(lse * g_lse) in every input, by central differences.

    For an element x, (f(x + step) - f(x - step)) / (2 step) with step = 1e-5 * max(1, abs(x)), over the rows
    that see it: two evaluations each, eight to ten right digits. Empty rows, and elements that no row sees,
    give exactly 0: what those hold, also in g_out and g_lse, is not looked at.

    Parameters
    ----------
    q, k, v, **options
        As in `attention`; the result holds dq, dk, dv, and where given dbias and dsink, each in its shape.
    g_out, g_lse : (..., L, E), (..., L)
        The gradients that arrive at out and, if given, lse; other shapes raise ValueError.

    Examples
    --------
    >>> x = np.zeros((2, 1))
    >>> gradients(x, x, x, np.ones((2, 1)))["dv"].round(9).tolist()
    [[1.0], [1.0]]
    """
    p, g_out, g_lse = _prepare_backward(_prepare(q, k, v, **options), g_out, g_lse)
    grads = {}
    for name, vectors in p.vectors.items():
        grad = np.zeros(vectors.shape)
        for e, d in np.ndindex(*vectors.shape):
            x = float(vectors[e, d])
            step = 1e-5 * max(1.0, abs(x)) if math.isfinite(x) else 1e-5
            difference = 0.0
            for row in np.argwhere((p.visible & (p.where[name] == e)).any(axis=-1)):
                vectors[e, d] = x + step
                difference += _objective(p, tuple(row), g_out, g_lse)
                vectors[e, d] = x - step
                difference -= _objective(p, tuple(row), g_out, g_lse)
            vectors[e, d] = x
            grad[e, d] = difference / (2 * step)
        grads["d" + name] = grad.reshape(p.shapes[name])
    return grads


def directional(
    q: Any, k: Any, v: Any, g_out: Any, g_lse: Any = None, *, along: dict, step: float = 1e-5, **options: Any
) -> float:
    """Differentiate sum(out * g_out) + sum(lse * g_lse) along one direction, by two evaluations.

    (f(x + step * along) - f(x - step * along)) / (2 step), all inputs moved at once: what
    sum(dq * along["q"]) + sum(dk * along["k"]) + ... should be. NaN if any row is NaN.

    Parameters
    ----------
    q, k, v, g_out, g_lse, **options
        As in `gradients`.
    along : dict
        Directions by the name of their input (q, k, v, bias, sink), with entries of about 1; a name that
        was not given, or another shape than the input's, raises ValueError.

    Examples
    --------
    >>> x = np.zeros((2, 1))
    >>> round(directional(x, x, x, np.ones((2, 1)), along={"v": np.ones((2, 1))}), 9)
    2.0
    """
    p, g_out, g_lse = _prepare_backward(_prepare(q, k, v, **options), g_out, g_lse)
    above, below = dict(p.vectors), dict(p.vectors)
    for name, direction in along.items():
        if np.shape(direction) != p.shapes.get(name):
            raise ValueError(f"along[{name!r}]: given {np.shape(direction)}, needed {p.shapes.get(name)}")
        move = step * np.asarray(direction, dtype=np.float64).reshape(p.vectors[name].shape)
        above[name], below[name] = p.vectors[name] + move, p.vectors[name] - move
    up, down = dataclasses.replace(p, vectors=above), dataclasses.replace(p, vectors=below)
    rows = np.ndindex(*g_lse.shape)
    changes = (_objective(up, at, g_out, g_lse) - _objective(down, at, g_out, g_lse) for at in rows)
    return math.fsum(changes) / (2 * step)


def _objective(p: _Problem, at: tuple, g_out: np.ndarray, g_lse: np.ndarray) -> float:
    """Take one row's share of sum(out * g_out) + sum(lse * g_lse); an empty row has none."""
    out, lse, _, _ = _row(p, at)
    return 0.0 if lse == -math.inf else float(np.dot(out, g_out[at]) + lse * g_lse[at])


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The checked arguments: the pair (*leading index, i, j) reads vectors[name][where[name][pair]]."""

    vectors: dict[str, np.ndarray]  # float64 copies (count, width); bias and sink have width 1
    where: dict[str, np.ndarray]  # integers (..., L, S)
    shapes: dict[str, tuple]  # the shapes that were given
    visible: np.ndarray  # booleans (..., L, S): kept, and no bias of -inf
    score: Callable
    softcap: float | None
    dropout: float
    dropped: np.ndarray | None  # booleans (..., L, S)

    def read(self, name: str, at: tuple, j: int) -> np.ndarray:
        return self.vectors[name][self.where[name][at][j]]


def _prepare(*arrays: Any, **options: Any) -> _Problem:
    given = inspect.signature(attention).bind(*arrays, **options)
    given.apply_defaults()
    q, k, v, score, keep, bias, softcap, sink, dropout, seed = given.arguments.values()
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    inputs = {name: np.array(x, dtype=np.float64) for name, x in inputs.items() if x is not None}
    pairs = _pairs(*(inputs[name].shape for name in "qkv"))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: given {softcap!r}, needed a number above 0, or None")
    if dropout != 0 and seed is None:
        raise ValueError(f"seed: given None, needed an integer for dropout={dropout!r}")
    score = _as_score(score, inputs["q"].shape[-1], inputs["k"].shape[-1])

    vectors, where, shapes = {}, {}, {name: x.shape for name, x in inputs.items()}
    for name, x in inputs.items():
        shape, width = (x.shape[:-1], x.shape[-1]) if name in "qkv" else (x.shape, 1)
        vectors[name] = x.reshape(math.prod(shape), width)
        ids = np.arange(math.prod(shape)).reshape(shape)
        if name in "kv" and ids.ndim >= 3:  # query head h reads key/value head h // (H/G)
            ids = np.repeat(ids, pairs[-3] // max(shape[-2], 1), axis=-2)
        if name == "sink":
            ids = ids.reshape((1,) * (2 - ids.ndim) + ids.shape + (1, 1))
        elif name != "bias":
            ids = ids[..., :, None] if name == "q" else ids[..., None, :]
        where[name] = _fit(name, ids, pairs)
    if callable(keep):
        flags = [bool(keep(*_batch_head(at[:-2]), *at[-2:])) for at in np.ndindex(*pairs)]
        keep = np.array(flags, dtype=bool).reshape(pairs)
    keep = np.asarray(True if keep is None else keep)
    if keep.dtype != bool:
        raise TypeError(f"keep: given {keep.dtype}, needed booleans, True = may attend; add with bias=")
    visible = _fit("keep", keep, pairs)
    if bias is not None:
        visible = visible & (inputs["bias"].reshape(-1)[where["bias"]] != -math.inf)
    dropped = None
    if dropout != 0:
        bits = [keep_bits(seed, n, pairs[-2], pairs[-1], dropout) for n in range(math.prod(pairs[:-2]))]
        dropped = ~np.array(bits, dtype=bool).reshape(pairs)
    return _Problem(vectors, where, shapes, visible, score, softcap, dropout, dropped)


def _prepare_backward(p: _Problem, g_out: Any, g_lse: Any) -> tuple[_Problem, np.ndarray, np.ndarray]:
    rows, E = p.visible.shape[:-1], p.vectors["v"].shape[-1]
    g_lse = np.zeros(rows) if g_lse is None else g_lse
    g_out, g_lse = np.asarray(g_out, dtype=float), np.asarray(g_lse, dtype=float)
    if g_out.shape != (*rows, E) or g_lse.shape != rows:
        raise ValueError(f"g_out, g_lse: given {g_out.shape}, {g_lse.shape}, needed {(*rows, E)}, {rows}")
    return p, g_out, g_lse


def _as_score(score: str | Callable, Dq: int, Dk: int) -> Callable:
    """Return ``score`` as a function of query vector, key vector, b and h."""
    if isinstance(score, str):
        if score not in _SCORES or Dq != Dk:
            raise ValueError(f"score: given {score!r}, widths {Dq}, {Dk}; needed equal ones and {[*_SCORES]}")
        score = _SCORES[score]
    parameters = inspect.signature(score).parameters.values()
    needed = sum(x.kind <= x.POSITIONAL_OR_KEYWORD and x.default is x.empty for x in parameters)
    if needed not in (2, 4):
        raise TypeError(f"score: given {needed} parameters without default, needed (q, k) or (q, k, b, h)")
    return score if needed == 4 else lambda q, k, b, h: score(q, k)


def _pairs(q: tuple, k: tuple, v: tuple) -> tuple:
    """Return the scores' shape: leading axes broadcast, apart from heads (as many as q's), then L, S."""
    given = f"q, k, v: given shapes {q}, {k}, {v}"
    if len(q) < 2 or not len(q) == len(k) == len(v) or k[-2] != v[-2]:
        raise ValueError(f"{given}, needed one number of axes, 2 or more, and as many keys as values")
    outer, heads = (slice(-3), q[-3:-2]) if len(q) >= 4 else (slice(-2), ())
    if heads and (v[-3] != k[-3] or (q[-3] % k[-3] if k[-3] else q[-3])):
        raise ValueError(f"{given}, needed one number G of key and value heads that divides H = {q[-3]}")
    try:
        return (*np.broadcast_shapes(q[outer], k[outer], v[outer]), *heads, q[-2], k[-2])
    except ValueError:
        raise ValueError(f"{given}, needed leading axes of equal size, or 1") from None


def _batch_head(lead: tuple) -> tuple[int, int]:
    return (lead[0] if lead else 0), (lead[-1] if len(lead) >= 2 else 0)


def _fit(name: str, array: np.ndarray, pairs: tuple) -> np.ndarray:
    """Broadcast (B|1, H|1, L|1, S|1), or (L|1, S|1), or as many axes as the scores have, to the scores."""
    shape, ndim = array.shape, len(pairs)
    if len(shape) == 4:
        shape = {2: shape[2:], 3: shape[:1] + shape[2:]}.get(ndim, shape[:1] + (1,) * (ndim - 4) + shape[1:])
    with contextlib.suppress(ValueError):
        if len(shape) in (0, 1, 2, ndim):
            return np.broadcast_to(array.reshape(shape), pairs)
    raise ValueError(f"{name}: given shape {array.shape}, needed one that broadcasts to {pairs}")
