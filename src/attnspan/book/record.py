"""What an experiment is, and what it leaves behind: checks with verdicts, and pictures.

The rule for a printed number stands here once: ours must agree to within half a unit of the last
digit that the book prints. float32 sums taken in another order move the seventh digit, so 1e-6 is
always granted on top; a number printed without decimals (a masked weight's 0) must be met exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnspan.book.frameworks import find
from attnspan.errors import refusal
from attnspan.plots.host import to_host

__all__ = ["Check", "Experiment", "Picture", "Record", "holds", "near", "printed", "printed_rows"]

FLOAT32_SLACK = 1e-6


@dataclass(frozen=True)
class Check:
    """One thing the book prints or says, beside what came out here.

    Attributes
    ----------
    name : str
        What is compared, starting with the printed value's number (P1 to P8) if it has one.
    book, ours : str
        Both sides as text, in the same number of digits.
    difference, tolerance : float or None
        The largest difference and what is allowed; None for a statement that holds or doesn't.
    ok : bool
        The verdict.
    """

    name: str
    book: str
    ours: str
    difference: float | None
    tolerance: float | None
    ok: bool


@dataclass(frozen=True)
class Picture:
    """A figure with the sentence below it, which also describes it to those who can't see it."""

    caption: str
    figure: Any


@dataclass(frozen=True)
class Record:
    """The outcome of one experiment in one framework."""

    name: str
    covers: str
    title: str
    claim: str
    framework: str
    checks: tuple[Check, ...]
    pictures: tuple[Picture, ...]

    @property
    def ok(self) -> bool:
        """Whether every check came out."""
        return all(check.ok for check in self.checks)


@dataclass(frozen=True)
class Experiment:
    """A claim of the textbook section and the function that puts it to the test.

    Attributes
    ----------
    name : str
        What the command line calls it.
    covers : str
        Systems (S1 to S10) and printed values (P1 to P8) of the section that it checks.
    title, claim : str
        A heading, and the claim in one sentence.
    measure : callable
        Takes "torch" or "jax" and returns (checks, pictures).
    """

    name: str
    covers: str
    title: str
    claim: str
    measure: Callable[[str], tuple[Sequence[Check], Sequence[Picture]]]

    def run(self, framework: str) -> Record:
        """Run it in one framework, on the CPU, leaving the framework's random state as it was."""
        with find(framework).sandbox():
            checks, pictures = self.measure(framework)
        return Record(
            name=self.name,
            covers=self.covers,
            title=self.title,
            claim=self.claim,
            framework=framework,
            checks=tuple(checks),
            pictures=tuple(pictures),
        )


def printed(name: str, text: str, ours: Any) -> Check:
    """Compare numbers that the book prints with ours, digit by digit.

    Parameters
    ----------
    name : str
        What is compared.
    text : str
        The printed numbers, separated by spaces, in the book's own digits.
    ours : float or array
        As many numbers.

    Examples
    --------
    >>> printed("P2", "0.259", 0.25901).ok, printed("P2", "0.259", 0.2596).ok
    (True, False)
    """
    tokens = text.split()
    values = np.asarray(to_host(ours, np.float64)).reshape(-1)
    if len(tokens) != len(values):
        raise refusal("ours", f"{len(values)} numbers", f"{len(tokens)}, as many as printed")
    decimals = [len(token.partition(".")[2]) for token in tokens]
    book = np.array([float(token) for token in tokens])
    allowed = np.array([_tolerance(count) for count in decimals])
    difference = np.abs(values - book)
    return Check(
        name=name,
        book=" ".join(f"{x:.{n}f}" for x, n in zip(book, decimals, strict=True)),
        ours=" ".join(_digits(x, n) for x, n in zip(values, decimals, strict=True)),
        difference=float(difference.max()),
        tolerance=float(allowed.max()),
        ok=bool((difference <= allowed).all()),
    )


def printed_rows(name: str, text: str, ours: Any) -> list[Check]:
    """Compare a printed table with ours, one check a row; rows are separated by "/"."""
    rows = [row.strip() for row in text.split("/")]
    values = to_host(ours, np.float64)
    values = values.reshape(-1, values.shape[-1])
    if len(rows) != len(values):
        raise refusal("ours", f"{len(values)} rows", f"{len(rows)}, as many as printed")
    return [
        printed(f"{name}, row {i}", row, mine) for i, (row, mine) in enumerate(zip(rows, values, strict=True))
    ]


def near(name: str, expected: Any, ours: Any, tolerance: float, book: str = "") -> Check:
    """Compare two computed results; `book` says in words what is expected if a number can't."""
    left, right = np.broadcast_arrays(to_host(expected, np.float64), to_host(ours, np.float64))
    difference = float(np.abs(left - right).max())
    return Check(
        name=name,
        book=book or _brief(left),
        ours=("the same" if difference <= tolerance else "not the same") if book else _brief(right),
        difference=difference,
        tolerance=tolerance,
        ok=difference <= tolerance,  # a NaN is never near
    )


def holds(name: str, book: str, ours: Any, ok: Any) -> Check:
    """Record a statement of the book, what was seen here, and whether it holds."""
    return Check(name, book, str(ours), None, None, bool(ok))


def _tolerance(decimals: int) -> float:
    return 0.5 * 10.0**-decimals + FLOAT32_SLACK if decimals else 0.0


def _brief(values: np.ndarray) -> str:
    """Write numbers in four digits, and once if all read alike."""
    texts = [f"{value:.4g}" for value in values.reshape(-1)]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def _digits(value: float, decimals: int) -> str:
    """Write a number in the book's digits, but never round away what an exact 0 or 1 hides."""
    return f"{value:.{decimals}f}" if decimals or value == round(value) else f"{value:.3g}"
