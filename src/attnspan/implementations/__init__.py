"""How attention is computed, one file each; they never import each other.

`IMPLEMENTATIONS` stands in the order in which the planner prefers them.
"""

from attnspan.implementations.base import Implementation
from attnspan.implementations.eager import EAGER
from attnspan.implementations.native import NATIVE
from attnspan.implementations.sdpa import SDPA
from attnspan.implementations.tiled import TILED

__all__ = ["IMPLEMENTATIONS", "Implementation"]

IMPLEMENTATIONS: tuple[Implementation, ...] = (NATIVE, SDPA, TILED, EAGER)
