"""What a walk over tiles works on, and the steps at one tile: the same in every library.

A tile is some queries times some keys. Its scores are made, used and forgotten; what stays is a
running maximum m, a running total l and a weighted sum of values o for each query:

    forward    m' = max(m, max s),  l' = l e^(m - m') + Σ e^(s - m'),  o' = o e^(m - m') + e^(s - m') v
    backward   p = e^(s - lse),  ds = p (do·v - do·o + dlse),  dv = pᵀ do,  and on through the score

where the derivative of the score itself is the framework's, tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from attnspan.arrays import (
    arange,
    device_of,
    full_like_shape,
    is_array,
    is_floating,
    segment,
    stop_gradient,
    xp_of,
)
from attnspan.biases import ALiBi
from attnspan.dropout import keys_kept, row_draws
from attnspan.implementations.base import scored, weighted, with_middle_axes
from attnspan.masks.bound import Bound
from attnspan.masks.coverage import rows_of, shown
from attnspan.request import Request
from attnspan.scores.base import Form, grouped_product
from attnspan.scores.function import CalledForm, Function
from attnspan.shapes import Sizes
from attnspan.softmax import exp_below
from attnspan.statistics import RunningStatistics
from attnspan.values import Value

__all__ = [
    "Back",
    "Part",
    "Problem",
    "Rows",
    "Scoring",
    "Sums",
    "absorbed",
    "gradients",
    "look_started",
    "looked",
    "looked_at",
    "one_pair",
    "settled",
    "started",
]


@dataclass(frozen=True)
class Part:
    """Some queries, or some keys: where they start, how many they are, and of how many."""

    start: Any
    count: int
    whole: int


@dataclass(frozen=True, eq=False, repr=False)
class Scoring(Value):
    """What the scores are made of; its floating-point arrays have gradients.

    Attributes
    ----------
    form : Form
        The scores without softcap and bias.
    softcap : number, array or None
        As the caller gave it.
    bias : array, ALiBi or None
        Finite; an array has all axes of the scores.
    """

    form: Form
    softcap: Any
    bias: Any

    def cut(self, along: Callable[[Any, int | None, int | None], Any]) -> Scoring:
        """Replace each array by ``along(array, axis of its queries, axis of its keys)``."""
        bias = along(self.bias, *self._bias_axes()) if is_array(self.bias) else self.bias
        return Scoring(self.form.cut(along), self.softcap, bias)

    def _bias_axes(self) -> tuple[int | None, int | None]:
        return -2 if self.bias.shape[-2] > 1 else None, -1 if self.bias.shape[-1] > 1 else None

    def leaves(self) -> list[Any]:
        """List the arrays that have gradients."""
        return [x for x in self.in_order() if is_floating(x)]

    def places(self) -> list[tuple[int | None, int | None]]:
        """Say of each leaf on which axis its queries and its keys lie."""
        found = self.form.places()
        if is_array(self.softcap):
            found.append((None, None))
        if is_array(self.bias):
            found.append(self._bias_axes())
        elif self.bias is not None:
            found += [(None, None)] * len(list(self.bias.arrays()))
        return [place for place, x in zip(found, self.in_order(), strict=True) if is_floating(x)]

    def with_leaves(self, leaves: Any) -> Scoring:
        """Put other arrays in the place of the leaves."""
        rest = iter(leaves)
        return self.map_arrays(lambda x: next(rest) if is_floating(x) else x)


@dataclass(frozen=True, eq=False, repr=False)
class Problem(Value):
    """One attention call, ready to be walked over.

    Attributes
    ----------
    scoring : Scoring
        What the scores are made of.
    v : array
        ``(..., G, S, E)``.
    bound : Bound or None
        The mask, with all axes of the scores; None means all.
    low, high : int, array or None
        The words of the seed.
    dropout : float
        The share of weights dropped.
    sizes : Sizes
        The letters.
    """

    scoring: Scoring
    v: Any
    bound: Bound | None
    low: Any
    high: Any
    dropout: float
    sizes: Sizes

    def of(self, v: Any, leaves: Any) -> Problem:
        """Put other arrays in the place of those that have gradients."""
        return replace(self, scoring=self.scoring.with_leaves(leaves), v=v)

    def positions(self, part: Part) -> Any:
        """Give the positions of queries or keys, int32."""
        return part.start + arange(part.count, self.v, xp_of(self.v).int32)


@dataclass(frozen=True, eq=False)
class Rows:
    """Some queries of a problem: what all their tiles share.

    Attributes
    ----------
    problem : Problem
        The whole.
    part : Part
        Which queries.
    scoring, bound : Scoring, Bound or None
        Cut to these queries.
    draws : tuple of array, or None
        The words of dropout, ``(..., H, rows)`` each.
    """

    problem: Problem
    part: Part
    scoring: Scoring
    bound: Bound | None
    draws: tuple[Any, Any] | None

    @classmethod
    def of(cls, problem: Problem, part: Part) -> Rows:
        """Cut some queries out of a problem."""
        along = lambda x, axis, _: _segment(x, axis, part)  # noqa: E731
        bound = problem.bound if problem.bound is None else rows_of(problem.bound, part.start, part.count)
        draws = None
        if problem.dropout:
            words = problem.low, problem.high
            draws = row_draws(words, problem.positions(part), problem.sizes.lead)
        return cls(problem, part, problem.scoring.cut(along), bound, draws)

    def tile(self, columns: Part) -> Scoring:
        """Cut the scoring of one tile out."""
        return self.scoring.cut(lambda x, _, axis: _segment(x, axis, columns))

    def scores(self, scoring: Scoring, columns: Part) -> Any:
        """Write the scores of one tile out, from its scoring: ``(..., H, rows, columns)``."""
        problem, bias = self.problem, scoring.bias
        if isinstance(bias, ALiBi):
            q, k = problem.positions(self.part)[:, None], problem.positions(columns)
            bias = bias.dense(q, k, problem.sizes.L, problem.sizes.S, problem.v)
            bias = with_middle_axes(bias, problem.sizes)
        return scored(scoring.form, scoring.softcap, bias)

    def keep(self, columns: Part) -> Any:
        """Write the mask of one tile out: bool, or None for all."""
        return None if self.bound is None else shown(self.bound, self.problem.positions(columns))

    def kept(self, p: Any, columns: Part) -> Any:
        """Drop weights of one tile by the counter's bits, and scale the rest."""
        if self.draws is None:
            return p
        share = self.problem.dropout
        stay = keys_kept(self.draws, self.problem.positions(columns), share)
        return xp_of(p).where(stay, p / (1 - share), 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class Sums(Value):
    """The running sums of some queries.

    Attributes
    ----------
    top, total : array
        ``(..., H, rows, 1)``: the largest score so far, and the sum of e^(s - top).
    out : array
        ``(..., H, rows, E)``: the values weighted with e^(s - top).
    """

    top: Any
    total: Any
    out: Any


def one_pair(request: Request, own: Callable[[Any], Any]) -> CalledForm:
    """Give a score function's form for one query and one key of a call, its arrays replaced by ``own(x)``."""
    sizes, score = request.sizes, request.score
    assert isinstance(score, Function)
    q, k = (xp_of(x).astype(x[..., :1, :], request.accumulation, copy=False) for x in (request.q, request.k))
    q = xp_of(q).broadcast_to(q, (*sizes.lead, 1, sizes.Dq))
    k = xp_of(k).broadcast_to(k, (*sizes.lead[:-1], sizes.G, 1, sizes.Dk))
    return score.map_arrays(own).lower(own(q), own(k), None, sizes)


def started(rows: Rows) -> Sums:
    """Give the sums before the first tile."""
    problem, xp = rows.problem, xp_of(rows.problem.v)
    lead, dtype = (*problem.sizes.lead, rows.part.count), problem.v.dtype

    def full(last: int, value: float) -> Any:
        return full_like_shape(xp, device_of(problem.v), (*lead, last), value, dtype)

    return Sums(full(1, xp.finfo(dtype).min), full(1, 0.0), full(problem.v.shape[-1], 0.0))


def absorbed(rows: Rows, sums: Sums, columns: Part, keep: Any) -> Sums:
    """Add one tile of keys to the sums."""
    xp, v = xp_of(sums.top), _segment(rows.problem.v, -2, columns)
    scoring = rows.tile(columns)
    s = rows.scores(scoring, columns)
    keep = _there(scoring, s, keep)
    lowest = xp.finfo(s.dtype).min
    top = xp.maximum(
        sums.top, xp.max(s if keep is None else xp.where(keep, s, lowest), axis=-1, keepdims=True)
    )
    p = _exp(xp, s, keep, top)
    shrink = exp_below(xp, sums.top - top)
    total = sums.total * shrink + xp.sum(p, axis=-1, keepdims=True)
    return Sums(top, total, sums.out * shrink + weighted(xp, rows.kept(p, columns), v))


def settled(sums: Sums) -> tuple[Any, Any, Any]:
    """Give (out, largest score, logarithm of the total) after the last tile; an empty row's are 0, 0, -inf.

    Their sum is the log-sum-exp. The backward pass needs them apart: beside a large score the
    logarithm would lose its digits.
    """
    xp = xp_of(sums.top)
    empty = sums.total == 0
    total = xp.where(empty, 1.0, sums.total)
    log_total = xp.where(empty, -float("inf"), xp.log(total))
    return sums.out / total, xp.where(empty, 0.0, sums.top)[..., 0], log_total[..., 0]


def look_started(rows: Rows) -> RunningStatistics:
    """Give the statistics before the first tile."""
    problem = rows.problem
    return RunningStatistics.start((*problem.sizes.lead, rows.part.count), problem.v)


def looked_at(rows: Rows, running: RunningStatistics, columns: Part, keep: Any) -> RunningStatistics:
    """Add one tile of keys to the statistics."""
    return running.update(rows.scores(rows.tile(columns), columns), keep)


def looked(running: RunningStatistics) -> tuple[Any, ...]:
    """Give the fields of `Statistics` after the last tile."""
    _, found = running.finish()
    return tuple(x for _, x in found.arrays())


@dataclass(frozen=True, eq=False, repr=False)
class Back(Value):
    """What comes back to some queries.

    Attributes
    ----------
    out : array
        ``(..., H, rows, E)``: the gradient of the output, 0 where a query sees nothing.
    top, log_total, delta : array
        ``(..., H, rows, 1)``: the parts of the log-sum-exp (0 where empty), and do·o - dlse.
    """

    out: Any
    top: Any
    log_total: Any
    delta: Any

    @classmethod
    def of(cls, out: Any, top: Any, log_total: Any, out_gradient: Any, lse_gradient: Any) -> Back:
        """Prepare the gradients that arrive: those of empty rows may be anything, and go nowhere."""
        xp = xp_of(out)
        empty = log_total == -float("inf")
        g = xp.where(empty[..., None], 0.0, out_gradient)
        delta = xp.sum(g * out, axis=-1) - xp.where(empty, 0.0, lse_gradient)
        log_total = xp.where(empty, 0.0, log_total)
        return cls(g, stop_gradient(top)[..., None], log_total[..., None], delta[..., None])

    def rows(self, part: Part) -> Back:
        """Keep only some of the queries."""
        return self.map_arrays(lambda x: _segment(x, -2, part))


def gradients(
    rows: Rows, columns: Part, keep: Any, back: Back, vjp: Callable[..., tuple[Any, Callable[[Any], Any]]]
) -> tuple[Any, Any]:
    """Give the gradients of one tile: of the leaves of its scoring, and of its values.

    ``vjp(f, leaves)`` gives f(leaves) and its pullback, as the framework has it.
    """
    problem = rows.problem
    xp, v = xp_of(problem.v), _segment(problem.v, -2, columns)
    scoring = rows.tile(columns)
    s, pull = vjp(lambda leaves: rows.scores(scoring.with_leaves(leaves), columns), scoring.leaves())
    keep = _there(scoring, s, keep)
    p = _exp(xp, s, keep, back.top, back.log_total)
    ds = p * (rows.kept(grouped_product(xp, back.out, v), columns) - back.delta)
    if keep is not None:
        ds = xp.where(keep, ds, 0.0)
    return pull(ds), _grouped_sum(xp, rows.kept(p, columns), back.out, v.shape[-3])


def _exp(xp: Any, s: Any, keep: Any, top: Any, log_total: Any = 0.0) -> Any:
    """Exponentiate the scores that count, below `top` and a logarithm; 0 elsewhere.

    The others are filled before, for what overflows here has a derivative that is no number.
    """
    if keep is None:
        return exp_below(xp, s - top - log_total)
    return xp.where(keep, exp_below(xp, xp.where(keep, s, top) - top - log_total), 0.0)


def _there(scoring: Scoring, s: Any, keep: Any) -> Any:
    """Exclude scores of -inf as well, where there can be any."""
    if scoring.bias is None and not isinstance(scoring.form, CalledForm):
        return keep
    there = s != -float("inf")
    return there if keep is None else keep & there


def _grouped_sum(xp: Any, p: Any, g: Any, G: int) -> Any:
    """pᵀ·g, summed over the query heads that share a value head: ``(..., G, S, E)``."""
    H = p.shape[-3]
    if H != G:
        p, g = (x.reshape((*x.shape[:-3], G, H // G * x.shape[-2], x.shape[-1])) for x in (p, g))
    return xp.matmul(xp.matrix_transpose(p), g)


def _segment(x: Any, axis: int | None, part: Part) -> Any:
    return x if axis is None or part.count == part.whole else segment(x, axis, part.start, part.count)
