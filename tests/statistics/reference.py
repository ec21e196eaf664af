"""The definition in plain NumPy, one row at a time: the Jacobian is written out. And rows that are hard."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

INF, NAN = np.inf, np.nan
NAMES = ("entropy", "effective_keys", "max_weight", "jacobian_norm")
LOWEST, LARGEST = -8e8, 8e8  # stand for the ends of the dtype


def weights_of(scores: Any, keep: Any = True) -> np.ndarray:
    """Weights in extended precision (L, S); 0 where a query sees no key."""
    s = np.asarray(scores, np.longdouble)
    keep = np.broadcast_to(keep, s.shape) & (s != -INF)
    weights = np.zeros(s.shape, np.longdouble)
    for row, (a, seen) in enumerate(zip(s, keep, strict=True)):
        if seen.any():
            e = np.exp(a[seen] - a[seen].max())
            weights[row, seen] = e / e.sum()
    return weights


def statistics(scores: Any, keep: Any = True) -> dict[str, np.ndarray]:
    """Log-sum-exp and the four statistics, each (L,).

    A saturated weight is 1 minus the others: wherever 1 - p would cancel, the others are summed.
    """
    s = np.asarray(scores, np.longdouble)
    keep = np.broadcast_to(keep, s.shape) & (s != -INF)
    rows = [_row(a[seen]) for a, seen in zip(s, keep, strict=True)]
    return {name: np.array([row[name] for row in rows]) for name in ("lse", *NAMES)}


def _row(a: np.ndarray) -> dict[str, Any]:
    if not a.size:
        return {"lse": -INF, **dict.fromkeys(NAMES, 0.0)}
    first = int(np.argmax(a))
    below = a - a[first]
    e = np.exp(below)
    log_total = np.log1p(np.delete(e, first).sum())
    p = e / e.sum()
    others = np.array([np.delete(p, i).sum() for i in range(p.size)])
    jacobian = np.where(np.eye(p.size, dtype=bool), p * others, -np.outer(p, p))
    entropy = log_total - (np.where(p > 0, below, 0) * p).sum()
    norm = np.sqrt((jacobian**2).sum())
    found = (entropy, np.exp(entropy), p.max(), norm)
    return {"lse": a[first] + log_total, **dict(zip(NAMES, found, strict=True))}


# Each is held as it stands, and reversed, and rolled: the largest comes first, last and in between.
# Multiples of 1/4 are exact in every dtype.
_HARD: dict[str, list[float]] = {
    "one key": [5],
    "ordinary": [0.5, -1, 2, 0.25, 1],
    **{f"ahead by {gap}": [gap, 0, -1, -1.25, -40] for gap in (0.25, 1, 8, 17, 30, 60, 80, 88, 200, 700)},
    **{f"two, ahead by {gap}": [gap, 0, gap, -1, 0] for gap in (0.25, 1, 30, 60, 88, 200)},
    **{f"three, ahead by {gap}": [0, gap, gap, -1, gap] for gap in (0.25, 1, 30, 60, 88, 200)},
    "all equal": [3] * 7,
    "all equal but one below": [3] * 6 + [2],
    "all equal but one above": [3] * 6 + [4],
    "two, nearly tied": [1, 1 - 2**-20, -80, -80, -81],
    "one ahead, the others tied": [50, 10, 10, 10, 10],
    "rising": [0, 20, 40, 60, 80, 100],
    "rising slowly": [n / 4 for n in range(30)],
    "wide": [-1000, 1000, 0, -500, 999, 999],
    "far from 0": [1000, 999, 998, 990, 0],
    "far below 0": [-1000, -999, -998, -990, -2000],
    "excluded by -inf": [-INF, 2, -INF, 1, -INF],
    "one is left": [-INF, -INF, -7],
    "no key": [-INF] * 3,
    "the most negative": [LOWEST, LOWEST, 0, 1],
    "only the most negative": [LOWEST] * 3,
    "one of the most negative": [LOWEST, -INF],
    "both ends": [LARGEST, LOWEST, 0, LARGEST],
    "alone at the other end": [LOWEST, LARGEST],
}


def hard_rows(dtype: str) -> np.ndarray:
    """All of them in float64, padded by -inf."""
    width = max(map(len, _HARD.values()))
    rows = np.array([row + [-INF] * (width - len(row)) for row in _HARD.values()])
    limits = np.finfo(dtype)
    rows = np.where(rows == LOWEST, limits.min, np.where(rows == LARGEST, limits.max, rows))
    return np.concatenate([rows, rows[:, ::-1], np.roll(rows, 3, axis=1)])


def tiles_of(n: int, widths: Any) -> list[slice]:
    """Cut n keys into tiles of these widths, taken in turn."""
    edges = [0, *itertools.takewhile(lambda edge: edge < n, itertools.accumulate(itertools.cycle(widths))), n]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


# Tolerance: |given - wanted| <= rounding * |wanted| + vanishing.
#
# A difference of scores d is rounded by eps/2·|d|, and e^d moves by that share of itself. Rescaling from
# one maximum to the next adds such differences up, but they telescope to the distance between the largest
# and the smallest score of the row; beyond 104 in float32 and 745 in float64 e^-d is 0, and no distance
# matters. A sum of n terms adds half a rounding a term in the worst case, half of which is plenty; a few
# exponentials, quotients and the root one or two each. What lies below the smallest normal number may be
# flushed to 0, one key at a time, and the entropy multiplies it by the distance.
# (Of 7000 random rows, none needed more than nine tenths of 2 + distance/2 + n/8.)
#
# The log-sum-exp is held relative to the largest score, for that and the logarithm may cancel.
def hold(given: Any, wanted: np.ndarray, scores: np.ndarray, dtype: str, name: str = "") -> None:
    """Hold one number a row against the reference, for the scores (L, S) that count (the others -inf)."""
    limits, s = np.finfo(dtype), np.asarray(scores, np.longdouble)
    given, wanted = np.asarray(given, np.longdouble), np.asarray(wanted, np.longdouble)
    top = np.where(s.max(-1) == -INF, 0, s.max(-1))
    lowest = np.where(s == -INF, top[:, None], s).min(-1)
    distance = np.minimum(top - lowest, {"float32": 104, "float64": 745}[dtype])
    size = np.abs(top) + np.log(s.shape[-1]) if name == "lse" else np.abs(wanted)
    rounding = limits.eps * (4 + distance / 2 + s.shape[-1] / 4)
    vanishing = limits.tiny * s.shape[-1] * (1 + distance)
    assert given.shape == wanted.shape
    off = given != wanted  # an infinity must be the same
    error = np.abs(np.where(off, given, 0) - np.where(off, wanted, 0))
    right = error <= np.where(off, rounding * size + vanishing, 0)
    assert right.all(), f"{name}\n{scores[~right]}\n{given[~right]}\n{wanted[~right]}"
