"""Curves: one call for one or several of them, as in the textbook's helper."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnspan.errors import refusal
from attnspan.plots.canvas import INK, new_figure, quiet_frame
from attnspan.plots.host import to_host

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

MOST_TICKS = 10  # as many labels as fit below a figure of the default width


def plot(
    X: Any,
    Y: Any = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    legend: Sequence[str] | None = None,
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
    xscale: str = "linear",
    yscale: str = "linear",
    fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
    figsize: tuple[float, float] = (3.5, 2.5),
    axes: Axes | None = None,
) -> Figure:
    """Draw curves of Y against X, or of X against its index.

    Parameters
    ----------
    X, Y : array (n,), or list of them
        One curve or several; a 2-D array is one curve a row. One X serves every Y. Without Y,
        the X are drawn against 0, 1, 2, …
    xlabel, ylabel : str, optional
        Axis names.
    legend : sequence of str, optional
        One name a curve.
    xlim, ylim : (float, float), optional
        Limits of the axes.
    xscale, yscale : str
        ``"linear"`` or ``"log"``.
    fmts : sequence of str
        matplotlib line formats, used in turn; more curves than formats start over.
    figsize : (float, float)
        Size of the figure in inches.
    axes : matplotlib.axes.Axes, optional
        Draw here, in place of what was there, instead of in a new figure.

    Returns
    -------
    matplotlib.figure.Figure
        The new figure, or the one that `axes` belongs to.

    Examples
    --------
    >>> figure = plot([1, 2, 4], [[3, 2, 1], [1, 1, 1]], legend=["falls", "stays"], xscale="log")
    """
    xs, ys = _pair_up(X, Y)
    if axes is None:
        axes = new_figure(figsize).subplots()
    axes.clear()
    for x, y, style in zip(xs, ys, cycle(fmts), strict=False):
        line = (y,) if x is None else (x, y)
        axes.plot(*line, style, linewidth=1.8)
    axes.set_xscale(xscale)
    axes.set_yscale(yscale)
    if xscale == "log":
        _tick_at_points(axes, xs)
    if xlim is not None:
        axes.set_xlim(xlim)
    if ylim is not None:
        axes.set_ylim(ylim)
    if legend:
        names = [legend] if isinstance(legend, str) else list(legend)
        axes.legend(names, fontsize=8, labelcolor=INK, frameon=False)
    axes.grid(True, color="#8c959f", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    quiet_frame(axes, xlabel=xlabel, ylabel=ylabel)
    return cast("Figure", axes.figure)


def _pair_up(X: Any, Y: Any) -> tuple[list[np.ndarray | None], list[np.ndarray]]:
    """Return as many abscissae as ordinates, each a curve; None stands for the index."""
    if Y is None:
        ys = _curves("X", X)
        return [None] * len(ys), ys
    xs, ys = _curves("X", X), _curves("Y", Y)
    if len(xs) == 1:
        xs = xs * len(ys)
    if len(xs) != len(ys):
        fix = "give one X for all curves, or one for each"
        raise refusal("X", f"{len(xs)} sequences", f"1 or {len(ys)}, as many as Y has", fix)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if len(x) != len(y):
            raise refusal(f"X of curve {i}", f"{len(x)} values", f"{len(y)}, as many as its Y")
    return list(xs), ys


def _tick_at_points(axes: Axes, xs: list[np.ndarray | None]) -> None:
    """Label the points themselves on a log axis that has few: 4, 8, 16, not 10¹."""
    from matplotlib.ticker import NullLocator

    points = np.unique(np.concatenate([x for x in xs if x is not None] or [np.zeros(0)]))
    points = points[points > 0]
    if 0 < len(points) <= MOST_TICKS:
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.xaxis.set_minor_locator(NullLocator())


def _curves(name: str, data: Any) -> list[np.ndarray]:
    """Split one sequence, a list of sequences or a 2-D array into curves."""
    if isinstance(data, (list, tuple)) and any(_rank(part) == 1 for part in data):
        return [to_host(part, np.float64) for part in data]  # lengths may differ
    whole = to_host(data, np.float64)
    if whole.ndim == 1:
        return [whole]
    if whole.ndim == 2:
        return list(whole)
    raise refusal(name, whole, "one sequence of numbers, or a list of them")


def _rank(part: Any) -> int:
    """Count the axes of an array, a list or a number without copying it."""
    if isinstance(part, (list, tuple, range)):
        return 1
    return int(getattr(part, "ndim", 0))
