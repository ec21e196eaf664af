"""``attnspan book``: run the textbook section and print its values beside ours.

The exit status is 0 if everything agrees, 1 if something differs or fails, and 2 if nothing could
be run at all.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnspan.book import Check, Experiment, Record
    from attnspan.book.frameworks import Framework

__all__ = ["HELP", "configure", "run"]

HELP = "run the textbook section on attention scores and masks, and check every printed value"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "experiments", nargs="*", metavar="NAME",
        help="experiments to run, by name or by what they cover (S3, P8); all by default",
    )  # fmt: skip
    parser.add_argument(
        "--framework", choices=("torch", "jax", "all"), default="all",
        help="where to run them (default: every one that is installed)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("attnspan-book"), metavar="DIR",
        help="folder for report.html and the figures (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the experiments and stop")


def run(args: argparse.Namespace) -> int:
    """Run the chosen experiments, print the comparison and write the report."""
    from attnspan.book import EXPERIMENTS

    if args.list:
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:12} {experiment.covers:12} {experiment.title}")
        return 0
    try:
        chosen = _choose(args.experiments, EXPERIMENTS)
        frameworks = _frameworks(args.framework)
    except _CannotRunError as reason:
        print(f"attnspan book: {reason}", file=sys.stderr)
        return 2
    return _run_all(chosen, frameworks, args.out)


class _CannotRunError(Exception):
    """Nothing can be run; the message says why and what to do."""


def _choose(words: list[str], experiments: dict[str, Experiment]) -> list[Experiment]:
    """Find experiments by name or by what they cover, in the book's order."""
    wanted: set[str] = set()
    for word in words:
        matches = [
            experiment.name
            for experiment in experiments.values()
            if word.lower() == experiment.name or word.upper() in experiment.covers.replace(",", " ").split()
        ]
        if not matches:
            names = ", ".join(experiments)
            raise _CannotRunError(f"no experiment {word!r}; there are {names} (see --list)")
        wanted.update(matches)
    return [e for e in experiments.values() if not words or e.name in wanted]


def _frameworks(choice: str) -> list[Framework]:
    """Return the frameworks to run in, or say what is missing and how to get it."""
    from attnspan.book.frameworks import FRAMEWORKS, find, installed, is_installed

    if not is_installed("matplotlib"):
        raise _CannotRunError('figures need matplotlib: pip install "attnspan[plot]"')
    if choice != "all":
        framework = find(choice)
        if framework.missing():
            raise _CannotRunError(str(framework.lacking()))
        return [framework]
    found = installed()
    if not found:
        ways = " or ".join(f'pip install "attnspan[{f.name}]"' for f in FRAMEWORKS)
        raise _CannotRunError(f"neither PyTorch nor JAX is installed here: {ways}")
    return found


def _run_all(chosen: list[Experiment], frameworks: list[Framework], out: Path) -> int:
    from attnspan.book.report import counts, write_report

    began = time.monotonic()
    progress = _Progress(len(chosen) * len(frameworks))
    records: list[Record] = []
    failures: list[str] = []
    for experiment in chosen:
        for framework in frameworks:
            progress.step(f"{experiment.name} in {framework.label}")
            try:
                record = experiment.run(framework.name)
            except Exception as error:  # one broken experiment must not hide what the others find
                progress.clear()
                traceback.print_exc()
                line = (str(error).splitlines() or [""])[0]
                failures.append(f"{experiment.name} in {framework.label}: {type(error).__name__}: {line}")
                continue
            progress.clear()
            _print_record(record, framework.label)
            records.append(record)
    good, total = counts(records)
    print(f"{good} of {total} checks agree, in {time.monotonic() - began:.0f} s")
    for record in records:
        for check in record.checks:
            if not check.ok:
                print(f"differs: {record.name} in {record.framework}: {check.name}")
    for failure in failures:
        print(f"failed: {failure}")
    if records:
        print(f"report: {write_report(records, out)}")
    return 0 if good == total and not failures else 1


def _print_record(record: Record, label: str) -> None:
    print(f"{record.title} [{record.covers}], {label}")
    for check in record.checks:
        _print_check(check)
    print()


def _print_check(check: Check) -> None:
    print(f"  {'agrees ' if check.ok else 'DIFFERS'}  {check.name}")
    detail = ""
    if check.difference is not None and check.difference > 0:
        detail = f"  (apart {check.difference:.1e}, allowed {check.tolerance:.1e})"
    if len(check.book) + len(check.ours) <= 50:
        print(f"           book {check.book}   here {check.ours}{detail}")
    else:
        print(f"           book {check.book}")
        print(f"           here {check.ours}{detail}")


class _Progress:
    """A line on stderr that says what runs now: rewritten on a terminal, plain elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.terminal = sys.stderr.isatty()

    def step(self, what: str) -> None:
        self.done += 1
        line = f"[{self.done}/{self.steps}] {what}"
        if self.terminal:
            print(f"\r\033[K{line} …", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
