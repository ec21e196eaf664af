"""`attnspan bench`: what it writes, what it refuses, and that sides which disagree get no ratio."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnspan import cli
from attnspan.bench import measure, report, sides
from attnspan.bench.cases import CASES, LENGTHS, Case, read_lengths
from attnspan.errors import ArgumentError
from attnspan.plots.host import to_host
from tests import fresh

BENCH = "from attnspan.cli import main; raise SystemExit(main(['bench', 'dot', {}]))"
MASKED = {"jax": ("none", "causal", "window"), "torch": ("none", "causal", "window", "documents", "padded")}


def refused(*arguments: str, missing: list[str]) -> str:
    """Give what the command says on stderr when it fails without some packages."""
    done = fresh.run(BENCH.format(", ".join(map(repr, arguments))), missing=missing)
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_one_small_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    written, drawn = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--quick", "--case", "tiny", "--framework", "torch", "--repeats", "2"]
    assert cli.main(["bench", "dot", *options, "--json", str(written), "--plot", str(drawn)]) == 0
    said = capsys.readouterr()
    assert "[1/1] tiny against sdpa" in said.err
    assert "ratio = peer / ours" in said.out and "| tiny (1, 1, 4, 8) |" in said.out
    assert "DISAGREES" not in said.out
    found = json.loads(written.read_text())
    (line,) = found["lines"]
    assert line["agrees"] and line["error"] <= line["tolerance"]
    for times in (line["forward"], line["step"]):
        assert len(times["ours"]) == len(times["peer"]) == 2
        assert min(*times["ours"], *times["peer"]) > 0
    assert found["threads"] >= 1 and found["versions"]["torch"] and found["machine"] in said.out
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("framework", "mask", "peer"),
    [
        (framework, mask, peer)
        for framework, peers in (("torch", ("sdpa",)), ("jax", ("jax.nn", "formula")))
        for mask in MASKED[framework]
        for peer in peers
    ],
)
def test_both_sides_compute_the_same(framework: str, mask: str, peer: str) -> None:
    pytest.importorskip(framework)
    case = Case("small", framework, (2, 2, 300, 8), mask=mask)  # longer than the window
    both = sides.build(case, peer, (64, 300))
    for pair in (both.forward, both.step):
        assert pair is not None
        ours, theirs = (call() for call in pair)
        assert measure.apart(ours, [both.back(x) for x in theirs]) < case.tolerance


@pytest.mark.parametrize("name", ["dropout", "bfloat16", "float16-causal", "textbook", "statistics"])
def test_the_special_cases_build_and_run(name: str) -> None:
    pytest.importorskip("torch")
    case = next(case for case in CASES if case.name == name)
    case = dataclasses.replace(case, shape=(*case.shape[:-2], 20, 8))
    for peer in case.peers:
        both = sides.build(dataclasses.replace(case, dropout=0.0), peer, LENGTHS)
        assert both.step is not None
        ours, theirs = (call() for call in both.step)
        assert measure.apart(ours, theirs) < case.tolerance
        for call in sides.build(case, peer, LENGTHS).forward:
            assert np.isfinite(to_host(call()[0])).all()


def test_sides_that_disagree_get_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    build = sides.build

    def wrong(*arguments: Any) -> sides.Sides:
        both = build(*arguments)
        ours, theirs = both.forward
        return dataclasses.replace(both, forward=(ours, lambda: (theirs()[0] + 1e-2,)))

    monkeypatch.setattr(sides, "build", wrong)
    assert cli.main(["bench", "dot", "--case", "tiny", "--repeats", "1"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert "| - | - | - | - | DISAGREES:" in line


@pytest.mark.parametrize("side", [0, 1])
def test_nan_never_agrees(side: int) -> None:
    both = [np.ones(3, np.float32), np.ones(3, np.float32)]
    both[side][1] = np.nan
    error = measure.apart([both[0]], [both[1]])
    line = report.Line("case", "torch", "native", "sdpa", (3,), error, 1e-4)
    assert not line.agrees
    assert report.plain({}, [line], [], [])["lines"][0]["error"] is None


def test_a_wrong_shape_never_agrees() -> None:
    one = np.ones((2, 3), np.float32)
    assert np.isnan(measure.apart([one], [one[:1]]))


def test_readings_alternate() -> None:
    order: list[str] = []
    times = measure.alternate(lambda: order.append("ours"), lambda: order.append("peer"), 3)
    assert len(times.ours) == len(times.peer) == 3
    assert order[0] == "ours" and order[-1] == "peer"
    turns = [name for name, before in zip(order[1:], order, strict=False) if name != before]
    assert turns == ["peer", "ours"] * (len(turns) // 2) + ["peer"] * (len(turns) % 2)
    assert measure.Times(ours=(2.0, 4.0), peer=(5.0, 3.0)).ratio == 1.5


def test_memory_is_measured_in_a_fresh_process() -> None:
    pytest.importorskip("torch")
    code = """
from attnspan.bench import memory, report
memory.LINES = {"small": ((1, 2, 512, 64), "causal")}
found = memory.measure("torch", "small")
assert found["seconds"] > 0 and found["extra_bytes"] >= 0, found
print(report.memory_table([found]))
"""
    assert "| small (1, 2, 512, 64) |" in fresh.output(code)


@pytest.mark.parametrize(
    ("arguments", "missing", "said"),
    [
        (["--framework", "torch"], ["torch", "array_api_compat"], 'pip install "attnspan[torch]"'),
        (["--case", "jax-dense"], ["jax", "jaxlib", "flax"], 'pip install "attnspan[jax]"'),
        ([], ["torch", "array_api_compat", "jax", "jaxlib", "flax"], 'pip install "attnspan[torch]"'),
        (["--case", "tiny", "--plot", "x.png"], ["matplotlib"], 'pip install "attnspan[plot]"'),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    arguments: list[str], missing: list[str], said: str
) -> None:
    error = refused(*arguments, missing=missing)
    assert error.startswith("attnspan bench: ") and said in error


def test_lengths_of_a_file_are_clipped(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([3, 100, 9999, *[200] * 20]))
    assert read_lengths(file) == (64, 100, 512, *[200] * 13)
    assert read_lengths(None) == LENGTHS and len(LENGTHS) == 16


@pytest.mark.parametrize("text", [None, "{", '{"a": [1]}', "[1, 2]", json.dumps([1.5] * 16)])
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "lengths.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ArgumentError, match=r"--lengths: given .*lengths\.json.*needed a JSON list"):
        read_lengths(file)


@pytest.mark.parametrize("arguments", [["--case", "frob"], ["--repeats", "0"], ["--framework", "numpy"]])
def test_a_wrong_argument_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "dot", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_case_of_the_other_framework_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    assert cli.main(["bench", "dot", "--case", "tiny", "--framework", "jax"]) == 2
    assert "none of tiny is for jax" in capsys.readouterr().err
