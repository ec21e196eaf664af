"""What is compared with what: one `Case` a line of the table and peer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from attnspan.errors import refusal

__all__ = ["CASES", "LENGTHS", "WINDOW", "Case", "read_lengths"]

WINDOW = 256
"""Keys that a query of the window cases sees: itself and those before it."""

DOCUMENTS = 8
"""Documents of equal length in the packed case."""

# Words of 16 copyright files of Debian packages, drawn at random and clipped to 64 ... 512: a batch of
# documents that a model with 512 positions reads.
LENGTHS = (512, 512, 512, 323, 397, 262, 512, 269, 512, 204, 512, 512, 206, 512, 512, 512)


@dataclass(frozen=True)
class Case:
    """One thing to compute, and who else computes it.

    Attributes
    ----------
    name, framework : str
        What ``--case`` and ``--framework`` choose by.
    shape : tuple of int
        Of q, k and v alike.
    peers : tuple of str
        "sdpa", "sdpa with heads", "flex", "jax.nn", "formula", or "attention" (ours, without statistics).
    mask : str
        "none", "causal", "window", "documents" or "padded".
    dtype : str
    dropout : float
    statistics : bool
        Whether our side is `inspect`.
    quick : bool
        Whether ``--quick`` keeps it.
    """

    name: str
    framework: str
    shape: tuple[int, ...]
    peers: tuple[str, ...] = ("sdpa",)
    mask: str = "none"
    dtype: str = "float32"
    dropout: float = 0.0
    statistics: bool = False
    quick: bool = False

    @property
    def tolerance(self) -> float:
        """How far apart both sides may be, as a share of the peer's largest magnitude."""
        return 1e-4 if self.dtype == "float32" else 2e-2


_SHORT, _LONG, _WIDE = (1, 8, 2048, 64), (1, 8, 4096, 64), (1, 4, 2048, 128)
_FLEX = ("sdpa", "flex")
_JAX = ("jax.nn", "formula")

CASES = (
    Case("tiny", "torch", (1, 1, 4, 8), quick=True),
    Case("tiny-causal", "torch", (1, 1, 4, 8), mask="causal", quick=True),
    Case("dense-2048", "torch", _SHORT, _FLEX, quick=True),
    Case("dense-4096", "torch", _LONG, _FLEX),
    Case("dense-wide", "torch", _WIDE, _FLEX),
    Case("causal-2048", "torch", _SHORT, _FLEX, "causal", quick=True),
    Case("causal-4096", "torch", _LONG, _FLEX, "causal"),
    Case("causal-wide", "torch", _WIDE, _FLEX, "causal"),
    Case("window", "torch", _LONG, _FLEX, "window", quick=True),
    Case("documents", "torch", _LONG, _FLEX, "documents"),
    Case("padded", "torch", (16, 8, 512, 64), _FLEX, "padded", quick=True),
    Case("dropout", "torch", _SHORT, dropout=0.1),
    Case("bfloat16", "torch", _SHORT, dtype="bfloat16"),
    Case("float16-causal", "torch", _SHORT, mask="causal", dtype="float16"),
    Case("textbook", "torch", (16, 512, 64), ("sdpa", "sdpa with heads")),
    Case("statistics", "torch", _SHORT, ("attention",), statistics=True),
    Case("jax-dense", "jax", _LONG, _JAX),
    Case("jax-causal", "jax", _LONG, _JAX, "causal"),
    Case("jax-window", "jax", _LONG, _JAX, "window", quick=True),
)


def read_lengths(file: Path | None, batch: int = len(LENGTHS), most: int = 512) -> tuple[int, ...]:
    """Give the lengths of the padded case: those above, or the first of a JSON list, clipped to 64 ... most.

    Parameters
    ----------
    file : Path, optional
        Holds a JSON list of integers.
    batch : int
        How many are needed.
    most : int
        The longest that fits.

    Raises
    ------
    ArgumentError
        If the file cannot be read, or holds no such list.
    """
    if file is None:
        return LENGTHS
    needed, fix = f"a JSON list of at least {batch} integers", "leave --lengths out for those built in"
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise refusal("--lengths", f"{file} ({type(error).__name__}: {error})", needed, fix) from None
    if not isinstance(given, list) or len(given) < batch or any(type(n) is not int for n in given):
        raise refusal("--lengths", f"{file}", needed, fix)
    return tuple(min(most, max(64, n)) for n in given[:batch])
