"""One HTML page and a folder of figures from the records of a run."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import platform
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path

from attnspan.book.frameworks import find
from attnspan.book.record import Check, Picture, Record

__all__ = ["counts", "write_report"]

DPI = 160


def write_report(records: Sequence[Record], folder: Path) -> Path:
    """Write every figure as a PNG, and ``report.html``, which needs no other file.

    Parameters
    ----------
    records : sequence of Record
        Outcomes, in the order of the experiments; frameworks of one experiment side by side.
    folder : Path
        Where to; made if it isn't there. Files of the same names are replaced.

    Returns
    -------
    Path
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images: dict[int, bytes] = {}
    for record in records:
        for i, picture in enumerate(record.pictures, start=1):
            buffer = io.BytesIO()
            picture.figure.savefig(buffer, format="png", dpi=DPI)
            images[id(picture)] = buffer.getvalue()
            path = folder / f"{record.name}-{record.framework}-{i}.png"
            path.write_bytes(images[id(picture)])
    page = folder / "report.html"
    page.write_text(_page(records, images), encoding="utf-8")
    return page


def counts(records: Sequence[Record]) -> tuple[int, int]:
    """Count the checks that agree, and all of them."""
    checks = [check for record in records for check in record.checks]
    return sum(check.ok for check in checks), len(checks)


def _page(records: Sequence[Record], images: dict[int, bytes]) -> str:
    names = list(dict.fromkeys(record.name for record in records))
    good, total = counts(records)
    headline = (
        f"All {total} checks agree with the book."
        if good == total
        else f"{total - good} of {total} checks differ from the book."
    )
    groups = [[record for record in records if record.name == name] for name in names]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>attnspan book: {escape(headline)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="kicker">attnspan book</p>
<h1>Attention scores and masks, checked</h1>
<p class="headline {"good" if good == total else "bad"}">{escape(headline)}</p>
<p class="quiet">{escape(_environment(records))}</p>
</header>
<nav aria-label="Experiments">
{_overview(groups)}
</nav>
<main>
{"".join(_section(group, images) for group in groups)}</main>
<footer class="quiet">
<p>A printed number agrees if ours is within half a unit of its last printed digit; float32 sums taken
in another order are granted 0.000001 on top, and a printed 0 or 1 must be met exactly.</p>
</footer>
</body>
</html>
"""


def _environment(records: Sequence[Record]) -> str:
    """Name what ran: versions only, nothing about the machine's files."""
    parts = []
    for name in dict.fromkeys(record.framework for record in records):
        version = import_module(name).__version__
        parts.append(f"{find(name).label} {version}")
    try:
        parts.insert(0, f"attnspan {importlib.metadata.version('attnspan')}")
    except importlib.metadata.PackageNotFoundError:
        parts.insert(0, "attnspan, not installed")
    parts += [f"Python {platform.python_version()}", f"{platform.system()} {platform.machine()}"]
    return " · ".join(parts)


def _overview(groups: list[list[Record]]) -> str:
    rows = []
    for group in groups:
        first = group[0]
        states = "".join(f"<td>{_tally(record)}</td>" for record in group)
        rows.append(
            f'<tr><th scope="row"><a href="#{first.name}">{escape(first.title)}</a></th>'
            f'<td class="quiet">{escape(first.covers)}</td>{states}</tr>'
        )
    labels = dict.fromkeys(find(record.framework).label for group in groups for record in group)
    heads = "".join(f'<th scope="col">{escape(label)}</th>' for label in labels)
    return (
        '<table class="overview"><thead><tr><th scope="col">Experiment</th>'
        f'<th scope="col">Covers</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _tally(record: Record) -> str:
    good, total = counts([record])
    return _verdict(good == total, f"{good} of {total}")


def _verdict(ok: bool, text: str) -> str:
    mark, kind = ("✓", "good") if ok else ("✗", "bad")
    return f'<span class="verdict {kind}"><span aria-hidden="true">{mark}</span> {escape(text)}</span>'


def _section(group: list[Record], images: dict[int, bytes]) -> str:
    first = group[0]
    parts = [
        f'<section id="{first.name}">',
        f"<h2>{escape(first.title)} <small>{escape(first.covers)}</small></h2>",
        f'<p class="claim">{escape(first.claim)}</p>',
    ]
    for record in group:
        parts.append(f"<h3>{escape(find(record.framework).label)}</h3>")
        if record.pictures:
            figures = "".join(_figure(picture, images[id(picture)]) for picture in record.pictures)
            parts.append(f'<div class="figures">{figures}</div>')
        rows = "".join(_row(check) for check in record.checks)
        parts.append(
            f'<div class="wide"><table class="checks"><caption>{escape(first.title)}: checks in '
            f"{escape(find(record.framework).label)}</caption><thead><tr>"
            '<th scope="col">What</th><th scope="col">Book</th><th scope="col">Here</th>'
            '<th scope="col">Apart</th><th scope="col">Allowed</th><th scope="col">Verdict</th>'
            f"</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    return "\n".join([*parts, "</section>\n"])


def _figure(picture: Picture, image: bytes) -> str:
    width, _ = picture.figure.get_size_inches()
    data = base64.b64encode(image).decode("ascii")
    caption = escape(picture.caption, quote=True)
    return (
        f'<figure style="max-width:{96 * width:.0f}px"><img alt="{caption}" '
        f'src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def _row(check: Check) -> str:
    apart = "" if check.difference is None else f"{check.difference:.1e}"
    if check.difference == 0:
        apart = "0"
    allowed = "" if check.tolerance is None else f"{check.tolerance:.1e}" if check.tolerance else "0"
    kind = "" if check.ok else ' class="differs"'
    return (
        f'<tr{kind}><th scope="row">{escape(check.name)}</th>'
        f'<td class="value">{escape(check.book)}</td><td class="value">{escape(check.ours)}</td>'
        f'<td class="number">{apart}</td><td class="number">{allowed}</td>'
        f"<td>{_verdict(check.ok, 'agrees' if check.ok else 'differs')}</td></tr>"
    )
