"""A mask drawn cell by cell: which query may see which key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnspan.errors import refusal
from attnspan.masks.base import as_mask
from attnspan.plots.canvas import HIDDEN, INK, PAPER, VISIBLE, WARNING, new_figure, quiet_frame
from attnspan.plots.host import to_host

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_mask"]

MOST_RULED = 48  # beyond this many cells a side, lines between cells would hide the cells
MOST_PICTURES = 64


def plot_mask(
    mask: Any,
    L: int,
    S: int,
    *,
    title: str | None = None,
    figsize: tuple[float, float] | None = None,
    axes: Axes | None = None,
) -> Figure:
    """Draw which keys each query may see: one cell a pair, never a block.

    Blue cells are visible, pale ones are not; a query that sees no key at all has an orange row,
    for its output is zero and that should not come as a surprise.

    Parameters
    ----------
    mask : Mask or boolean array
        A mask of `attnspan.masks`, or a boolean array that stands for one.
    L, S : int
        How many queries and keys.
    title : str, optional
        A line above the picture; by default nothing, or the batch element and head.
    figsize : (float, float), optional
        Size of the figure in inches; by default it follows L and S.
    axes : matplotlib.axes.Axes, optional
        Draw here; the mask must then be the same for every batch element and head.

    Returns
    -------
    matplotlib.figure.Figure
        Batch elements down, heads across.

    Examples
    --------
    >>> from attnspan.masks import Causal, SlidingWindow
    >>> figure = plot_mask(Causal() & SlidingWindow(back=2), 8, 8)
    """
    cells = _cells(mask, L, S)
    batch, heads = cells.shape[:2]
    if axes is not None:
        if batch * heads != 1:
            need = "one picture, the same for every batch element and head"
            raise refusal("axes", f"a mask of {batch} × {heads} pictures", need, "leave axes out")
        _draw(axes, cells[0, 0], title, True, True)
        return cast("Figure", axes.figure)
    if batch * heads > MOST_PICTURES:
        raise refusal("mask", f"{batch} × {heads} pictures", f"at most {MOST_PICTURES}")
    figure = new_figure(figsize or _size(batch, heads, L, S))
    grid = figure.subplots(batch, heads, squeeze=False)
    for b in range(batch):
        for h in range(heads):
            parts = [f"batch {b}"] * (batch > 1) + [f"head {h}"] * (heads > 1)
            _draw(grid[b, h], cells[b, h], ", ".join(parts), b == batch - 1, h == 0)
    if title and batch * heads == 1:
        grid[0, 0].set_title(title, color=INK, fontsize=9)
    elif title:
        figure.suptitle(title, color=INK, fontsize=10)
    return figure


def _cells(mask: Any, L: int, S: int) -> np.ndarray:
    """Return bool (B|1, H|1, L, S)."""
    cells = to_host(as_mask(mask).dense(L, S)) != 0
    if cells.size == 0:
        raise refusal("L, S", f"{L}, {S}", "at least one query and one key: there is nothing to draw")
    return cells


def _size(batch: int, heads: int, L: int, S: int) -> tuple[float, float]:
    """Give each picture about 2.4 inches on its longer side, and room for labels."""
    longest = max(L, S)
    return (heads * (2.4 * S / longest + 0.5) + 0.3, batch * (2.4 * L / longest + 0.5) + 0.3)


def _draw(axes: Axes, cells: np.ndarray, title: str | None, bottom: bool, left: bool) -> None:
    """Draw one picture: cells, lines between them, and orange rows for blind queries."""
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    L, S = cells.shape
    colours = np.where(cells[..., None], to_rgb(VISIBLE), to_rgb(HIDDEN))
    colours[~cells.any(axis=-1)] = to_rgb(WARNING)
    axes.imshow(colours, interpolation="nearest", aspect="equal")
    if max(L, S) <= MOST_RULED:
        axes.set_xticks(np.arange(S + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(L + 1) - 0.5, minor=True)
        axes.grid(which="minor", color=PAPER, linewidth=1.2)
        axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    quiet_frame(
        axes,
        sides=("top", "right", "bottom", "left"),
        xlabel="Keys" if bottom else None,
        ylabel="Queries" if left else None,
    )
    axes.tick_params(which="major", length=0)
    if title:
        axes.set_title(title, color=INK, fontsize=9)
