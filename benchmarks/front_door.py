"""What the front door costs: attnspan against the framework's own function, and masks at a million tokens.

Run from the repository root:  python benchmarks/front_door.py [--rounds 15] [--json out.json]

Both sides of a row are timed in turn in one process (ours, peer, ours, peer, ...); the figure is the
ratio of the best times, peer / ours: 1 is equal, more is faster than the peer. Every row also checks
that both give the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import attnspan as asp
from attnspan.masks import Causal, Documents, SlidingWindow, ValidLens

Row = dict[str, Any]


def best(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Time two functions in turn; give the best of each in seconds."""
    ours(), peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for fn, seen in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            fn()
            seen.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


def torch_rows(rounds: int) -> list[Row]:
    """Compare with torch.nn.functional.scaled_dot_product_attention, forward and with backward."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = []
    for name, shape in (("tiny", (1, 1, 4, 8)), ("B=1 H=8 L=2048 D=64", (1, 8, 2048, 64))):
        B, _, L, _ = shape
        q, k, v = (torch.randn(shape) for _ in range(3))
        lens = torch.full((B,), max(1, 3 * L // 4))
        padding = (torch.arange(L) < lens[:, None])[:, None, None, :]
        cases: list[tuple[str, Any, dict[str, Any]]] = [
            ("no mask", None, {}),
            ("causal", Causal(), {"is_causal": True}),
            ("padding", ValidLens(lens), {"attn_mask": padding}),
        ]
        for label, mask, options in cases:
            for backward in (False, True):
                inputs = [x.clone().requires_grad_(backward) for x in (q, k, v)]

                def ours(inputs: Any = inputs, mask: Any = mask, backward: bool = backward) -> Any:
                    out = asp.attention(*inputs, mask=mask)
                    return torch.autograd.grad(out.sum(), inputs) if backward else (out,)

                def peer(inputs: Any = inputs, options: Any = options, backward: bool = backward) -> Any:
                    out = sdpa(*inputs, **options)
                    return torch.autograd.grad(out.sum(), inputs) if backward else (out,)

                for a, b in zip(ours(), peer(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                a, b = best(ours, peer, rounds if L > 100 else 50 * rounds)
                what = f"torch {name}, {label}, forward{' + backward' if backward else ''}"
                rows.append(
                    {"case": what, "peer": "SDPA", "ours_ms": 1e3 * a, "peer_ms": 1e3 * b, "ratio": b / a}
                )
    return rows


def jax_rows(rounds: int) -> list[Row]:
    """Compare with jax.nn.dot_product_attention, both jitted."""
    rows = []
    q, k, v = (
        jnp.asarray(np.random.default_rng(n).normal(size=(1, 8, 1024, 64)), jnp.float32) for n in range(3)
    )
    swap = lambda x: jnp.swapaxes(x, 1, 2)  # noqa: E731
    for label, mask, options in (("no mask", None, {}), ("causal", Causal(), {"is_causal": True})):
        ours = jax.jit(lambda q, k, v, mask=mask: asp.attention(q, k, v, mask=mask))
        peer = jax.jit(
            lambda q, k, v, options=options: swap(
                jax.nn.dot_product_attention(swap(q), swap(k), swap(v), **options)
            )
        )
        np.testing.assert_allclose(ours(q, k, v), peer(q, k, v), rtol=1e-4, atol=1e-5)
        a, b = best(
            lambda ours=ours: ours(q, k, v).block_until_ready(),
            lambda peer=peer: peer(q, k, v).block_until_ready(),
            rounds,
        )
        what = f"jax B=1 H=8 L=1024 D=64, {label}, forward, jitted"
        rows.append(_row(what, "jax.nn.dot_product_attention", a, b))
    return rows


def _row(case: str, peer: str, ours: float, theirs: float) -> Row:
    return {
        "case": case,
        "peer": peer,
        "ours_ms": 1e3 * ours,
        "peer_ms": 1e3 * theirs,
        "ratio": theirs / ours,
    }


def mask_row(rounds: int) -> Row:
    """Bind causal & window & documents at a million tokens; time and the peak of what it allocates."""
    n = 1_000_000
    ids = np.repeat(np.arange(1000), n // 1000)

    def bind() -> Any:
        return (Causal() & SlidingWindow(back=255) & Documents(ids)).spans(n, n)

    seconds = min(_timed(bind) for _ in range(rounds))
    tracemalloc.start()
    bind()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "case": "spans of causal & window & documents, L = 1,000,000",
        "ours_ms": 1e3 * seconds,
        "peak_mb": peak / 1e6,
    }


def _timed(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main() -> None:
    """Run all rows and print them as a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file too")
    arguments = parser.parse_args()
    rows = [*torch_rows(arguments.rounds), *jax_rows(arguments.rounds), mask_row(arguments.rounds)]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, jax {jax.__version__}, numpy {np.__version__}\n"
    )
    print("| case | peer | ours ms | peer ms | peer / ours |\n|---|---|---|---|---|")
    for row in rows:
        if "ratio" in row:
            times = f"{row['ours_ms']:.3f} | {row['peer_ms']:.3f} | {row['ratio']:.2f}"
            print(f"| {row['case']} | {row['peer']} | {times} |")
        else:
            print(f"| {row['case']} | – | {row['ours_ms']:.0f} | peak {row['peak_mb']:.0f} MB | – |")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
