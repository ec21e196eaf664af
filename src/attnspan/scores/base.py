"""What a score is: how well a key matches a query, as a value that lowers to one of two forms.

=============  ==============================================  =========================
dot form       scale · (φ(q)·ψ(k) + key_bias + row constant)   dot, cosine, Gaussian, bilinear
additive form  w·tanh(a + b)                                   additive (Bahdanau)
=============  ==============================================  =========================

A new score is one file: a frozen dataclass with `pair` (the meaning, for one query and one key) and
`lower` (the same for all of them). A plain function of a tile of queries and a tile of keys is a
score too (`Function`): its form is to be called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from attnspan.arrays import constant, device_of, is_array, is_floating, look, xp_of
from attnspan.errors import describe, refusal
from attnspan.shapes import Sizes, foreign, left_aligned
from attnspan.values import Value

__all__ = [
    "AdditiveForm",
    "DotForm",
    "Form",
    "Score",
    "aligned",
    "checked_matrix",
    "checked_number",
    "grouped_product",
    "in_dtype",
    "of_heads",
    "per_head",
    "xp_of",
]


F = TypeVar("F", bound="Form")

Axes = dict[str, tuple[int | None, int | None]]


@dataclass(frozen=True, eq=False, repr=False)
class Form(Value):
    """Abstract base of the forms: arrays that hold all scores, and can be cut along queries and keys.

    `AXES` says on which axis of each array its queries and its keys lie, or None.
    """

    AXES: ClassVar[Axes] = {}
    HEADS: ClassVar[dict[str, int]] = {}
    """On which axis of each array its heads lie; of a form that heads can't be taken from, none."""

    @abstractmethod
    def scores(self) -> Any:
        """Write all scores out: ``(..., H, L, S)``, in the inner form of shapes."""

    def cut(self: F, along: Callable[[Any, int | None, int | None], Any]) -> F:
        """Replace each array by ``along(array, axis of its queries, axis of its keys)``."""
        held = {name: getattr(self, name) for name in self.AXES}
        return replace(self, **{n: along(x, *self.AXES[n]) for n, x in held.items() if is_array(x)})

    def places(self) -> list[tuple[int | None, int | None]]:
        """Give what `AXES` says of each array, in the order of `arrays`."""
        found: list[tuple[int | None, int | None]] = []
        for name, item in self._items():
            if isinstance(item, dict):
                found += [(None, None)] * len(item)
            elif is_array(item):
                found.append(self.AXES.get(name, (None, None)))
        return found

    def rows(self: F, queries: Any) -> F:
        """Keep only some of the queries: an integer array or a slice."""

        def some(x: Any, axis: int | None, _: int | None) -> Any:
            return x if axis is None else x[(..., queries, *(slice(None),) * (-1 - axis))]

        return self.cut(some)

    def heads(self: F, heads: Any, H: int) -> F:
        """Keep only some of the H heads: an integer array."""
        held = {name: getattr(self, name) for name in self.HEADS}
        return replace(self, **{n: of_heads(x, self.HEADS[n], heads, H) for n, x in held.items()})


def of_heads(x: Any, axis: int, heads: Any, H: int) -> Any:
    """Keep what some of the H query heads use: along `axis`, x has H, one for several of them, or one."""
    if not is_array(x) or len(x.shape) < -axis or x.shape[axis] == 1:
        return x
    return x[(..., heads // (H // x.shape[axis]), *(slice(None),) * (-1 - axis))]


@dataclass(frozen=True, eq=False, repr=False)
class DotForm(Form):
    """scale · (q·k + key_bias) + row constant, in the inner form of shapes.

    Attributes
    ----------
    q, k : array
        φ(q) ``(..., H, L, D)`` and ψ(k) ``(..., G or H, S, D)``.
    scale : float or array
        A number, or an array that broadcasts to ``(..., H, L, S)``.
    key_bias : array or None
        ``(..., H, S)``, before the scale.
    row_constant : array or None
        ``(..., H, L)``: softmax ignores it, log-sum-exp needs it.
    """

    AXES: ClassVar[Axes] = {
        "q": (-2, None),
        "k": (None, -2),
        "key_bias": (None, -1),
        "row_constant": (-1, None),
    }
    HEADS: ClassVar[dict[str, int]] = {"q": -3, "k": -3, "scale": -3, "key_bias": -2, "row_constant": -2}

    q: Any
    k: Any
    scale: Any = 1.0
    key_bias: Any = None
    row_constant: Any = None

    def scores(self) -> Any:
        xp = xp_of(self.q)
        scale = in_dtype(self.scale, self.q)
        s = grouped_product(xp, self.q * scale, self.k)  # scaled before it can overflow
        if self.key_bias is not None:
            s = s + self.key_bias[..., None, :] * scale
        if self.row_constant is not None:
            s = s + self.row_constant[..., None]
        return s


@dataclass(frozen=True, eq=False, repr=False)
class AdditiveForm(Form):
    """w·tanh(a + b), in the inner form of shapes; written out by way of the ``(..., L, S, F)`` activations.

    Attributes
    ----------
    a, b : array
        Projected queries ``(..., H, L, F)`` and keys ``(..., G or H, S, F)``.
    w : array
        ``(F,)`` or ``(H, 1, 1, F)``.
    """

    AXES: ClassVar[Axes] = {"a": (-2, None), "b": (None, -2)}
    HEADS: ClassVar[dict[str, int]] = {"a": -3, "b": -3, "w": -4}

    a: Any
    b: Any
    w: Any

    def scores(self) -> Any:
        xp = xp_of(self.a)
        b = per_head(self.b, self.a.shape[-3])
        hidden = xp.tanh(self.a[..., :, None, :] + b[..., None, :, :])
        return xp.sum(hidden * self.w, axis=-1)


class Score(Value):
    """Abstract base of all scores: how well a key matches a query."""

    @abstractmethod
    def pair(self, q: Any, k: Any) -> Any:
        """Give the score of one query and one key: the definition.

        Parameters
        ----------
        q, k : array
            ``(..., Dq)`` and ``(..., Dk)``; leading axes broadcast, as ``(B, H, L, 1, D)`` and
            ``(B, H, 1, S, D)`` for all pairs.

        Returns
        -------
        array
            The scores, without the last axis.
        """

    @abstractmethod
    def lower(self, q: Any, k: Any, live: Any, sizes: Sizes) -> Form:
        """Bring all pairs into a form that kernels know.

        Parameters
        ----------
        q, k : array
            ``(..., H, L, Dq)`` and ``(..., G, S, Dk)`` in the accumulation dtype.
        live : bool array or None
            ``(..., H, L)``: which queries see a key and are finite; None means all.
        sizes : Sizes
            The sizes of the call.
        """

    def width(self, sizes: Sizes) -> int:
        """Give how many numbers the writing out of one score needs."""
        return 1

    def check(self, sizes: Sizes) -> None:
        """Refuse widths this score was not made for."""
        if sizes.Dq != sizes.Dk:
            raise refusal(
                "q, k",
                f"queries of width {sizes.Dq} and keys of width {sizes.Dk}",
                f"equal widths for {type(self).__name__}",
                "Bilinear and Additive take two widths",
            )


def in_dtype(x: Any, like: Any) -> Any:
    """Bring a parameter to the dtype of `like`; numbers stay numbers."""
    if not is_array(x):
        return x
    xp = xp_of(like)
    return xp.astype(constant(x, xp, device_of(like)), like.dtype, copy=False)


def aligned(x: Any, like: Any, what: str, sizes: Sizes | None = None) -> Any:
    """Bring a number-like parameter to `like`'s dtype and line it up with the scores."""
    return left_aligned(in_dtype(x, like), len(like.shape), what, sizes)


def per_head(x: Any, H: int) -> Any:
    """Repeat key/value heads so that each query head has its own: axis -3 from G to H."""
    G = x.shape[-3]
    if G == H:
        return x
    xp = xp_of(x)
    shape = x.shape
    wide = xp.broadcast_to(x[..., :, None, :, :], (*shape[:-3], G, H // G, *shape[-2:]))
    return wide.reshape((*shape[:-3], H, *shape[-2:]))


def grouped_product(xp: Any, q: Any, k: Any) -> Any:
    """q·kᵀ where several query heads share a key head: keys are not copied."""
    H, G = q.shape[-3], k.shape[-3]
    kT = xp.matrix_transpose(k)
    if H == G:
        return xp.matmul(q, kT)
    lead, L = q.shape[:-3], q.shape[-2]
    s = xp.matmul(q.reshape((*lead, G, H // G * L, q.shape[-1])), kT)
    return s.reshape((*s.shape[:-3], H, L, k.shape[-2]))


def checked_number(name: str, x: Any, *, positive: bool = False) -> Any:
    """Check a number-like parameter: a number, or a floating array of at most two axes."""
    needed = f"a {'positive ' if positive else ''}number, or a floating-point array (B,) or (B|1, H|1)"
    if isinstance(x, (np.integer, np.floating)):
        x = float(x)
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or is_array(x)):
        raise refusal(name, *foreign(name, x)[:1], needed, foreign(name, x)[1])
    if is_array(x):
        if not is_floating(x) or len(x.shape) > 2:
            raise refusal(name, x, needed)
        seen = look(x) if positive else None
        if seen is not None and not (seen > 0).all():
            raise refusal(name, f"{describe(x)} holding {seen.min()}", needed)
    elif positive and not x > 0:
        raise refusal(name, x, needed)
    return x


def checked_matrix(name: str, x: Any, axes: str, count: int) -> Any:
    """Check a matrix or vector parameter, with an optional leading H."""
    if not is_array(x):
        given, fix = foreign(name, x)
        raise refusal(name, given, f"a floating-point array ({axes}) or (H, {axes})", fix)
    if not is_floating(x) or len(x.shape) not in (count, count + 1):
        raise refusal(name, x, f"a floating-point array ({axes}) or (H, {axes})")
    return x


def check_heads(name: str, x: Any, count: int, sizes: Sizes) -> None:
    """Refuse a parameter made for another number of heads."""
    if len(x.shape) == count + 1 and x.shape[0] not in (1, sizes.H):
        raise refusal(name, x, f"H = {sizes.H} (or 1) on axis 0")
