"""``attnspan bench dot``: the dot product attention against the peers installed, timed in turn.

The exit status is 0 if all sides agree, 1 if some disagree (they get no ratio), and 2 if nothing can run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnspan.bench.cases import CASES, Case, read_lengths

if TYPE_CHECKING:
    from attnspan.bench.report import Line

__all__ = ["HELP", "configure", "run"]

HELP = "time attention against the framework's own, in turn and checked, on this machine"

READINGS = 7
QUICK_READINGS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("subject", choices=("dot",), help="what to time: the dot product")
    parser.add_argument(
        "--case", action="append", choices=[case.name for case in CASES], metavar="NAME",
        help=f"only this one (may be repeated): {', '.join(case.name for case in CASES)}",
    )  # fmt: skip
    parser.add_argument(
        "--framework", choices=("torch", "jax"), help="only this one (default: every one installed)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and readings")
    parser.add_argument(
        "--repeats", type=_positive, metavar="N",
        help=f"readings a side (default: {READINGS}, with --quick {QUICK_READINGS})",
    )  # fmt: skip
    parser.add_argument(
        "--flex", action="store_true", help="compare with compiled FlexAttention too (it compiles long)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure memory at 16,384 and a million tokens too (minutes)"
    )
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help="a JSON list of lengths for the padded case, clipped to 64 ... 512 (default: built in)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every reading there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios there, as bars")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("needs 1 or more")
    return number


def run(args: argparse.Namespace) -> int:
    """Time the chosen cases, print the table and write what was asked for."""
    from attnspan.bench import memory, report

    if args.plot:
        from attnspan.plots.canvas import new_figure

        new_figure()  # says now, not after minutes, that matplotlib is missing
    frameworks = _frameworks(args)
    lengths = read_lengths(args.lengths)
    chosen = [
        case
        for case in CASES
        if case.framework in frameworks
        and (case.name in args.case if args.case else case.quick or not args.quick)
    ]
    if not chosen:
        print(f"attnspan bench: none of {', '.join(args.case)} is for {args.framework}", file=sys.stderr)
        return 2
    for name in frameworks:
        __import__(name)  # the number of threads is PyTorch's, where it is there
    where = report.environment()
    print(report.heading(where))
    print(report.HEADER, flush=True)
    repeats = args.repeats or (QUICK_READINGS if args.quick else READINGS)
    lines, skipped = _compare(chosen, lengths, repeats, args.flex)
    for reason in skipped:
        print(f"\nskipped: {reason}")
    found = []
    if args.memory:
        for name in frameworks:
            for line in memory.LINES:
                print(f"memory: {line}, {name}", file=sys.stderr, flush=True)
                found.append(memory.fresh(name, line))
        print(f"\n{report.memory_table(found)}")
    if args.json:
        args.json.write_text(json.dumps(report.plain(where, lines, skipped, found), indent=2) + "\n")
    if args.plot:
        report.picture(lines, where).savefig(args.plot, dpi=150)
    return 0 if all(line.agrees for line in lines) else 1


def _frameworks(args: argparse.Namespace) -> list[str]:
    """Name the frameworks to time in; raise what says how to get one that is asked for and missing."""
    from attnspan.book.frameworks import FRAMEWORKS, find, installed

    asked = (
        {args.framework} if args.framework else {c.framework for c in CASES if c.name in (args.case or ())}
    )
    for name in sorted(asked):
        if find(name).missing():
            raise find(name).lacking()
    names = [framework.name for framework in installed() if not asked or framework.name in asked]
    if not names:
        raise FRAMEWORKS[0].lacking()
    return names


def _compare(
    chosen: Sequence[Case], lengths: tuple[int, ...], repeats: int, flex: bool
) -> tuple[list[Line], list[str]]:
    """Compare each case with each of its peers; print each line as it comes."""
    lines, skipped = [], []
    pairs = [(case, peer) for case in chosen for peer in case.peers if flex or peer != "flex"]
    for i, (case, peer) in enumerate(pairs):
        print(f"[{i + 1}/{len(pairs)}] {case.name} against {peer}", file=sys.stderr, flush=True)
        try:
            line = _line(case, peer, lengths, repeats)
        except Exception as error:
            if peer != "flex":  # which needs a compiler, and takes not every mask everywhere
                raise
            words = " ".join(str(error).split())[:200]
            skipped.append(f"{case.name} against flex: {type(error).__name__}: {words}")
            continue
        print(line, flush=True)
        lines.append(line)
    return lines, skipped


def _line(case: Case, peer: str, lengths: tuple[int, ...], repeats: int) -> Line:
    from attnspan.bench.measure import alternate, apart
    from attnspan.bench.report import Line
    from attnspan.bench.sides import build

    sides = build(case, peer, lengths)
    # with dropout each side drops others, so they are held together without it
    checked = build(dataclasses.replace(case, dropout=0.0), peer, lengths) if case.dropout else sides
    pairs = (checked.forward, checked.step)
    errors = [apart(ours(), [sides.back(x) for x in theirs()]) for ours, theirs in filter(None, pairs)]
    line = Line(
        case=case.name, framework=case.framework, implementation=sides.implementation, peer=peer,
        shape=case.shape, error=max(errors, key=lambda e: (e != e, e)), tolerance=case.tolerance,
    )  # fmt: skip
    if not line.agrees:
        return line
    step = alternate(*sides.step, repeats) if sides.step else None
    return dataclasses.replace(line, forward=alternate(*sides.forward, repeats), step=step)
