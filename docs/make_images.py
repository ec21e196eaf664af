"""Draw the pictures that the README and the docs show: ``python docs/make_images.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnspan.masks import Causal, Documents, FirstKeys, PrefixLM, SlidingWindow, ValidLens
from attnspan.plots import plot_mask
from attnspan.plots.canvas import HIDDEN, INK, VISIBLE, WARNING, new_figure

L = 12
IDS = np.repeat([0, 1, 2], [5, 4, 3])

# Left to right, top to bottom: what is written, and the mask it makes.
MASKS = {
    "Causal()": Causal(),
    "Causal() & SlidingWindow(back=2)": Causal() & SlidingWindow(back=2),
    "(SlidingWindow(back=2) | FirstKeys(2))\n& Causal()": (SlidingWindow(back=2) | FirstKeys(2)) & Causal(),
    "Documents(ids)": Documents(IDS),
    "PrefixLM(4)": PrefixLM(4),
    "SlidingWindow(back=2) & ValidLens(7)": SlidingWindow(back=2) & ValidLens(7),
}


def draw(path: Path) -> None:
    """Draw all masks as one picture that reads on light and dark pages."""
    figure = new_figure((9.6, 7.1))
    figure.get_layout_engine().set(hspace=0.1, wspace=0.06)
    grid = figure.subplots(2, 3)
    for i, (axes, (name, mask)) in enumerate(zip(grid.flat, MASKS.items(), strict=True)):
        plot_mask(mask, L, L, axes=axes)
        axes.set_title(name, color=INK, fontsize=9, family="monospace", pad=7)
        if i % 3:
            axes.set_ylabel("")
        if i < 3:
            axes.set_xlabel("")
    for colour, text, x in (
        (VISIBLE, "may attend", 0.24),
        (HIDDEN, "may not", 0.44),
        (WARNING, "sees no key: output 0", 0.60),
    ):
        figure.text(x, -0.022, "■", color=colour, fontsize=15, va="center")
        figure.text(x + 0.025, -0.02, text, color=INK, fontsize=10.5, va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "mask.png")
