"""One request, asked twice: of the library in some framework and dtype, and of the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import attnspan as asp
from attnspan import oracle
from attnspan.biases import ALiBi

from .cases import SCORES, Sizes, masks, written_out
from .helpers import INF, ROUNDS_WEIGHTS, array, close, dtype_name, precision, rounded, runs, values


@dataclass(frozen=True)
class Asked:
    """What is asked for; the numbers are drawn from `seed`.

    `rank` is the number of axes of q, k and v. `bias` is a shape in letters, as "B1LS", with "-" in
    front where some of it is -inf; "alibi" is the linear bias. `sink` is a shape in letters too. The
    softcap "learned" is a 0-d array.
    """

    sizes: Sizes = field(default_factory=Sizes)
    rank: int = 4
    score: str = "scaled dot"
    mask: str = "everything"
    bias: str | None = None
    bias_dtype: str | None = None
    softcap: float | str | None = None
    sink: str | None = None
    dropout: float = 0.0
    rng: int = 3
    seed: int = 0
    spread: float = 1.0

    def __post_init__(self) -> None:
        s = self.sizes
        assert self.rank >= 4 or s.H == s.G == 1
        assert self.rank >= 3 or s.B == 1

    def _lead(self, heads: int, *, alone: bool = False) -> tuple[int, ...]:
        """Give the leading axes: B, then axes of 2 (or 1: those broadcast), then heads."""
        middle = (1 if alone else 2,) * (self.rank - 4)
        return (self.sizes.B, *middle, heads)[: self.rank - 2]

    def _shape(self, letters: str) -> tuple[int, ...]:
        known = {"1": 1, "N": 2}
        return tuple(known[n] if n in known else getattr(self.sizes, n) for n in letters)

    def draw(self, dtype: str) -> dict[str, np.ndarray]:
        """Draw every differentiable input, in float64 numbers that the dtype holds exactly."""
        s, rng = self.sizes, np.random.default_rng(self.seed)
        shapes = {
            "q": (*self._lead(s.H), s.L, s.D),
            "k": (*self._lead(s.G, alone=True), s.S, s.K),
            "v": (*self._lead(s.G), s.S, s.E),
        }
        if self.bias == "alibi":
            shapes["slopes"] = (s.H,)
        elif self.bias is not None:
            shapes["bias"] = self._shape(self.bias.strip("-"))
        if self.sink is not None:
            shapes["sink"] = self._shape(self.sink)
        x = {name: rng.standard_normal(shape) * self.spread for name, shape in shapes.items()}
        if self.bias is not None and self.bias.startswith("-"):
            hidden = rng.random(x["bias"].shape) < 0.3
            if x["bias"].size:
                hidden[(0,) * (hidden.ndim - 1)] = True  # a row (or all, where there is one) sees nothing
            x["bias"] = np.where(hidden, -INF, x["bias"])
        if self.softcap == "learned":
            x["softcap"] = np.array(1.75)
        x |= SCORES[self.score].draw(s)
        own = {"bias": self.bias_dtype} if self.bias_dtype else {}
        return {name: rounded(value, own.get(name, dtype)) for name, value in x.items()}

    def native(self, framework: str, dtype: str, x: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
        """Bring the numbers to a framework."""
        x = self.draw(dtype) if x is None else x
        own = {"bias": self.bias_dtype} if self.bias_dtype else {}
        return {name: array(value, framework, own.get(name, dtype)) for name, value in x.items()}

    def library(self, x: dict[str, Any], framework: str) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """Give (q, k, v) and the options of `attnspan.attention`."""
        parameters = {n: x[n] for n in SCORES[self.score].shapes(self.sizes)}
        options: dict[str, Any] = {"score": SCORES[self.score].build(**parameters)}
        named = masks(self.sizes, lambda a: array(a, framework), self.rank)
        options["mask"] = next(mask for name, mask, _ in named if name == self.mask)
        if self.bias == "alibi":
            options |= {"bias": ALiBi(x["slopes"]), "align": "bottom_right"}
        options |= {name: x[name] for name in ("bias", "sink") if name in x}
        if self.softcap is not None:
            options["softcap"] = x.get("softcap", self.softcap)
        if self.dropout:
            options |= {"dropout": self.dropout, "rng": self.rng}
        return (x["q"], x["k"], x["v"]), options

    def oracle(self, x: dict[str, np.ndarray]) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """Give (q, k, v) and the options of the oracle's functions."""
        s = self.sizes
        parameters = {n: x[n] for n in SCORES[self.score].shapes(s)}
        options: dict[str, Any] = {"score": SCORES[self.score].rule(**parameters)}
        rule = next(rule for name, _, rule in masks(s) if name == self.mask)
        options["keep"] = written_out(rule, s)
        if self.bias == "alibi":
            i, j = np.arange(s.L)[:, None], np.arange(s.S)
            options["bias"] = -x["slopes"][None, :, None, None] * abs(i + s.S - s.L - j)
        if "bias" in x:
            options["bias"] = x["bias"]
        if "sink" in x:  # the oracle reads one axis as heads, the library as sequences
            options["sink"] = x["sink"][:, None] if x["sink"].ndim == 1 else x["sink"]
        options["softcap"] = float(x["softcap"]) if "softcap" in x else self.softcap
        if self.dropout:
            options |= {"dropout": self.dropout, "seed": self.rng}
        return (x["q"], x["k"], x["v"]), options


def scale_of(x: dict[str, np.ndarray], result: oracle.Result) -> float:
    """Give the largest number that enters the sums: the values, and scores as far as lse shows them."""
    finite = result.lse[np.isfinite(result.lse)]
    score = float(np.abs(finite).max(initial=1.0))
    return float(np.abs(x["v"]).max(initial=1.0)) * max(1.0, score)


def hold(asked: Asked, framework: str, dtype: str, names: tuple[str, ...]) -> None:
    """Hold the implementations of a request against the oracle, or against their own reasons."""
    x = asked.draw(dtype)
    qkv, options = asked.oracle(x)
    wanted = oracle.attention(*qkv, **options)
    with precision(framework, dtype):
        qkv, options = asked.library(asked.native(framework, dtype, x), framework)
        for name in names:
            if name != "auto" and not runs(name, *qkv, **options):
                continue
            out = asp.attention(*qkv, **options, implementation=name)
            assert dtype_name(out) == dtype
            weights = np.abs(x["v"]).max(initial=0.0) if name in ROUNDS_WEIGHTS or name == "auto" else 0.0
            close(values(out), wanted.out, dtype, scale_of(x, wanted), float(weights))


__all__ = ["Asked", "hold", "scale_of"]
