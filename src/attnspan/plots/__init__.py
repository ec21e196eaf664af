"""Pictures: grids of heat maps, curves, and masks drawn cell by cell.

Every function returns a matplotlib ``Figure`` that belongs to the caller alone: pyplot is never
touched, so nothing leaks between threads, tests or notebook cells, and no window is needed.
matplotlib is imported when a function is called; where it is missing, the call says how to get it.

Arrays come from PyTorch, JAX or NumPy, in any dtype (bfloat16 included), on any device, with or
without a gradient: they are brought to the host and widened before matplotlib sees them.
"""

from attnspan.plots.curves import plot
from attnspan.plots.heatmaps import show_heatmaps
from attnspan.plots.masks import plot_mask

__all__ = ["plot", "plot_mask", "show_heatmaps"]
