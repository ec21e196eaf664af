"""Grids of heat maps with one shared colour scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnspan.errors import refusal
from attnspan.plots.canvas import INK, new_figure, quiet_frame
from attnspan.plots.host import to_host

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["show_heatmaps"]


def show_heatmaps(
    matrices: Any,
    xlabel: str,
    ylabel: str,
    titles: Any = None,
    figsize: tuple[float, float] = (2.5, 2.5),
    cmap: str = "Reds",
) -> Figure:
    """Draw a grid of matrices, all in one colour scale, with a colour bar.

    Parameters
    ----------
    matrices : array (rows, cols, L, S)
        What to draw: a PyTorch, JAX or NumPy array of any real dtype on any device, or nested
        lists of such arrays. Cells that are not finite are drawn grey.
    xlabel, ylabel : str
        Axis names, written once at the bottom of each column and the left of each row.
    titles : sequence of str, optional
        One title a column, or nested: one a matrix.
    figsize : (float, float)
        Size of the whole figure in inches.
    cmap : str
        A matplotlib colour map.

    Returns
    -------
    matplotlib.figure.Figure
        The caller's own; a notebook shows it, ``figure.savefig(path)`` stores it.

    Examples
    --------
    >>> figure = show_heatmaps(np.eye(3)[None, None], xlabel="Keys", ylabel="Queries")
    >>> figure.savefig("weights.png")  # doctest: +SKIP
    """
    values = to_host(matrices)
    if values.ndim != 4 or 0 in values.shape:
        fix = "add leading axes: matrices[None, None]" if values.ndim == 2 else ""
        raise refusal("matrices", values, "an array (rows, cols, L, S), no axis of size 0", fix)
    rows, cols = values.shape[:2]
    headings = _headings(titles, rows, cols)
    figure = new_figure(figsize)
    grid = figure.subplots(rows, cols, sharex=True, sharey=True, squeeze=False)
    low, high = _range(values)
    image = None
    for i in range(rows):
        for j in range(cols):
            axes = grid[i, j]
            image = axes.imshow(values[i, j], cmap=cmap, vmin=low, vmax=high, aspect="auto")
            image.set_interpolation("nearest")
            axes.set_facecolor("#b8bfc6")
            axes.set_box_aspect(_box_aspect(values.shape[2:]))
            _whole_ticks(axes)
            bottom, left = i == rows - 1, j == 0
            quiet_frame(axes, sides=(), xlabel=xlabel if bottom else None, ylabel=ylabel if left else None)
            if headings is not None:
                axes.set_title(headings[i][j], color=INK, fontsize=9)
    bar = figure.colorbar(image, ax=grid, shrink=0.6)
    bar.ax.tick_params(colors=INK, labelsize=8, color="#8c959f", length=3)
    bar.outline.set_visible(False)
    return figure


def _range(values: np.ndarray) -> tuple[float, float]:
    """Return the finite minimum and maximum, kept apart so that a constant has a colour."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        low, high = min(low, 0.0), max(high, 1.0 if high == 0 else high, 0.0)
    return low, high


def _headings(titles: Any, rows: int, cols: int) -> list[list[str]] | None:
    """Spread titles over the grid; a title a column or a title a matrix."""
    if titles is None:
        return None
    table = [list(row) for row in titles] if not isinstance(titles[0], str) else None
    if table is None:
        table = [list(titles)] + [[""] * len(titles) for _ in range(rows - 1)]
    if len(table) != rows or any(len(row) != cols for row in table):
        raise refusal("titles", f"{len(table[0])} titles", f"one a column ({cols}) or {rows} rows of {cols}")
    return table


def _box_aspect(shape: tuple[int, ...]) -> float:
    """Keep cells square, but let a single row of many keys stay tall enough to see."""
    return float(np.clip(shape[0] / shape[1], 0.25, 4.0))


def _whole_ticks(axes: Any) -> None:
    """Put ticks at whole positions only: there is no key 2.5."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
