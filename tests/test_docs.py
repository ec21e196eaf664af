"""Every page of the docs: its blocks run, its outputs are what is printed, its tables are true."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnspan as asp
from attnspan.implementations import IMPLEMENTATIONS
from tests import pages

DOCS = pages.DOCS
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
WITH_BLOCKS = [name for name, text in PAGES.items() if pages.BLOCK.search(text)]


def names_after(name: str) -> dict[str, Any]:
    """Run a page; its outputs must be those that stand there. Gives the names it made."""
    for package in pages.needs(PAGES[name]):
        pytest.importorskip(package)
    now, names = pages.run(PAGES[name], name)
    shown = [match["shown"] for match in pages.BLOCK.finditer(PAGES[name])]
    printed = [match["shown"] for match in pages.BLOCK.finditer(now)]
    assert printed == shown
    assert now == PAGES[name]
    return names


@pytest.mark.parametrize("name", [name for name in WITH_BLOCKS if name != "choose"])
def test_the_blocks_run_and_print_what_stands_there(name: str) -> None:
    names_after(name)


def test_the_harness_can_fail() -> None:
    page = "```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n"
    assert pages.run(page, "right") == (page, pages.run(page, "right")[1])
    assert pages.run(page.replace("\n1\n", "\n2\n"), "wrong")[0] == page
    unshown = "```python\nprint(1)\n```\n"
    assert pages.run(unshown, "unshown")[0] != unshown
    with pytest.raises(ZeroDivisionError):
        pages.run("```python\n1 / 0\n```\n", "error")


# --- I have X, use Y ---------------------------------------------------------------------------


def table_rows(text: str, last: str) -> list[tuple[str, str, str]]:
    """List (what one has, the code to write, the code of the last column) of the tables that end so."""
    rows = []
    for block in re.findall(rf"^\|[^\n]*\| {last} \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE):
        for line in block.splitlines():
            cells = [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            codes = [re.findall(r"`([^`]+)`", cell) for cell in cells[1:]]
            assert all(codes), line
            rows.append((cells[0], codes[0][0], codes[1][0]))
    return rows


def test_every_row_of_the_choice_is_true() -> None:
    names = names_after("choose")
    B, H, L, S = (names[n] for n in "BHLS")
    masks = table_rows(PAGES["choose"], "query i sees key j where")
    assert len(masks) > 35
    for have, code, rule in masks:
        mask = eval(code, names).with_align("top_left")
        seen = np.broadcast_to(mask.dense(L, S), (B, H, L, S))
        for b, h, i, j in product(range(B), range(H), range(L), range(S)):
            right = bool(eval(rule, names | {"b": b, "h": h, "i": i, "j": j}))
            assert seen[b, h, i, j] == right, (have, code, rule, (b, h, i, j))
    scores = table_rows(PAGES["choose"], "score")
    assert len(scores) > 7
    q, k = np.random.default_rng(1).standard_normal((2, names["D"]))
    for have, code, formula in scores:
        score = eval(code, names)
        key = k[:2] if re.search(r"\bc\b", formula) else k
        right = eval(formula, names | {"q": q, "k": key, "c": key})
        x, y = q[None, None], key[None, None]
        lse = asp.inspect(x, y, y, score=score).lse
        assert lse.item() == pytest.approx(right, rel=1e-12), (have, code)


def test_every_implementation_has_its_row() -> None:
    part = PAGES["choose"].split("## Implementations")[1]
    assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == [one.name for one in IMPLEMENTATIONS]


# --- the case table ----------------------------------------------------------------------------


def test_the_case_table_and_the_tests_name_the_same_cases() -> None:
    tested: dict[str, str] = {}
    for path in sorted((DOCS.parent / "tests").rglob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for number in re.findall(r"(?:\b|_)[Bb](\d\d)(?=\b|_)", path.read_text(encoding="utf-8")):
            tested.setdefault(f"B{number}", path.name)
    listed = re.findall(r"^\| (B\d\d) \|", PAGES["cases"], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert sorted(set(tested) - set(listed)) == []
    assert sorted(set(listed) - set(tested)) == []


# --- the reference -----------------------------------------------------------------------------

PUBLIC = (
    "attnspan", "attnspan.masks", "attnspan.scores", "attnspan.biases", "attnspan.statistics",
    "attnspan.oracle", "attnspan.plots", "attnspan.torch", "attnspan.jax",
)  # fmt: skip


def test_everything_public_is_documented_once() -> None:
    for package in ("torch", "jax", "flax"):
        pytest.importorskip(package)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    documented = re.findall(
        r"^\.\. auto(?:function|class|exception|method):: (attnspan[\w.]*)$", text, re.MULTILINE
    )
    found = [_named(name) for name in documented]
    assert len(found) == len({id(x) for x in found}), "once"
    for place in PUBLIC:
        module = sys.modules.get(place) or __import__(place, fromlist=["*"])
        for name in module.__all__:
            one = getattr(module, name)
            assert any(one is x for x in found), f"{place}.{name} stands on no page of docs/api"
            if one.__doc__ and inspect.isclass(one):
                assert one.__doc__.strip()


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except ImportError:
        return getattr(_named(module), name)


# --- the whole ---------------------------------------------------------------------------------


def test_the_house_stands_as_contributing_says() -> None:
    root = DOCS.parent
    house = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The house")[1].split("\n\n")[1]
    places = re.findall(r"`([\w/]+(?:\.py|/))`", house)
    assert len(places) > 20
    for place in places:
        assert any((base / place).exists() for base in (root, root / "src/attnspan")), place


def test_links_between_pages_lead_to_files() -> None:
    for path in [*DOCS.rglob("*.md"), DOCS.parent / "CONTRIBUTING.md"]:
        if "_build" in path.parts:
            continue
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.sweep  # .ci/run builds them too
def test_sphinx_builds_without_a_warning(tmp_path: Path) -> None:
    if find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-n",
        str(DOCS),
        str(tmp_path / "html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    fetched = re.compile(r"""(?:<script|<link|<img|<iframe)[^>]*(?:src|href)=["'](?:https?:)?//""")
    for page in (tmp_path / "html").rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), f"{page.name} fetches from elsewhere"
