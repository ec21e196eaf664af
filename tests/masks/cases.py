"""A mask and its rule: the definition once more, in plain Python, for one pair of one head.

Rules are written from the docs, not from the code, and know neither arrays nor broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    FirstKeys,
    Mask,
    Nothing,
    Predicate,
    PrefixLM,
    SlidingWindow,
    Strided,
    ValidLens,
)

LIBRARIES = ("numpy", "torch", "jax")


@dataclass(frozen=True)
class Case:
    """A mask, and `rule(b, h, q, k, L, S)`, which tells whether a pair is visible."""

    mask: Mask
    rule: Callable[[int, int, int, int, int, int], bool]
    B: int = 1
    H: int = 1

    def table(self, L: int, S: int) -> np.ndarray:
        """Write the rule out: bool (B, H, L, S)."""
        out = np.zeros((self.B, self.H, L, S), bool)
        for b, h, q, k in np.ndindex(*out.shape):
            out[b, h, q, k] = self.rule(b, h, q, k, L, S)
        return out


# Parameters: a number, a list (B,), or a list of lists (B, H) --------------------------------


def arrays(library: str, dtype: str = "int64") -> Callable[[Any], Any]:
    """Give the function that makes arrays of a library out of lists; the rest passes through."""

    def make(x: Any) -> Any:
        if not isinstance(x, (list, np.ndarray)):
            return x
        a = np.array(x)
        a = a if a.dtype == bool else a.astype(dtype)
        if library == "torch":
            import torch

            return torch.from_numpy(a.copy())
        if library == "jax":
            import jax.numpy as jnp

            return jnp.asarray(a if a.dtype == bool else a.astype(np.int32))
        return a

    return make


def of(x: Any, b: int, h: int) -> Any:
    """Pick the parameter of one sequence and head."""
    for at in (b, h):
        if not isinstance(x, list):
            return x
        x = x[at if len(x) > 1 else 0]
    return x


def sizes(*parameters: Any) -> tuple[int, int]:
    """Find B and H of parameters."""
    B = H = 1
    for x in parameters:
        if isinstance(x, list):
            B = max(B, len(x))
            H = max(H, len(x[0]) if isinstance(x[0], list) else 1)
    return B, H


def place(align: Any, b: int, h: int, L: int, S: int) -> int:
    """Find the key position at which query 0 stands."""
    return {None: 0, "top_left": 0, "bottom_right": S - L}.get(of(align, b, h), of(align, b, h))


# One maker a kind ----------------------------------------------------------------------------


def causal(arr: Any, align: Any = None) -> Case:
    return Case(
        Causal(align=arr(align)),
        lambda b, h, q, k, L, S: k <= q + place(align, b, h, L, S),
        *sizes(align),
    )


def window(arr: Any, back: Any, ahead: Any = 0, align: Any = None) -> Case:
    def rule(b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        here = q + place(align, b, h, L, S)
        before, after = of(back, b, h), of(ahead, b, h)
        near = before is None or here - k <= before
        return near and (after is None or k - here <= after)

    return Case(SlidingWindow(arr(back), arr(ahead), arr(align)), rule, *sizes(back, ahead, align))


def valid(arr: Any, lens: Any, pad: str = "right", query_lens: Any = None, per_query: bool = False) -> Case:
    """`lens` is a number, (B,), (B, H), (B, H, L), or with `per_query` (B, L)."""
    deep = [[row] for row in lens] if per_query else lens

    def rule(b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        n = of(deep, b, h)
        n = n[q if len(n) > 1 else 0] if isinstance(n, list) else n
        m = L if query_lens is None else of(query_lens, b, h)
        if pad == "left":
            return S - k <= n and L - q <= m
        return k < n and q < m

    return Case(ValidLens(arr(lens), pad=pad, query_lens=arr(query_lens)), rule, *sizes(deep, query_lens))


def first(arr: Any, count: Any) -> Case:
    return Case(FirstKeys(arr(count)), lambda b, h, q, k, L, S: k < of(count, b, h), *sizes(count))


def prefix(arr: Any, length: Any, align: Any = None) -> Case:
    def rule(b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        return k < of(length, b, h) or k <= q + place(align, b, h, L, S)

    return Case(PrefixLM(arr(length), align=arr(align)), rule, *sizes(length, align))


def strided(arr: Any, step: Any, phase: Any = 0, align: Any = None) -> Case:
    phase = (np.asarray(phase) % np.min(step)).tolist()  # below every step

    def rule(b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        n = of(step, b, h)
        return (q + place(align, b, h, L, S) - k) % n == of(phase, b, h)

    return Case(Strided(arr(step), arr(phase), arr(align)), rule, *sizes(step, phase, align))


def _inside(ids: list, key_ids: list, each: Case | None) -> Callable[..., bool]:
    def row(x: list, b: int) -> list:
        return x if not x or not isinstance(x[0], list) else x[b if len(x) > 1 else 0]

    def rule(b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        mine, theirs = row(ids, b), row(key_ids, b)
        doc = mine[q]
        if doc != theirs[k] or doc < 0:
            return False
        if each is None:
            return True
        return each.rule(b, h, mine[:q].count(doc), theirs[:k].count(doc), mine.count(doc), theirs.count(doc))

    return rule


def _batch(*lists: Any) -> int:
    return max([1, *(len(x) for x in lists if x and isinstance(x[0], list))])


def documents(
    arr: Any, ids: list, key_ids: list | None = None, each: Case | None = None, contiguous: bool | None = None
) -> Case:
    mask = Documents(arr(ids), arr(key_ids), each and each.mask, contiguous)
    B, H = (each.B, each.H) if each else (1, 1)
    rule = _inside(ids, ids if key_ids is None else key_ids, each)
    return Case(mask, rule, max(B, _batch(ids, key_ids)), H)


def packed(
    arr: Any, lengths: list, key_lengths: list | None = None, each: Case | None = None, n: Any = None
) -> Case:
    """Documents by lengths, or, with n = (L, S), by offsets; what lies behind is padding."""
    own, other = lengths, lengths if key_lengths is None else key_lengths

    def spelled(x: list) -> list:
        if x and isinstance(x[0], list):
            return [spelled(row) for row in x]
        return [doc for doc, count in enumerate(x) for _ in range(count)] + [-1] * 9

    def summed(x: Any) -> Any:
        if x is None:
            return None
        if x and isinstance(x[0], list):
            return [summed(row) for row in x]
        return [sum(x[:i]) for i in range(len(x) + 1)]

    made = each and each.mask
    if n is None:
        mask = Documents.from_lengths(arr(lengths), arr(key_lengths), made)
    else:
        mask = Documents.from_offsets(arr(summed(lengths)), arr(summed(key_lengths)), made)
    B, H = (each.B, each.H) if each else (1, 1)
    return Case(mask, _inside(spelled(own), spelled(other), each), max(B, _batch(own, other)), H)


def dense(arr: Any, array: Any) -> Case:
    """`array` is a NumPy array of one to four axes."""
    whole = array.reshape((1,) * (2 - array.ndim) + array.shape) if array.ndim < 2 else array
    whole = whole[None] if whole.ndim == 2 else whole
    whole = whole[:, None] if whole.ndim == 3 else whole

    def rule(*at: int) -> bool:
        return bool(whole[tuple(i if n > 1 else 0 for i, n in zip(at[:4], whole.shape, strict=True))])

    return Case(Dense(arr(array)), rule, *whole.shape[:2])


def rising(q: Any, k: Any) -> Any:
    return (q + 2 * k) % 3 != 1


def distant(q: Any, k: Any) -> Any:
    return abs(q - k) > 1


def predicate(fn: Callable[[Any, Any], Any], name: str | None = None) -> Case:
    return Case(Predicate(fn, name=name), lambda b, h, q, k, L, S: fn(q, k))


def everything() -> Case:
    return Case(Everything(), lambda *_: True)


def nothing() -> Case:
    return Case(Nothing(), lambda *_: False)


def both(a: Case, b: Case) -> Case:
    return Case(a.mask & b.mask, lambda *at: a.rule(*at) and b.rule(*at), max(a.B, b.B), max(a.H, b.H))


def either(a: Case, b: Case) -> Case:
    return Case(a.mask | b.mask, lambda *at: a.rule(*at) or b.rule(*at), max(a.B, b.B), max(a.H, b.H))


def negated(a: Case) -> Case:
    return Case(~a.mask, lambda *at: not a.rule(*at), a.B, a.H)


def sliced(a: Case, whole: tuple[int, int], i: int, j: int, L: int, S: int) -> Case:
    """The queries from i and the keys from j of a mask over `whole`."""
    mask = a.mask.slice(*whole, queries=slice(i, i + L), keys=slice(j, j + S))
    return Case(mask, lambda b, h, q, k, L, S: a.rule(b, h, q + i, k + j, *whole), a.B, a.H)
