"""Time two functions in turn in one process, and say how far apart their results are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.plots.host import to_host

__all__ = ["Times", "alternate", "apart"]

LONG_ENOUGH = 5e-3
"""Seconds that one reading takes at least: a call shorter than that is repeated within it."""


@dataclass(frozen=True)
class Times:
    """Seconds a call, every reading of both sides, in the order they were taken."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Give the peer's best time over ours: above 1 we are faster."""
        return min(self.peer) / min(self.ours)


def alternate(ours: Callable[[], Any], peer: Callable[[], Any], repeats: int) -> Times:
    """Time both in turn (ours, peer, ours, peer, ...), after a warm-up.

    Parameters
    ----------
    ours, peer : callable
        Each returns when its result is there.
    repeats : int
        Readings a side.
    """
    sides = (ours, peer)
    for side in sides:  # compiles, and allocates
        side()
    calls = [max(1, int(LONG_ENOUGH / max(_seconds(side, 1), 1e-7))) for side in sides]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, count, seen in zip(sides, calls, times, strict=True):
            seen.append(_seconds(side, count))
    return Times(tuple(times[0]), tuple(times[1]))


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def apart(ours: Sequence[Any], peer: Sequence[Any]) -> float:
    """Give the largest difference, as a share of the peer's largest magnitude; NaN where either is NaN.

    Parameters
    ----------
    ours, peer : sequence of array
        The output, then the gradients; each is judged against its own counterpart.
    """
    shares = []
    for a, b in zip(ours, peer, strict=True):
        x, y = to_host(a), to_host(b)
        if x.shape != y.shape:  # never broadcast a wrong shape into agreement
            return float("nan")
        shares.append(np.abs(x - y).max() / np.abs(y).max())
    return float(np.max(shares))
