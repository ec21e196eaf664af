"""Example masks of every class, each with its rule: the definition once more, in plain Python.

A `Case` is a mask and `rule(b, h, q, k, L, S)`, which tells of one pair of one head whether it is
visible. Rules are written from the docs, not from the code, and know neither arrays nor broadcasting.
A new mask class needs an entry in `EXAMPLES` and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan import masks
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


def classes() -> list[str]:
    """Name every concrete mask class that attnspan.masks exports."""
    exported = [getattr(masks, name) for name in masks.__all__]
    return [
        c.__name__ for c in exported if inspect.isclass(c) and issubclass(c, Mask) and c is not Mask
    ]


@dataclass(frozen=True)
class Case:
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
        if not isinstance(x, list):
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
    def rule(b: int, h: int, q: int, k: int, L: int, S: int) -> bool:
        n = of(step, b, h)
        return (q + place(align, b, h, L, S) - k) % n == of(phase, b, h) % n

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

    given = array if arr is None else arr(array.tolist()) if array.size else array
    return Case(Dense(given), rule, *whole.shape[:2])


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


# The table -----------------------------------------------------------------------------------

Cases = Iterator[Case]


def aligns(L: int, S: int) -> list:
    said = ["top_left", "bottom_right", 1, -2, 100, [0, 2], [[1], [-1]], [[0, 1, 2]], [[0, 1], [-1, 3]]]
    return [None, *said] if L == S else said


def ids_of(n: int, runs: list[int], back: bool = False) -> list[int]:
    """Number n positions by runs of the given lengths, over and over; `back` makes ids return."""
    out: list[int] = []
    while len(out) < n:
        i = len(out)
        out += [i % 2 if back else i] * runs[len(out) % len(runs)]
    return out[:n]


def spread(total: int, parts: int, room: int) -> list[int]:
    """Share `total - room` among documents, some of them empty."""
    left, out = max(0, total - room), []
    for i in range(parts):
        out.append(left if i == parts - 1 else min(left, (i * 2 + 1) % 3))
        left -= out[-1]
    return out


def _causal(L: int, S: int, arr: Any) -> Cases:
    yield from (causal(arr, a) for a in aligns(L, S))


def _window(L: int, S: int, arr: Any) -> Cases:
    for a in aligns(L, S):
        yield window(arr, 1, 0, a)
    a = "bottom_right"
    for back, ahead in ((0, 0), (2, 1), (None, 1), (1, None), (None, None), (100, 100), (0, 3), (10**12, 0)):
        yield window(arr, back, ahead, a)
    yield window(arr, [0, 2], [[1, 0, 3]], a)
    yield window(arr, [[1], [2]], None, [0, 1])


def _valid(L: int, S: int, arr: Any) -> Cases:
    some = [min(S, 1), S]
    for pad in ("right", "left"):
        yield from (valid(arr, n, pad) for n in range(S + 1))
        yield valid(arr, some, pad)
        yield valid(arr, some, pad, [L, max(0, L - 2)])
        yield valid(arr, S, pad, max(0, L - 1))
        yield valid(arr, [[0], [S]], pad, [[L, 0, L // 2]])
        rows = [[(q + b) % (S + 1) for q in range(L)] for b in range(2)]
        heads = [[(2 * h + b) % (S + 1) for h in range(5)] for b in range(2)]
        if L:
            yield valid(arr, rows, pad, per_query=True)
            yield valid(arr, [[rows[0], rows[1], rows[0]]], pad)
        yield valid(arr, heads if L != 5 else [[[n] for n in row] for row in heads], pad)


def _first(L: int, S: int, arr: Any) -> Cases:
    yield from (first(arr, n) for n in (0, 1, 3, 10**12, [0, 9], [[1, 2, 0]], [[1], [4]], [[2, 0], [1, 5]]))


def _prefix(L: int, S: int, arr: Any) -> Cases:
    yield from (prefix(arr, min(2, S), a) for a in aligns(L, S))
    yield from (prefix(arr, n, "top_left") for n in range(S + 1))
    yield prefix(arr, [0, S], "bottom_right")
    yield prefix(arr, [[min(S, 1), S // 2, S]], [0, 1])


def _strided(L: int, S: int, arr: Any) -> Cases:
    yield from (strided(arr, 2, 1, a) for a in aligns(L, S))
    for step, phase in ((1, 0), (3, 2), (3, -1), (50, 0), ([1, 2], 0), (2, [[0, 1, 0]]), ([[2], [3]], [1, 2])):
        yield strided(arr, step, phase, "bottom_right")


def _documents(L: int, S: int, arr: Any) -> Cases:
    runs, back = ids_of(L, [2, 1]), ids_of(L, [1, 2], back=True)
    padded = [[*runs[: L - 1], -1][:L], [-3, *runs][:L]]
    inner = [None, causal(arr), window(arr, 0), negated(causal(arr)), strided(arr, 2), valid(arr, 1, "left")]
    if L == S:
        for each in [*inner, causal(arr, [1, 0]), first(arr, [[0, 1, 2]])]:
            yield documents(arr, runs, each=each)
            yield documents(arr, back, each=each)
            yield documents(arr, padded, each=each)
        yield documents(arr, [back, runs], each=both(causal(arr), negated(strided(arr, 2))))
        yield documents(arr, runs, contiguous=True)
        yield documents(arr, runs, contiguous=False)
    keys = [ids_of(S, [1, 2]), [*ids_of(S, [3])[: S - 1], -1][:S]]
    for each in [None, causal(arr, "bottom_right"), valid(arr, 1, "left"), strided(arr, 2, 0, "bottom_right")]:
        yield documents(arr, runs, keys[0], each)
        yield documents(arr, padded, keys[1], each)
        yield documents(arr, back, keys, each)
        yield documents(arr, [back, runs], ids_of(S, [1], back=True), each)


def _packed(L: int, S: int, arr: Any) -> Cases:
    even, odd = spread(L, 3, 0), spread(L, 3, 1)
    inner = [None, causal(arr), window(arr, 0), negated(causal(arr)), strided(arr, 2), valid(arr, 1, "left")]
    if L == S:
        for each in [*inner, first(arr, [[0, 1, 2]])]:
            yield packed(arr, odd, each=each)
            yield packed(arr, [even, odd], each=each)
            yield packed(arr, even, each=each, n=(L, S))
        yield packed(arr, [L])
        yield packed(arr, [[0, L], [L, 0]], each=causal(arr, [0, 1]), n=(L, S))
    keys = [spread(S, 3, 0), spread(S, 3, 2)]
    for each in [None, causal(arr, "bottom_right"), valid(arr, 1, "left"), strided(arr, 2, 0, "bottom_right")]:
        yield packed(arr, even, keys[1], each)
        yield packed(arr, even, keys[0], each, n=(L, S))
        yield packed(arr, odd, keys, each)
        yield packed(arr, [odd, even], keys[0], each)


def _dense(L: int, S: int, arr: Any) -> Cases:
    random = np.random.default_rng([L, S])
    shapes = [(S,), (L, S), (1, S), (L, 1), (1, 1), (2, L, S), (2, 1, S), (1, L, 1), (2, 3, L, S), (2, 1, 1, S)]
    yield from (dense(arr, random.random(shape) < 0.6) for shape in [*shapes, (1, 3, L, 1), (1, 1, L, S)])


def _mixed(L: int, S: int, arr: Any) -> list[Case]:
    a = "bottom_right"
    return [
        causal(arr, a), window(arr, [0, 2], 1, a), valid(arr, [min(S, 1), S]), first(arr, [[0, 1, 2]]),
        strided(arr, 2, 0, a), dense(arr, np.random.default_rng([L, S]).random((2, 1, L, S)) < 0.5),
        packed(arr, spread(L, 3, 0), spread(S, 3, 1)), nothing(),
    ]  # fmt: skip


def _pairs(L: int, S: int, arr: Any) -> list[tuple[Case, Case]]:
    """Pair the mixed masks; each shape has a third of the pairs, so that all are met many times."""
    parts = _mixed(L, S, arr)
    return [(a, b) for a in parts for b in parts][(L + 2 * S) % 3 :: 3]


def _and(L: int, S: int, arr: Any) -> Cases:
    yield from (both(a, b) for a, b in _pairs(L, S, arr))


def _or(L: int, S: int, arr: Any) -> Cases:
    yield from (either(a, b) for a, b in _pairs(L, S, arr))
    a = "bottom_right"
    yield both(either(window(arr, 1, 0, a), first(arr, 1)), causal(arr, a))


def _not(L: int, S: int, arr: Any) -> Cases:
    parts = _mixed(L, S, arr)
    yield from (negated(a) for a in [*_window(L, S, arr), *_documents(L, S, arr), *parts])
    yield from (negated(negated(a)) for a in parts)
    yield from (negated(both(a, b)) for a, b in _pairs(L, S, arr))


def _sliced(L: int, S: int, arr: Any) -> Cases:
    for i, j in ((0, 0), (1, 0), (0, 2), (2, 1)):
        n = max(L + i, S + j) + 1
        inner = [causal(arr), window(arr, [0, 2], 1), valid(arr, [1, n - 1], "left"), negated(causal(arr))]
        inner.append(documents(arr, ids_of(n, [2, 1]), each=causal(arr)))
        inner.append(documents(arr, ids_of(n, [1, 2], back=True)))
        inner.append(packed(arr, spread(n, 3, 1), each=strided(arr, 2)))
        inner.append(valid(arr, [[(2 * q + b) % n for q in range(n)] for b in range(2)], per_query=True))
        inner.append(dense(arr, np.random.default_rng([L, S]).random((2, 1, n, n)) < 0.5))
        inner.append(either(inner[-1], strided(arr, 2)))
        inner.append(sliced(causal(arr, "bottom_right"), (n + 2, n + 1), 1, 1, n, n) if i else prefix(arr, n // 2))
        yield from (sliced(case, (n, n), i, j, L, S) for case in inner)
    yield sliced(causal(arr, "bottom_right"), (L + 2, S + 1), 2, 0, L, S)


EXAMPLES: dict[str, Callable[[int, int, Any], Cases]] = {
    "And": _and,
    "Causal": _causal,
    "Dense": _dense,
    "Documents": _documents,
    "Everything": lambda L, S, arr: iter([everything()]),
    "FirstKeys": _first,
    "Not": _not,
    "Nothing": lambda L, S, arr: iter([nothing()]),
    "Or": _or,
    "Packed": _packed,
    "Predicate": lambda L, S, arr: iter([predicate(rising), predicate(distant, "distant")]),
    "PrefixLM": _prefix,
    "Sliced": _sliced,
    "SlidingWindow": _window,
    "Strided": _strided,
    "ValidLens": _valid,
}
