"""The same statistics from tiles of scores, one tile of keys at a time; the weights are never written out.

What is kept a query: the largest score m so far and how many keys share it, n; and of the *other* keys
their own largest score μ with, relative to it,

    R1, R2, R3 = Σ e^{k(s - μ)}, k = 1, 2, 3,   and   A = Σ (s - μ)·e^{s - μ}.

The others have a reference of their own because their sums relative to m vanish in saturated rows, where
they are all there is to tell. When a new maximum arrives, the old one joins the others. At the end, with
g = μ - m and Z = n + e^g·R1,

    log-sum-exp = m + log Z,   largest weight = 1/Z,   entropy = log Z - e^g·(A + g·R1)/Z,

where log Z is log1p(n - 1 + e^g·R1) and all terms of the entropy have one sign: nothing cancels. The
Jacobian norm comes from n, 1/Z and the others' sums, as in `dense`.

Both classes are pytrees of arrays whose shapes and dtypes stay, so they can be carried through a loop of
`jax.lax`. What they compute is not differentiable. Callers hold `arrays.as_written` around them: what
excluded scores hold is computed with before it is set aside, and the difference of the largest and the
most negative finite score overflows (and is meant to).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnspan.arrays import accumulation_dtype, device_of, full_like_shape, pinned, stop_gradient, xp_of
from attnspan.statistics.dense import Statistics, jacobian_norm, statistics_where
from attnspan.values import Value

__all__ = ["RunningMean", "RunningStatistics"]

# e to this power is 0 in float64 too. Differences of scores stop here: at -inf, 0·(-inf) would be NaN.
FAR = -1000.0


@dataclass(frozen=True, eq=False, repr=False)
class RunningStatistics(Value):
    """Log-sum-exp and statistics of the keys seen so far, each field ``(..., L)``.

    Attributes
    ----------
    top, n : array
        The largest score (NaN or inf once a score that counts was), and how many keys share it. Where no
        key was seen, n is 0 and the score the most negative finite one.
    second : array
        The largest score of the other keys; likewise.
    r1, r2, r3, a : array
        The others' sums relative to it: Σe^d, Σe^2d, Σe^3d and Σd·e^d, d = s - second.

    Examples
    --------
    >>> import numpy as np
    >>> s = np.array([[0.0, 1.0, 2.0, 2.0]])
    >>> seen = RunningStatistics.start((1,), s).update(s[:, :3]).update(s[:, 3:])
    >>> lse, stats = seen.finish()
    >>> float(lse[0]), float(stats.max_weight[0])
    (2.9176, 0.3995)
    """

    top: Any
    n: Any
    second: Any
    r1: Any
    r2: Any
    r3: Any
    a: Any

    @classmethod
    def start(cls, shape: tuple[int, ...], like: Any) -> RunningStatistics:
        """Begin with no key seen: shape ``(..., L)``, library and device as `like`, dtype as its sums."""
        lowest, zero = _lowest(shape, like), _zeros(shape, like)
        return cls(top=lowest, n=zero, second=lowest, r1=zero, r2=zero, r3=zero, a=zero)

    def update(self, s: Any, keep: Any = None) -> RunningStatistics:
        """See a tile of keys: scores ``(..., L, T)``, and which of them count, a bool that broadcasts.

        None counts all; a score of -inf is excluded too. Excluded scores may hold anything.
        """
        return self if s.shape[-1] == 0 else _merged(self, _of_tile(*_prepared(s, keep, self.top.dtype)))

    def finish(self) -> tuple[Any, Statistics]:
        """Give the log-sum-exp and the statistics, each ``(..., L)``.

        A query that saw no key has log-sum-exp -inf and statistics 0; one that saw a NaN or an
        infinity has NaN everywhere.
        """
        xp, n = xp_of(self.top), self.n
        sees, known = n > 0, self.top < float("inf")
        gap, share, total = self._parts()
        p, second = 1 / total, share / total  # the weights of a key at `top`, and of one at `second`
        log_total = xp.log1p(xp.where(sees, n - 1 + share * self.r1, 0.0))
        entropy = log_total - second * (self.a + gap * self.r1)
        alone = (n == 1) & (self.r1 > 0)
        unit = xp.where(alone, second * self.r1, 1.0)
        second = xp.where(alone, 1 / xp.where(alone, self.r1, 1.0), second)  # measured in that unit
        sums = (second * self.r1, second**2 * self.r2, second**3 * self.r3)
        norm = jacobian_norm(xp, n, p, unit, *sums)
        lse = xp.where(known, xp.where(sees, self.top + log_total, -float("inf")), float("nan"))
        return lse, statistics_where(xp, sees, known, entropy, p, norm)

    def column_sums(self, s: Any, keep: Any = None) -> Any:
        """Sum over the queries the weights of a tile of keys, ``(..., T)``, once all keys were seen.

        `s` and `keep` as in `update`. This takes a second pass over the scores; measured from the
        maximum and not from the log-sum-exp, whose last place is coarse where the scores are large.
        """
        xp = xp_of(self.top)
        s, keep = _prepared(s, keep, self.top.dtype)
        top, (_, _, total) = self.top[..., None], self._parts()
        total = xp.where(top < float("inf"), total[..., None], float("nan"))
        return xp.sum(xp.where(keep, xp.exp(s - top) / total, 0.0), axis=-2)

    def _parts(self) -> tuple[Any, Any, Any]:
        """Give second - top, e to that, and the sum of all e^(s - top) (1 where no key was seen)."""
        xp = xp_of(self.top)
        gap = xp.clip(self.second - self.top, FAR, 0.0)
        share = xp.exp(gap)
        return gap, share, xp.where(self.n > 0, self.n + share * self.r1, 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class RunningMean(Value):
    """The mean of something under the weights, Σ p·x, over the keys seen so far; each field ``(..., L)``.

    The mass on a set of keys is the mean of its indicator, the mean distance that of the distances.

    Attributes
    ----------
    top : array
        The largest score.
    total, weighted : array
        Σe^d and Σx·e^d, d = s - top.

    Examples
    --------
    >>> import numpy as np
    >>> s, x = np.zeros((1, 4)), np.array([0, 1, 1, 0])
    >>> RunningMean.start((1,), s).update(s[:, :3], x[:3]).update(s[:, 3:], x[3:]).finish().tolist()
    [0.5]
    """

    top: Any
    total: Any
    weighted: Any

    @classmethod
    def start(cls, shape: tuple[int, ...], like: Any) -> RunningMean:
        """Begin with no key seen: shape ``(..., L)``, library and device as `like`, dtype as its sums."""
        return cls(top=_lowest(shape, like), total=_zeros(shape, like), weighted=_zeros(shape, like))

    def update(self, s: Any, x: Any, keep: Any = None) -> RunningMean:
        """See a tile of keys: scores ``(..., L, T)``, and `x` that broadcasts to them, numbers or bool.

        `keep` as in `RunningStatistics.update`; where a key is excluded, `x` may hold anything too.
        """
        if s.shape[-1] == 0:
            return self
        xp = xp_of(self.top)
        s, keep = _prepared(s, keep, self.top.dtype)
        top = xp.maximum(self.top, xp.max(_filled(xp, s, keep), axis=-1))
        e = xp.where(keep, xp.exp(s - top[..., None]), 0.0)
        scale = xp.exp(xp.clip(self.top - top, FAR, 0.0))
        x = xp.where(keep, xp.astype(stop_gradient(x), e.dtype, copy=False), 0.0)
        return RunningMean(
            top=top,
            total=scale * self.total + xp.sum(e, axis=-1),
            weighted=scale * self.weighted + xp.sum(e * x, axis=-1),
        )

    def finish(self) -> Any:
        """Give the mean, ``(..., L)``: 0 where no key was seen, NaN where a NaN or infinity was."""
        xp = xp_of(self.top)
        return self.weighted / xp.where(self.total == 0, 1.0, self.total)


def _of_tile(s: Any, keep: Any) -> RunningStatistics:
    """Take the sums of one tile."""
    xp = xp_of(s)
    top = xp.max(_filled(xp, s, keep), axis=-1, keepdims=True)
    is_top = keep & (s == top)
    n = xp.sum(xp.astype(is_top, s.dtype), axis=-1)
    others = keep & ~is_top
    second = xp.max(_filled(xp, s, others), axis=-1, keepdims=True)
    d = xp.clip(xp.where(others, s, second) - second, FAR, 0.0)
    e = xp.where(others, xp.exp(d), 0.0)
    r1, r2, r3, a = (xp.sum(term, axis=-1) for term in (e, e * e, e * e * e, e * d))
    return RunningStatistics(top[..., 0], n, second[..., 0], r1, r2, r3, a)


def _merged(x: RunningStatistics, y: RunningStatistics) -> RunningStatistics:
    """Join what was seen of two sets of keys: the lower of two maxima joins the others."""
    xp = xp_of(x.top)
    top = xp.maximum(x.top, y.top)
    lowest = xp.finfo(top.dtype).min
    n = xp.where(x.top == top, x.n, 0.0) + xp.where(y.top == top, y.n, 0.0)
    lost = xp.where(x.top < y.top, x.n, xp.where(y.top < x.top, y.n, 0.0))
    loser = xp.where(lost > 0, xp.minimum(x.top, y.top), lowest)
    second = xp.maximum(xp.maximum(x.second, y.second), loser)
    r1 = r2 = r3 = a = xp.zeros_like(top)
    parts = [(z.second, z.r1, z.r2, z.r3, z.a) for z in (x, y)]
    for reference, s1, s2, s3, sa in (*parts, (loser, lost, lost, lost, 0.0)):
        d = xp.clip(reference - second, FAR, 0.0)
        e = xp.exp(d)
        r1, r2, r3 = r1 + e * s1, r2 + e * e * s2, r3 + e * e * e * s3
        a = a + e * (sa + d * s1)
    return RunningStatistics(top, n, second, r1, r2, r3, a)


def _prepared(s: Any, keep: Any, dtype: Any) -> tuple[Any, Any]:
    """Give the scores in the dtype of the sums, without gradient, and which of them count."""
    s = pinned(xp_of(s).astype(stop_gradient(s), dtype, copy=False))
    there = s != -float("inf")
    return s, there if keep is None else keep & there


def _filled(xp: Any, s: Any, keep: Any) -> Any:
    """Put the most negative finite number where a score does not count."""
    return xp.where(keep, s, xp.finfo(s.dtype).min)


def _lowest(shape: tuple[int, ...], like: Any) -> Any:
    dtype = accumulation_dtype(like)
    xp = xp_of(like)
    return full_like_shape(xp, device_of(like), shape, xp.finfo(dtype).min, dtype)


def _zeros(shape: tuple[int, ...], like: Any) -> Any:
    return full_like_shape(xp_of(like), device_of(like), shape, 0.0, accumulation_dtype(like))
