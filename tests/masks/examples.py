"""Example masks of every class of attnspan.masks, for any small L and S.

A new mask class needs an entry in `EXAMPLES` and nothing else: the tests discover the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attnspan import masks
from attnspan.masks import Mask

from .cases import (
    Case,
    both,
    causal,
    dense,
    distant,
    documents,
    either,
    everything,
    first,
    negated,
    nothing,
    packed,
    predicate,
    prefix,
    rising,
    sliced,
    strided,
    valid,
    window,
)

SHAPES = [(L, S) for L in range(7) for S in range(7)]


def classes() -> list[str]:
    """Name every concrete mask class that attnspan.masks exports."""
    exported = [getattr(masks, name) for name in masks.__all__]
    return [c.__name__ for c in exported if inspect.isclass(c) and issubclass(c, Mask) and c is not Mask]


def examples(name: str, L: int, S: int, arr: Any, most: int | None = None) -> list[Case]:
    """Give the examples of a class; at most `most`, others for each shape."""
    every = list(EXAMPLES[name](L, S, arr))
    if most is None or len(every) <= most:
        return every
    return every[(3 * L + S) % -(-len(every) // most) :: -(-len(every) // most)]


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
    for step, phase in ((1, 0), (3, 2), (3, 1), (50, 0), ([1, 2], 0), (2, [[0, 1, 0]]), ([[2], [3]], [1, 2])):
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
    for each in [
        None,
        causal(arr, "bottom_right"),
        valid(arr, 1, "left"),
        strided(arr, 2, 0, "bottom_right"),
    ]:
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
    for each in [
        None,
        causal(arr, "bottom_right"),
        valid(arr, 1, "left"),
        strided(arr, 2, 0, "bottom_right"),
    ]:
        yield packed(arr, even, keys[1], each)
        yield packed(arr, even, keys[0], each, n=(L, S))
        yield packed(arr, odd, keys, each)
        yield packed(arr, [odd, even], keys[0], each)


def _dense(L: int, S: int, arr: Any) -> Cases:
    random = np.random.default_rng([L, S])
    shapes = [
        (S,),
        (L, S),
        (1, S),
        (L, 1),
        (1, 1),
        (2, L, S),
        (2, 1, S),
        (1, L, 1),
        (2, 3, L, S),
        (2, 1, 1, S),
    ]
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
        inner.append(
            sliced(causal(arr, "bottom_right"), (n + 2, n + 1), 1, 1, n, n) if i else prefix(arr, n // 2)
        )
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
