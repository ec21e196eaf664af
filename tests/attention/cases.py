"""Masks and scores with rules of their own, and random requests made of them.

Every mask and score here is written twice: as the library's value, and as a plain rule on indices or
vectors that only the oracle sees. Neither side can lend the other a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    FirstKeys,
    Nothing,
    Predicate,
    PrefixLM,
    SlidingWindow,
    Strided,
    ValidLens,
)
from attnspan.scores import Additive, Bilinear, Cosine, Dot, Gaussian, LowRankBilinear, ScaledDot

# Masks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The letters of a request; F and r are the hidden widths of scores."""

    B: int = 2
    H: int = 4
    G: int = 2
    L: int = 4
    S: int = 5
    D: int = 3
    E: int = 3
    F: int = 3
    r: int = 2
    Dk: int | None = None  # the width of the keys where it is not D

    @property
    def K(self) -> int:
        return self.D if self.Dk is None else self.Dk


Rule = Callable[[int, int, int, int], bool]


def written_out(rule: Rule, s: Sizes) -> np.ndarray:
    """Ask a rule for every pair: bool (B, H, L, S)."""
    keep = np.zeros((s.B, s.H, s.L, s.S), dtype=bool)
    for b, h, i, j in np.ndindex(*keep.shape):
        keep[b, h, i, j] = rule(b, h, i, j)
    return keep


def _lens(s: Sizes) -> np.ndarray:
    """Different lengths for every sequence, the first of them 0 (an empty sequence)."""
    return np.array([(3 * b) % (s.S + 1) for b in range(s.B)], dtype=int)


def _row_lens(s: Sizes) -> np.ndarray:
    return np.array([[(2 * b + 3 * i) % (s.S + 1) for i in range(s.L)] for b in range(s.B)], int).reshape(
        s.B, s.L
    )


def _ids(n: int, B: int, *, returning: bool = False) -> np.ndarray:
    """Document ids with padding at the end; sequence 0 starts with another split than sequence 1."""
    ids = np.array([[(t + b) // 2 for t in range(n)] for b in range(B)], dtype=int).reshape(B, n)
    if n > 2:
        ids[:, -1] = -1
    return ids % 2 * (ids >= 0) + np.minimum(ids, 0) if returning else ids


def _noise(s: Sizes, *shape: int) -> np.ndarray:
    """Draw booleans, about one in four hidden; row 0 of the last head is empty where it has rows."""
    keep = np.random.default_rng(sum(shape)).random(shape) < 0.75
    keep[..., -1, :1, :] = False
    return keep


def masks(
    s: Sizes, arrays: Callable[[Any], Any] = np.asarray, rank: int = 4
) -> Iterator[tuple[str, Any, Rule]]:
    """Walk over (name, mask, rule); `arrays` brings integer and boolean parameters to a framework.

    Arrays of booleans take as many axes as queries of that rank have, at most four.
    """
    lens, rows, far = _lens(s), _row_lens(s), s.S - s.L
    ids, key_ids = _ids(s.L, s.B), _ids(s.S, s.B)
    again, again_keys = _ids(s.L, s.B, returning=True), _ids(s.S, s.B, returning=True)
    noise, low = _noise(s, s.B, s.H, s.L, s.S), min(2, s.S)
    own = Dense(arrays(noise if rank > 3 else noise[:, 0] if rank == 3 else noise[0, 0]))
    cut = [s.L // 2, s.L - s.L // 2], [s.S // 2, s.S - s.S // 2]
    where = np.array([0, far, 1, -1][: s.B] + [2] * (s.B - 4), dtype=int)
    per_head = np.arange(s.H)[None] % (s.S + 1)

    def document(n: int, parts: list[int]) -> tuple[int, int, int]:
        """Give (document, rank in it, its count) of position n."""
        d = 0 if n < parts[0] else 1
        return d, n - d * parts[0], parts[d]

    def inner(b: int, h: int, i: int, j: int) -> bool:
        (d, rank, count), (e, key_rank, key_count) = document(i, cut[0]), document(j, cut[1])
        return d == e and key_rank <= rank + key_count - count

    yield "everything", Everything(), lambda b, h, i, j: True
    yield "nothing", Nothing(), lambda b, h, i, j: False
    yield "valid 1", ValidLens(min(1, s.S)), lambda b, h, i, j: j < 1
    yield "valid (B,)", ValidLens(arrays(lens)), lambda b, h, i, j: j < lens[b]
    yield "valid, left", ValidLens(arrays(lens), pad="left"), lambda b, h, i, j: j >= s.S - lens[b]
    yield (
        "valid (B, L)",
        ValidLens(arrays(rows[:, None])),
        lambda b, h, i, j: j < rows[b, i],
    )
    yield "valid (1, H)", ValidLens(arrays(per_head[..., None])), lambda b, h, i, j: j < per_head[0, h]
    yield (
        "valid queries too",
        ValidLens(arrays(lens), query_lens=arrays(np.minimum(lens, s.L))),
        lambda b, h, i, j: j < lens[b] and i < lens[b],
    )
    yield "causal", Causal("top_left"), lambda b, h, i, j: j <= i
    yield "causal, bottom right", Causal("bottom_right"), lambda b, h, i, j: j <= i + far
    yield "causal at (B,)", Causal(arrays(where)), lambda b, h, i, j: j <= i + where[b]
    yield "causal at -2", Causal(-2), lambda b, h, i, j: j <= i - 2
    yield "window", SlidingWindow(1, align=0), lambda b, h, i, j: i - 1 <= j <= i
    yield "window, ahead", SlidingWindow(0, 2, align=1), lambda b, h, i, j: i + 1 <= j <= i + 3
    yield "window, no limit", SlidingWindow(None, 1, align=-1), lambda b, h, i, j: j <= i
    yield (
        "documents",
        Documents(arrays(ids), arrays(key_ids)),
        lambda b, h, i, j: ids[b, i] == key_ids[b, j] >= 0,
    )
    yield (
        "documents that return",
        Documents(arrays(again), arrays(again_keys)),
        lambda b, h, i, j: again[b, i] == again_keys[b, j] >= 0,
    )
    yield (
        "documents, each causal",
        Documents.from_lengths(arrays(cut[0]), arrays(cut[1]), each=Causal("bottom_right")),
        inner,
    )
    yield "prefix", PrefixLM(low, align=0), lambda b, h, i, j: j <= i or j < low
    yield "strided", Strided(2, phase=1, align=0), lambda b, h, i, j: (i - j) % 2 == 1
    yield "bits", own, lambda b, h, i, j: noise[b, h, i, j]
    yield "bits (S,)", Dense(arrays(noise[0, 0, -1:])), lambda b, h, i, j: noise[0, 0, s.L - 1, j]
    yield "rule", Predicate(lambda q, k: (q + 2 * k) % 3 != 0), lambda b, h, i, j: (i + 2 * j) % 3 != 0
    yield (
        "sinks, window, causal",
        (SlidingWindow(1, align=0) | FirstKeys(1)) & Causal("top_left"),
        lambda b, h, i, j: i - 1 <= j <= i or (j < 1 and j <= i),
    )
    yield (
        "causal, window, valid",
        Causal(0) & SlidingWindow(1, align=0) & ValidLens(arrays(lens)),
        lambda b, h, i, j: i - 1 <= j <= i and j < lens[b],
    )
    yield (
        "not causal, or bits",
        ~Causal(0) & own | ~ValidLens(arrays(lens)),
        lambda b, h, i, j: (j > i and noise[b, h, i, j]) or j >= lens[b],
    )


# Scores -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreCase:
    """A score: the shapes of its parameters, the library's value of them, and the rule of them."""

    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    build: Callable[..., Any]
    rule: Callable[..., Callable[[np.ndarray, np.ndarray, int, int], float]]

    def draw(self, s: Sizes, seed: int = 7) -> dict[str, np.ndarray]:
        """Draw parameters; those that scale are positive and away from 0."""
        rng = np.random.default_rng(seed)
        drawn = {name: rng.standard_normal(shape) for name, shape in self.shapes(s).items()}
        return {n: 0.6 + np.abs(x) if n in ("scale", "bandwidth") else x for n, x in drawn.items()}


def _of_head(x: np.ndarray, axes: int, h: int) -> np.ndarray:
    """Take head h of a parameter whose heads, if it has any, lead its `axes` axes."""
    return x if x.ndim == axes else x[h if len(x) > 1 else 0]


def _number(x: Any, b: int, h: int) -> float:
    """Read a parameter that is a number, (B|1,) or (B|1, H|1)."""
    x = np.asarray(x)
    at = tuple(n % size for n, size in zip((b, h), x.shape, strict=False))
    return float(x[at])


def _cosine(q: np.ndarray, k: np.ndarray) -> float:
    product = math.hypot(*q) * math.hypot(*k)
    return float(q @ k) / product if product else 0.0


def _additive(W_q: Any, W_k: Any, w_v: Any) -> Callable[..., float]:
    return lambda q, k, b, h: _of_head(w_v, 1, h) @ np.tanh(_of_head(W_q, 2, h) @ q + _of_head(W_k, 2, h) @ k)


def _no_parameters(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {}


SCORES = {
    "dot": ScoreCase(_no_parameters, Dot, lambda: lambda q, k, b, h: q @ k),
    "scaled dot": ScoreCase(
        _no_parameters, ScaledDot, lambda: lambda q, k, b, h: q @ k / math.sqrt(len(q) or 1)
    ),
    "scaled dot, 0.7": ScoreCase(
        _no_parameters, lambda: ScaledDot(0.7), lambda: lambda q, k, b, h: 0.7 * (q @ k)
    ),
    "cosine": ScoreCase(_no_parameters, Cosine, lambda: lambda q, k, b, h: _cosine(q, k)),
    "gaussian": ScoreCase(
        _no_parameters,
        Gaussian,
        lambda: lambda q, k, b, h: -((q - k) @ (q - k)) / (2 * math.sqrt(len(q) or 1)),
    ),
    "gaussian, 1": ScoreCase(
        _no_parameters, lambda: Gaussian(1), lambda: lambda q, k, b, h: -((q - k) @ (q - k)) / 2
    ),
    "function": ScoreCase(
        _no_parameters,
        lambda: lambda q, k: 0.5 * (q @ k.mT) - (k * k).sum(-1)[..., None, :],
        lambda: lambda q, k, b, h: 0.5 * (q @ k) - k @ k,
    ),
    "scaled dot, 0-d": ScoreCase(
        lambda s: {"scale": ()}, ScaledDot, lambda scale: lambda q, k, b, h: float(scale) * (q @ k)
    ),
    "scaled dot, per sequence": ScoreCase(
        lambda s: {"scale": (s.B,)},
        ScaledDot,
        lambda scale: lambda q, k, b, h: _number(scale, b, h) * (q @ k),
    ),
    "cosine, per head": ScoreCase(
        lambda s: {"scale": (1, s.H)},
        Cosine,
        lambda scale: lambda q, k, b, h: _number(scale, b, h) * _cosine(q, k),
    ),
    "gaussian, per sequence and head": ScoreCase(
        lambda s: {"bandwidth": (s.B, s.H)},
        Gaussian,
        lambda bandwidth: lambda q, k, b, h: -((q - k) @ (q - k)) / (2 * _number(bandwidth, b, h) ** 2),
    ),
    "bilinear": ScoreCase(lambda s: {"M": (s.D, s.K)}, Bilinear, lambda M: lambda q, k, b, h: q @ M @ k),
    "bilinear, per head": ScoreCase(
        lambda s: {"M": (s.H, s.D, s.K)}, Bilinear, lambda M: lambda q, k, b, h: q @ M[h] @ k
    ),
    "low rank": ScoreCase(
        lambda s: {"W_q": (s.r, s.D), "W_k": (s.r, s.K)},
        LowRankBilinear,
        lambda W_q, W_k: lambda q, k, b, h: (W_q @ q) @ (W_k @ k),
    ),
    "low rank, per head": ScoreCase(
        lambda s: {"W_q": (s.H, s.r, s.D), "W_k": (s.H, s.r, s.K)},
        LowRankBilinear,
        lambda W_q, W_k: lambda q, k, b, h: (W_q[h] @ q) @ (W_k[h] @ k),
    ),
    "additive": ScoreCase(
        lambda s: {"W_q": (s.F, s.D), "W_k": (s.F, s.K), "w_v": (s.F,)}, Additive, _additive
    ),
    "additive, per head": ScoreCase(
        lambda s: {"W_q": (s.H, s.F, s.D), "W_k": (1, s.F, s.K), "w_v": (s.H, s.F)}, Additive, _additive
    ),
}
