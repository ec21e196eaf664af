"""What was found, as a Markdown table, as plain values for JSON, and as a picture."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnspan.bench.measure import Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HEADER", "Line", "environment", "heading", "memory_table", "picture", "plain"]

HEADER = (
    "| case | ours is | peer | forward, ours / peer | ratio | forward + backward | ratio | max error |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes
    ----------
    case, framework, implementation, peer : str
    shape : tuple of int
    error : float
        The largest difference, as a share of the peer's largest magnitude; NaN where either side is.
    tolerance : float
        How large `error` may be for the times to mean anything.
    forward, step : Times or None
        None where nothing was timed: no backward, or the sides disagree.
    """

    case: str
    framework: str
    implementation: str
    peer: str
    shape: tuple[int, ...]
    error: float
    tolerance: float
    forward: Times | None = None
    step: Times | None = None

    @property
    def agrees(self) -> bool:
        """Tell whether both sides computed the same; NaN does not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        name = f"{self.case} ({', '.join(map(str, self.shape))})"
        cells = [name, self.implementation, self.peer, *_cells(self.forward), *_cells(self.step)]
        verdict = (
            f"{self.error:.1e}" if self.agrees else f"DISAGREES: {self.error:.1e} > {self.tolerance:.0e}"
        )
        return f"| {' | '.join([*cells, verdict])} |"


def _cells(times: Times | None) -> tuple[str, str]:
    if times is None:
        return "-", "-"
    best = [min(times.ours), min(times.peer)]
    unit, scale = ("µs", 1e6) if best[0] < 1e-3 else ("ms", 1e3)
    ours, peer = (f"{scale * seconds:,.{1 if scale * seconds < 1000 else 0}f}" for seconds in best)
    return f"{ours} / {peer} {unit}", f"{times.ratio:.2f}"


def environment() -> dict[str, Any]:
    """Say where this runs: ``machine``, ``system``, ``cores``, ``threads``, ``kernel_isa``, ``versions``."""
    from attnspan import native
    from attnspan.errors import AttnspanError

    try:
        isa = native.load().kernel_isa()
    except AttnspanError:  # without the native core the others can be measured
        isa = None
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return {
        "machine": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": native.default_threads(),
        "kernel_isa": isa,
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("attnspan", "numpy", "torch", "jax", "jaxlib")},
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (listing.read_text().splitlines() if listing.exists() else ())
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def heading(where: dict[str, Any]) -> str:
    """Write what stands above the table."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return (
        f"{where['machine']}, {where['system']}; {where['threads']} threads on both sides "
        f"(JAX: its own, {where['cores']} cores usable); native kernels: {where['kernel_isa'] or 'none'}\n"
        f"{versions}\n"
        "Best of the readings, both sides called in turn; ratio = peer / ours, above 1 we are faster.\n"
    )


def memory_table(found: Sequence[dict[str, Any]]) -> str:
    """Write the lines of `memory.fresh` as a table."""
    lines = [
        "| forward + backward | ours is | framework | seconds | extra memory, with output and gradients |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        name = f"{one['case']} ({', '.join(f'{n:,}' for n in one['shape'])})"
        cells = [name, one["implementation"], one["framework"], f"{one['seconds']:.1f}"]
        cells.append(f"{one['extra_bytes'] / 2**30:.2f} GiB")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plain(
    where: dict[str, Any], lines: Sequence[Line], skipped: Sequence[str], memory: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Give everything as plain JSON values; an error that is NaN is null."""
    written = [
        asdict(line) | {"agrees": line.agrees, "error": line.error if line.error == line.error else None}
        for line in lines
    ]
    return where | {"lines": written, "skipped": list(skipped), "memory": list(memory)}


def picture(lines: Sequence[Line], where: dict[str, Any]) -> Figure:
    """Draw the ratios as bars, two a comparison; what disagrees has none.

    Raises
    ------
    MissingDependencyError
        When matplotlib is not installed.
    """
    from attnspan.plots.canvas import INK, VISIBLE, WARNING, new_figure, quiet_frame

    drawn = [line for line in lines if line.forward is not None]
    figure = new_figure((7, 1.2 + 0.36 * max(1, len(drawn))))
    axes = figure.subplots()
    for shift, colour, label, of in (
        (-0.2, VISIBLE, "forward", lambda line: line.forward),
        (0.2, WARNING, "forward + backward", lambda line: line.step),
    ):
        bars = [(i + shift, of(line).ratio) for i, line in enumerate(drawn) if of(line) is not None]
        axes.barh([i for i, _ in bars], [ratio for _, ratio in bars], 0.38, color=colour, label=label)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(drawn)), [f"{line.case} / {line.peer}" for line in drawn])
    axes.invert_yaxis()
    axes.set_title(f"{where['machine']}, {where['threads']} threads", fontsize=9, color=INK)
    axes.legend(fontsize=8, labelcolor=INK, frameon=False)
    quiet_frame(axes, xlabel="time of the peer / ours (above 1: ours is faster)")
    return figure
