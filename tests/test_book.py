"""The textbook section: every printed value comes out, and a wrong one is noticed."""

from __future__ import annotations

import argparse
import importlib
import re
from dataclasses import FrozenInstanceError, replace
from functools import cache
from html.parser import HTMLParser
from math import log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnspan import book
from attnspan.book import additive, causal
from attnspan.book.frameworks import FRAMEWORKS, find
from attnspan.book.record import Check, Record, holds, near, printed, printed_rows
from attnspan.book.report import write_report
from attnspan.cli import book as command
from attnspan.errors import ArgumentError, MissingDependencyError
from tests import fresh

NAMES = [framework.name for framework in FRAMEWORKS]


def need(framework: str) -> None:
    """Skip, with the reason, where a framework or matplotlib is missing."""
    for package in (*find(framework).packages, "matplotlib"):
        pytest.importorskip(package)


@cache
def record_of(name: str, framework: str) -> Record:
    return book.run(name, framework)


def arguments(*words: str, out: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args([*words, "--out", str(out)])


# --- the section itself ------------------------------------------------------------------------


@pytest.mark.parametrize("framework", NAMES)
@pytest.mark.parametrize("name", book.EXPERIMENTS)
def test_every_experiment_comes_out(name: str, framework: str) -> None:
    need(framework)
    record = record_of(name, framework)
    assert [check for check in record.checks if not check.ok] == []
    assert record.ok and record.checks
    assert (record.name, record.framework) == (name, framework)
    assert record.claim.endswith(".") and all(picture.caption for picture in record.pictures)


def test_every_system_and_printed_value_is_covered() -> None:
    covered = " ".join(experiment.covers for experiment in book.EXPERIMENTS.values())
    assert re.findall(r"S\d+", covered) == [f"S{i}" for i in range(1, 10)]
    assert re.findall(r"P\d", covered) == [f"P{i}" for i in range(1, 9)]


def test_every_file_with_an_experiment_is_listed() -> None:
    folder = Path(book.__file__).parent
    files = {file.stem for file in folder.glob("*.py") if "\nEXPERIMENT = " in file.read_text()}
    listed = {experiment.measure.__module__.split(".")[-1] for experiment in book.EXPERIMENTS.values()}
    assert files == listed


PRINTED = {
    "torch": {"P1": 2 * 8, "P2": 3 * 2, "P3": 4 * 4, "P8": 3 * 6},
    "jax": {"P2": 3 * 2, "P3": 8 * 4, "P8": 3 * 6},
}


@pytest.mark.parametrize("framework", NAMES)
def test_every_printed_number_stands_beside_ours(framework: str) -> None:
    need(framework)
    for value, count in PRINTED[framework].items():
        experiments = [e for e in book.EXPERIMENTS.values() if value in e.covers]
        checks = [c for e in experiments for c in record_of(e.name, framework).checks]
        numbers = [c.book for c in checks if c.name.startswith(value) and is_table(c)]
        assert sum(len(text.split()) for text in numbers) == count, value


def is_table(check: Check) -> bool:
    """Tell a row of printed digits from a statement."""
    return (
        check.tolerance is not None and len(check.book.split()) > 1 and "entropy, smallest" not in check.name
    )


@pytest.mark.parametrize("framework", NAMES)
def test_the_frameworks_random_state_is_left_alone(framework: str) -> None:
    need(framework)
    if framework == "torch":
        import torch

        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        book.run("causal", "torch")
        assert torch.equal(torch.rand(3), expected)
    else:
        import jax

        with jax.enable_x64(True):
            assert book.run("additive", "jax").ok  # the draws are float32 whatever the setting


def test_the_experiments_do_not_import_the_other_framework() -> None:
    need("torch")
    need("jax")
    for name in NAMES:
        (other,) = set(NAMES) - {name}
        code = f"from attnspan import book\nprint(book.run('dot-product', {name!r}).ok)"
        assert fresh.output(code, missing={other}).strip() == "True"


# --- attention_stats ---------------------------------------------------------------------------


def test_attention_stats_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    attention_stats = importlib.import_module("attnspan.book.torch").attention_stats
    torch.manual_seed(0)
    entropy, norm = attention_stats(16, num_keys=5, num_queries=40, scaled=False)
    torch.manual_seed(0)
    queries, keys = torch.randn(40, 16), torch.randn(40, 5, 16)
    weights = torch.einsum("ld,lsd->ls", queries, keys).softmax(-1).double().numpy()
    assert (entropy, norm) == pytest.approx(by_definition(weights), rel=1e-4)
    assert attention_stats(4)[0] < log(64)


def test_attention_stats_in_jax() -> None:
    jax = pytest.importorskip("jax")
    attention_stats = importlib.import_module("attnspan.book.jax").attention_stats
    first, second = attention_stats(8, seed=0), attention_stats(8, seed=1)
    assert first == attention_stats(8) != second
    key_q, key_k = jax.random.split(jax.random.key(0))
    queries = jax.random.normal(key_q, (256, 8))
    keys = jax.random.normal(key_k, (256, 64, 8))
    scores = np.einsum("ld,lsd->ls", np.asarray(queries, float), np.asarray(keys, float)) / 8**0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert first == pytest.approx(by_definition(weights), rel=1e-4)


def by_definition(weights: np.ndarray) -> tuple[float, float]:
    """Compute both statistics from the matrix diag(α) − ααᵀ itself."""
    entropy = -(weights * np.log(weights + 1e-12)).sum(-1).mean()
    norms = [np.linalg.norm(np.diag(row) - np.outer(row, row)) for row in weights]
    return float(entropy), float(np.mean(norms))


# --- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ours", "ok"),
    [
        ("0.259", 0.2594, True),
        ("0.259", 0.2586, True),
        ("0.259", 0.2596, False),
        (".1692 .1612", [0.16915, 0.16125], True),
        (".1692 .1612", [0.16915, 0.1613], False),
        ("0", 0.0, True),
        ("0", 1e-9, False),
        ("1", 1.0, True),
        (".13390937", 0.1339100, True),
        (".13390937", 0.1339110, False),
        ("0.2", nan, False),
    ],
)
def test_a_printed_number_asks_for_half_a_unit_of_its_last_digit(text: str, ours: Any, ok: bool) -> None:
    check = printed("value", text, ours)
    assert check.ok is ok
    assert len(check.book.split()) == len(check.ours.split()) == len(text.split())


def test_a_tiny_weight_is_not_shown_as_a_zero() -> None:
    assert printed("value", "0", 1e-9).ours == "1e-09"


@pytest.mark.parametrize("text", ["1 2 3", "1"])
def test_as_many_numbers_as_printed(text: str) -> None:
    with pytest.raises(ArgumentError, match="as many as printed"):
        printed("value", text, [1.0, 2.0])
    with pytest.raises(ArgumentError, match="2 rows, needed 1, as many as printed"):
        printed_rows("value", "1 2", [[1.0, 2.0], [1.0, 2.0]])


def test_near_and_holds() -> None:
    assert near("sums", 1.0, np.ones(9), 0.0) == Check("sums", "1", "1", 0.0, 0.0, True)
    assert not near("sums", 1.0, [1.0, nan], 1e-6).ok
    assert near("weights", [1.0], [1.5], 0.1, book="the same weights").ours == "not the same"
    assert holds("grid", "2", 2, np.bool_(True)).ok is True


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        near("sums", 1.0, 1.0, 0.0).ok = False  # type: ignore[misc]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="name: given 'entropie', needed one of scores, entropy"):
        book.run("entropie", "torch")
    with pytest.raises(ArgumentError, match="framework: given tensorflow, needed 'torch' or 'jax'"):
        book.run("entropy", "tensorflow")


def test_a_missing_framework_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnspan.book.frameworks.is_installed", lambda package: package != "flax")
    with pytest.raises(MissingDependencyError, match=r'JAX needs flax: pip install "attnspan\[jax\]"'):
        book.run("causal", "jax")
    assert [framework.name for framework in book.installed()] == ["torch"]


@pytest.mark.parametrize("name", NAMES)
def test_its_function_says_what_is_missing_too(name: str) -> None:
    done = fresh.run(f"from attnspan.book.{name} import attention_stats", missing={name})
    assert f'needs {name}: pip install "attnspan[{name}]"' in done.stderr


# --- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", NAMES)
def test_the_command_prints_both_sides_and_writes_the_report(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(framework)
    assert command.run(arguments("P8", "causal", "--framework", framework, out=tmp_path / "new")) == 0
    said = capsys.readouterr()
    first = additive.WEIGHTS[framework].split()[0]
    assert said.out.count(f"0{first}") == 2  # the book's, and ours
    assert "agrees   P4 row sums" in said.out
    assert "DIFFERS" not in said.out
    assert re.search(r"(\d+) of \1 checks agree, in \d+ s", said.out)
    assert said.err.splitlines()[-1].startswith("[2/2] additive in ")
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == [f"additive-{framework}-1.png", f"causal-{framework}-1.png", "report.html"]


def test_a_wrong_value_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("torch")
    wrong = additive.WEIGHTS["torch"].replace(".2188", ".2190")
    monkeypatch.setitem(additive.WEIGHTS, "torch", wrong)
    assert command.run(arguments("additive", "--framework", "torch", out=tmp_path)) == 1
    said = capsys.readouterr().out
    assert "DIFFERS  P8, row 2" in said
    assert "0.2190" in said and "0.2188" in said
    assert "differs: additive in torch: P8, row 2" in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "1 of 5 checks differ from the book." in page
    assert page.count('class="differs"') == 1


def test_an_experiment_that_fails_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("torch")

    def broken(framework: str) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setitem(book.EXPERIMENTS, "causal", replace(causal.EXPERIMENT, measure=broken))
    assert command.run(arguments("causal", "additive", "--framework", "torch", out=tmp_path)) == 1
    said = capsys.readouterr()
    assert "failed: causal in PyTorch: RuntimeError: no such luck" in said.out
    assert "agrees   P8, row 0" in said.out
    assert "Traceback" in said.err


def test_the_list_names_every_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments("--list", out=tmp_path / "none")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(book.EXPERIMENTS)
    assert not (tmp_path / "none").exists()


def test_an_unknown_experiment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments("S77", out=tmp_path)) == 2
    assert "no experiment 'S77'; there are scores, entropy" in capsys.readouterr().err


RUN = "from attnspan.cli import main\nraise SystemExit(main(['book', *{words!r}]))"


@pytest.mark.parametrize(
    ("words", "missing", "said"),
    [
        ([], ["torch", "jax"], "neither PyTorch nor JAX is installed here: pip install"),
        (["--framework", "jax"], ["flax"], 'JAX needs flax: pip install "attnspan[jax]"'),
        ([], ["matplotlib"], 'figures need matplotlib: pip install "attnspan[plot]"'),
    ],
)
def test_nothing_to_run_with_is_status_2(words: list[str], missing: list[str], said: str) -> None:
    done = fresh.run(RUN.format(words=words), missing=missing)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_listing_needs_no_framework() -> None:
    done = fresh.output(RUN.format(words=["--list"]), missing=["torch", "jax", "flax", "matplotlib"])
    assert done.startswith("scores")


def test_all_means_every_framework_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnspan.book.frameworks.is_installed", lambda package: package != "flax")
    assert [framework.name for framework in command._frameworks("all")] == ["torch"]


class Terminal:
    """A stderr that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_on_a_terminal_the_progress_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = command._Progress(2)
    progress.step("one")
    progress.clear()
    assert terminal.text == "\r\033[K[1/2] one …\r\033[K"


# --- the report --------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what the tests ask about, and checks that tags close in order."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_report_stands_alone_and_is_accessible(tmp_path: Path) -> None:
    records = [
        record_of(name, framework.name)
        for name in ("causal", "composite", "additive")
        for framework in FRAMEWORKS
        if not framework.missing()
    ]
    pytest.importorskip("matplotlib")
    if not records:
        pytest.skip("no framework is installed")
    text = write_report(records, tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    images = page.all("img")
    assert len(images) == sum(len(record.pictures) for record in records)
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in images)
    assert all(len(image["alt"] or "") > 20 for image in images)
    assert page.all("html") == [{"lang": "en"}]
    assert not page.all("script") and not page.all("link")
    outside = re.sub(r"data:[^\"]*", "", text)
    assert "http" not in outside and "url(" not in outside and "@import" not in outside
    ids = {section["id"] for section in page.all("section")}
    assert {(a["href"] or "")[1:] for a in page.all("a")} == ids
    assert "prefers-color-scheme: dark" in text
    assert text.count("✓") >= sum(len(record.checks) for record in records)
    assert str(tmp_path) not in text and str(Path.home()) not in outside
