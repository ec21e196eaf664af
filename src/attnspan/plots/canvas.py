"""A matplotlib figure without pyplot, and the one look that all our pictures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnspan.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["HIDDEN", "INK", "PAPER", "VISIBLE", "WARNING", "new_figure", "quiet_frame"]

INK = "#24292f"  # text and lines
PAPER = "#ffffff"  # behind everything: opaque, so a picture reads on light and dark pages
VISIBLE = "#0072b2"  # blue, orange and grey differ for every kind of colour vision
HIDDEN = "#e6e9ed"
WARNING = "#d55e00"


def new_figure(figsize: tuple[float, float] | None = None) -> Figure:
    """Make an empty figure that shows itself in a notebook and saves itself anywhere.

    Parameters
    ----------
    figsize : (float, float), optional
        Width and height in inches.

    Raises
    ------
    MissingDependencyError
        When matplotlib is not installed.
    """
    try:
        from attnspan.plots.figure import NotebookFigure
    except ImportError as cause:
        raise MissingDependencyError(
            'plots need matplotlib, which is not installed: pip install "attnspan[plot]"'
        ) from cause
    return NotebookFigure(figsize=figsize, layout="constrained", facecolor=PAPER)


def quiet_frame(axes: Axes, *, sides: tuple[str, ...] = ("top", "right"), **labels: Any) -> None:
    """Drop the frame's named sides, draw what stays in our ink, and set axis labels."""
    for name, spine in axes.spines.items():
        spine.set_visible(name not in sides)
        spine.set_color("#8c959f")
        spine.set_linewidth(0.8)
    axes.tick_params(colors=INK, labelsize=8, color="#8c959f", width=0.8, length=3)
    if labels.get("xlabel"):
        axes.set_xlabel(labels["xlabel"], color=INK, fontsize=9)
    if labels.get("ylabel"):
        axes.set_ylabel(labels["ylabel"], color=INK, fontsize=9)
