"""A function as a score."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attnspan.arrays import constant, device_of, framework, is_array, is_floating
from attnspan.errors import describe, refusal
from attnspan.scores.base import Axes, Form, Score, per_head, xp_of
from attnspan.shapes import Sizes, inner, outer

__all__ = ["CalledForm", "Function", "as_function"]


@dataclass(frozen=True, eq=False, repr=False)
class Function(Score):
    """A function of a tile of queries and a tile of keys, with the arrays bound to it.

    Parameters
    ----------
    fn : callable
        ``fn(q, k, **arrays)``, from ``(..., L, Dq)`` and ``(..., S, Dk)`` to the scores ``(..., L, S)``.
        It is called with any part of the queries and keys.
    bound : dict of arrays
        What `functools.partial` bound by name: they have gradients.
    """

    fn: Callable[..., Any] = field(metadata={"positional": True})
    bound: dict[str, Any]

    def pair(self, q: Any, k: Any) -> Any:
        return self.fn(q[..., None, :], k[..., None, :], **self.bound)[..., 0, 0]

    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> CalledForm:
        bound = {name: constant(x, xp_of(q), device_of(q)) for name, x in self.bound.items()}
        return CalledForm(q, per_head(k, sizes.H), bound, self.fn, sizes.lead, sizes.ndim)

    def width(self, sizes: Sizes) -> int:
        return 4  # a guess: a function may well form differences, of any width

    def check(self, sizes: Sizes) -> None:
        """A function takes any widths, and says so itself where it does not."""

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"{name}({', '.join(self.bound)})" if self.bound else name


@dataclass(frozen=True, eq=False, repr=False)
class CalledForm(Form):
    """fn(q, k), called in the caller's own number of axes.

    Attributes
    ----------
    q, k : array
        ``(..., H, L, Dq)`` and ``(..., H, S, Dk)``.
    bound : dict of arrays
        Passed by name.
    fn : callable
        The function.
    lead : tuple of int
        The leading axes of the output, in the inner form.
    ndim : int
        The number of axes the caller's q has.
    """

    AXES: ClassVar[Axes] = {"q": (-2, None), "k": (None, -2)}

    q: Any
    k: Any
    bound: dict[str, Any]
    fn: Callable[..., Any]
    lead: tuple[int, ...]
    ndim: int

    def called(self) -> Any:
        """Give what the function returns, unchecked."""
        return self.fn(outer(self.q, self.ndim, 2), outer(self.k, self.ndim, 2), **self.bound)

    def scores(self) -> Any:
        q, k, ndim, s = self.q, self.k, self.ndim, self.called()
        wanted = (*self.lead[: max(ndim - 2, 0)], q.shape[-2], k.shape[-2])
        shape = tuple(getattr(s, "shape", ()))
        fits = len(shape) == len(wanted) and shape[-2:] == wanted[-2:]
        ours = framework(s) == framework(q) and is_floating(s)
        if not ours or not fits or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
            raise refusal(
                "score",
                f"a function that returned {describe(s)}",
                f"{describe(q).split('[')[0]} scores {wanted}",
                f"it got queries {tuple(q.shape)} and keys {tuple(k.shape)}: parts, it may be, of the whole",
            )
        xp = xp_of(q)
        return xp.astype(inner(xp.broadcast_to(s, wanted), ndim), q.dtype, copy=False)


def as_function(score: Callable[..., Any]) -> Function:
    """Take a function, and from a `functools.partial` the arrays it was given by name."""
    if not isinstance(score, functools.partial):
        return Function(score, {})
    for x in score.args:
        if is_array(x):
            raise refusal(
                "score",
                f"a functools.partial with {describe(x)} bound by place",
                "arrays bound by name",
                "functools.partial(fn, W=W) calls fn(q, k, W=W)",
            )
    arrays = {name: x for name, x in score.keywords.items() if is_array(x)}
    others = {name: x for name, x in score.keywords.items() if name not in arrays}
    fn = functools.partial(score.func, *score.args, **others) if score.args or others else score.func
    return Function(fn, arrays)
