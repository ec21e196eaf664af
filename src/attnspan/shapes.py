"""The letters, and the one checker of shapes.

=====  ==========================================================================
`B`    batch: the first leading axis
`H`    query heads: the last leading axis, if there are two or more
`G`    key/value heads; query head h uses key/value head h // (H/G)
`L`    queries
`S`    keys
`D`    width of query and key (`Dq`, `Dk` where they differ)
`E`    width of value
`F`    hidden width of the additive score
=====  ==========================================================================

Arrays are `(..., L, D)`, `(..., S, D)`, `(..., S, E)`: `(B, L, D)` as in the textbook,
`(B, H, L, D)` with heads; axes between the first and the last leading axis broadcast. Inside the
library every array has at least four axes, so that formulas are written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.arrays import TITLES, framework, is_floating
from attnspan.errors import describe, refusal

__all__ = [
    "LIMIT",
    "Sizes",
    "check_parameter",
    "check_rate",
    "check_shape",
    "check_sizes",
    "check_split",
    "check_widths",
    "foreign",
    "inner",
    "is_symbolic",
    "left_aligned",
    "outer",
    "sizes_of",
]

LIMIT = 2**29 - 1
"""Longest L and S: positions and their sums then fit int32 everywhere."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention call, by letter.

    `lead` are the leading axes of the output in the inner form (at least B and H); `ndim` is the
    number of axes the caller's q has.
    """

    B: int
    H: int
    G: int
    L: int
    S: int
    Dq: int
    Dk: int
    E: int
    lead: tuple[int, ...]
    ndim: int

    def __str__(self) -> str:
        names = [f"B={self.B}"]
        if self.ndim >= 4:
            names.append(f"H={self.H}")
            if self.G != self.H:
                names.append(f"G={self.G}")
        names += [f"L={self.L}", f"S={self.S}"]
        names += [f"D={self.Dq}"] if self.Dq == self.Dk else [f"Dq={self.Dq}", f"Dk={self.Dk}"]
        return " ".join([*names, f"E={self.E}"])


def check_sizes(L: int, S: int) -> None:
    """Refuse lengths that are no lengths."""
    for name, n in (("L", L), ("S", S)):
        whole = (isinstance(n, int) and not isinstance(n, bool)) or is_symbolic(n)
        if not whole or n < 0 or n > LIMIT:
            raise refusal(name, n, f"a length, an integer between 0 and {LIMIT}")


def is_symbolic(n: Any) -> bool:
    """Tell whether a length is one that a compiler left open."""
    return type(n).__name__ in ("SymInt", "_DimExpr")


def foreign(name: str, x: Any) -> tuple[str, str]:
    """Say what an argument is that is no plain array though it may look like one, and the likely fix."""
    kind, text = type(x).__name__, describe(x)
    given = text if kind in text else f"{kind} {text}"
    if hasattr(x, "get_value") and hasattr(x, "shape"):  # a variable of flax.nnx
        return given, f"write {name}[...] for the array it holds"
    return given, f"convert it: np.asarray({name})" if hasattr(x, "__array__") else ""


def check_shape(a: Any, shape: tuple[int, ...]) -> None:
    """Refuse an array whose shape is not `shape`.

    Parameters
    ----------
    a : array
        Any array.
    shape : tuple of int
        The shape it must have.

    Raises
    ------
    ArgumentError
        If the shapes differ; both are named.

    Examples
    --------
    >>> import numpy as np
    >>> check_shape(np.zeros((2, 3)), (2, 3))
    >>> check_shape(np.zeros((2, 3)), (3, 2))
    Traceback (most recent call last):
        ...
    attnspan.errors.ArgumentError: a: given float64[2, 3], needed an array of shape (3, 2)
    """
    if tuple(a.shape) != tuple(shape):
        raise refusal("a", a, f"an array of shape {tuple(shape)}")


def sizes_of(q: Any, k: Any, v: Any) -> Sizes:
    """Check q, k and v against each other and name their sizes."""
    _check_kinds(q, k, v)
    if not len(q.shape) == len(k.shape) == len(v.shape) or len(q.shape) < 2:
        raise refusal(
            "q, k, v",
            _trio(q, k, v),
            "the same number of axes, two or more: (..., L, D), (..., S, D), (..., S, E)",
            "add the missing axes with reshape",
        )
    ndim, L, S = len(q.shape), q.shape[-2], k.shape[-2]
    if v.shape[-2] != S:
        raise refusal(
            "v",
            _trio(q, k, v),
            f"one value per key, so {S} of them and not {v.shape[-2]}",
            "keys and values must have the same length (axis -2)",
        )
    check_sizes(L, S)
    leads = [_inner_shape(x, ndim)[:-2] for x in (q, k, v)]
    H, G = leads[0][-1], leads[1][-1]
    if leads[2][-1] != G:
        raise refusal("v", _trio(q, k, v), f"as many heads as k, {G} and not {leads[2][-1]}")
    if G == 0 or H % G:
        raise refusal(
            "k",
            _trio(q, k, v),
            f"a number of key/value heads that divides the {H} query heads, not {G}",
            "query head h uses key/value head h // (H/G); heads stand on axis -3",
        )
    lead = []
    for axis in range(len(leads[0]) - 1):
        wanted = {n[axis] for n in leads} - {1}
        if len(wanted) > 1:
            raise refusal(
                "q, k, v",
                _trio(q, k, v),
                f"leading axes that agree or are 1 (axis {axis} has sizes {sorted(wanted)})",
            )
        lead.append(wanted.pop() if wanted else 1)
    return Sizes(
        B=lead[0], H=H, G=G, L=L, S=S, Dq=q.shape[-1], Dk=k.shape[-1], E=v.shape[-1],
        lead=(*lead, H), ndim=ndim,
    )  # fmt: skip


def _check_kinds(q: Any, k: Any, v: Any) -> None:
    kinds = [framework(x) for x in (q, k, v)]
    for name, x, kind in zip("qkv", (q, k, v), kinds, strict=True):
        if kind is None:
            given, fix = foreign(name, x)
            raise refusal(name, given, "an array of NumPy, PyTorch or JAX", fix)
        _check_dense(name, x, kind)
    if len(set(kinds)) > 1:
        trio = ", ".join(
            f"{n} {TITLES[str(a)]} {describe(x)}" for n, x, a in zip("qkv", (q, k, v), kinds, strict=True)
        )
        raise refusal("q, k, v", trio, "arrays of one framework", "convert them all to q's")
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not is_floating(x):
            raise refusal(name, x, "real floating-point numbers")
    if not q.dtype == k.dtype == v.dtype:
        raise refusal("q, k, v", _trio(q, k, v), "one floating-point dtype", "convert them all to q's dtype")
    if kinds[0] == "torch" and len({x.device for x in (q, k, v)}) > 1:
        places = ", ".join(f"{n} on {x.device}" for n, x in zip("qkv", (q, k, v), strict=True))
        raise refusal("q, k, v", places, "one device", "move them all to q's device")


def _check_dense(name: str, x: Any, kind: str) -> None:
    """Refuse the kinds of array that compute otherwise than plain ones."""
    if kind == "torch" and (x.is_nested or str(x.layout) != "torch.strided"):
        given = "a nested tensor" if x.is_nested else f"{describe(x)} of layout {x.layout}"
        fix = "to_padded_tensor(0.0), with ValidLens" if x.is_nested else "to_dense()"
        raise refusal(name, given, "a dense tensor", f"write {name}.{fix}")
    if isinstance(x, np.ma.MaskedArray):
        fix = f"write {name}.filled(0) and say with mask= which keys are seen"
        raise refusal(name, f"a masked array {describe(x)}", "a plain array", fix)
    if isinstance(x, np.matrix):
        raise refusal(name, f"a matrix {describe(x)}", "a plain array", f"write np.asarray({name})")


def _trio(q: Any, k: Any, v: Any) -> str:
    return f"q {describe(q)}, k {describe(k)}, v {describe(v)}"


def _inner_shape(x: Any, ndim: int) -> tuple[int, ...]:
    shape = tuple(x.shape)
    if ndim >= 4:
        return shape
    if ndim == 3:
        return (shape[0], 1, *shape[1:])
    return (1, 1, *shape)


def inner(x: Any, ndim: int) -> Any:
    """Give an array of `ndim` axes the inner form, with B and H written out."""
    return x if ndim >= 4 else x.reshape(_inner_shape(x, ndim))


def outer(x: Any, ndim: int, trailing: int) -> Any:
    """Undo `inner` for a result with `trailing` axes after the leading ones."""
    if ndim >= 4:
        return x
    lead = x.shape[: len(x.shape) - trailing]
    return x.reshape((*lead[: ndim - 2], *x.shape[len(lead) :]))


def left_aligned(x: Any, ndim: int, what: str, sizes: Sizes | None = None) -> Any:
    """Line a parameter up with scores of `ndim` axes in the inner form.

    A number or 0-d array speaks of everything, `(B,)` of one sequence each, `(B|1, H|1)` of one
    head each; a 1-D array never means heads.
    """
    shape = tuple(getattr(x, "shape", ()))
    if not shape:
        return x
    if sizes is not None:
        check_parameter(shape, what, sizes)
    if len(shape) == 1:
        return x.reshape((shape[0],) + (1,) * (ndim - 1))
    return x.reshape((shape[0],) + (1,) * (ndim - 4) + (shape[1], 1, 1))


def check_parameter(shape: tuple[int, ...], what: str, sizes: Sizes) -> None:
    """Refuse a parameter that speaks neither of all, nor of sequences, nor of heads."""
    needed = f"a number, ({sizes.B},) one per sequence, or ({sizes.B} or 1, {sizes.H} or 1) one per head"
    if len(shape) > 2:
        raise refusal(what, f"an array of shape {shape}", needed)
    if shape[0] not in (1, sizes.B) or (len(shape) == 2 and shape[1] not in (1, sizes.H)):
        fix = ""
        if len(shape) == 1 and shape[0] == sizes.H:
            fix = f"a 1-D array means sequences, never heads: for one per head write {what}[None, :]"
        raise refusal(what, f"an array of shape {shape}", needed, fix)


def check_widths(**widths: int) -> None:
    """Refuse a width of a layer that is none."""
    for name, width in widths.items():
        if not _is_count(width):
            raise refusal(name, width, "a width of 1 or more")


def check_split(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Refuse heads that do not divide what they share."""
    if not _is_count(num_heads) or not _is_count(embed_dim) or embed_dim % num_heads:
        raise refusal("num_heads", num_heads, f"a divisor of embed_dim = {embed_dim}")
    if not _is_count(num_kv_heads) or num_heads % num_kv_heads:
        raise refusal("num_kv_heads", num_kv_heads, f"a divisor of num_heads = {num_heads}")


def check_rate(dropout: float) -> None:
    """Refuse a rate of dropout that is none."""
    number = isinstance(dropout, (int, float, np.number)) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout < 1:
        raise refusal("dropout", dropout if number else repr(dropout), "a rate p with 0 <= p < 1")


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 1
