"""Memory and time of `tiled` at L = S = 16,384, forward and backward: ours against the formula.

    python benchmarks/tiled.py [--length N] [--framework torch|jax] [--peers]

Each case runs in a process of its own, because the peak of memory is a high-water mark. What is printed
as extra is that peak less the peak of the same process with everything made but a call of one query and
key. With --peers the formula (`eager`) runs too, at an eighth of the length in each direction, and a ratio
of times is taken there, interleaved in one process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SCORES = ("gaussian", "bilinear", "function")
WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--framework", choices=("torch", "jax"), action="append")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--case", nargs=3, metavar=("FRAMEWORK", "SCORE", "IMPLEMENTATION"))
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(run(*asked.case, asked.length)))
        return
    print(
        "| framework | score | length | extra memory | seconds |"
        + (" eager / tiled |" if asked.peers else "")
    )
    print("|---|---|---|---|---|" + ("---|" if asked.peers else ""))
    for framework in asked.framework or ("torch", "jax"):
        for score in SCORES:
            line = fresh(framework, score, "tiled", asked.length)
            cells = [framework, score, f"{asked.length:,}", f"{line['extra'] / 2**20:,.0f} MiB"]
            cells.append(f"{line['seconds']:.1f}")
            if asked.peers:
                cells.append(f"{fresh(framework, score, 'both', asked.length // 8)['ratio']:.2f}")
            print("| " + " | ".join(cells) + " |", flush=True)


def fresh(framework: str, score: str, implementation: str, length: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--length", str(length), "--case", framework, score, implementation]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(found.splitlines()[-1])


def run(framework: str, score: str, implementation: str, length: int) -> dict[str, float]:
    step = {"torch": in_torch, "jax": in_jax}[framework]
    if implementation == "both":
        ways = [step(score, one, length) for one in ("eager", "tiled")]
        times = [min(once(way) for _ in range(5)) for way in ways if once(way)]
        for _ in range(5):
            times = [min(t, once(way)) for t, way in zip(times, ways, strict=True)]
        return {"ratio": times[0] / times[1]}
    once(step(score, implementation, 1))
    way, before = step(score, implementation, length), peak()
    return {"seconds": once(way), "extra": peak() - before}


def once(way: Callable[[], Any]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scored(score: str, W: Any) -> Any:
    import functools

    from attnspan.scores import Bilinear, Gaussian

    def distance(q: Any, k: Any, W: Any) -> Any:
        """A function that no dot product gives: -|Wq - k| in the taxicab metric, by halves of the width."""
        q = q @ W
        return -abs(q[..., :, None, :8] - k[..., None, :, :8]).sum(-1)

    return {
        "gaussian": Gaussian(),
        "bilinear": Bilinear(W),
        "function": functools.partial(distance, W=W),
    }[score]


def in_torch(score: str, implementation: str, length: int) -> Callable[[], Any]:
    import torch

    import attnspan as asp

    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, length, WIDTH) for _ in range(4))
    W = torch.randn(WIDTH, WIDTH) / 8
    leaves = [x.requires_grad_() for x in (q, k, v, W)]

    def step() -> Any:
        out = asp.attention(q, k, v, score=scored(score, W), implementation=implementation)
        return torch.autograd.grad(out, leaves, g, allow_unused=True)

    return step


def in_jax(score: str, implementation: str, length: int) -> Callable[[], Any]:
    import jax

    import attnspan as asp

    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (jax.random.normal(key, (1, length, WIDTH)) for key in keys[:4])
    W = jax.random.normal(keys[4], (WIDTH, WIDTH)) / 8

    def loss(q: Any, k: Any, v: Any, W: Any) -> Any:
        out = asp.attention(q, k, v, score=scored(score, W), implementation=implementation)
        return (out * g).sum()

    step = jax.jit(jax.grad(loss, range(4))).lower(q, k, v, W).compile()
    return lambda: jax.block_until_ready(step(q, k, v, W))


if __name__ == "__main__":
    main()
