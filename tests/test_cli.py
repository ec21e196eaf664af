"""The command line: what it lists, what it refuses, and what the doctor sees."""

from __future__ import annotations

import argparse
import json
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import attnspan
from attnspan import cli
from attnspan.cli import doctor
from attnspan.errors import ArgumentError
from tests import fresh

DOCTOR = "from attnspan.cli import main; raise SystemExit(main(['doctor', '--json']))"
FILES = {file.stem for file in Path(cli.__file__).parent.glob("*.py")} - {"__init__"}


def examine(**options: Any) -> dict[str, Any]:
    """Give the doctor's report in a fresh process."""
    return json.loads(fresh.output(DOCTOR, **options))


# --- the front door ----------------------------------------------------------------------------


def test_every_file_is_a_listed_command() -> None:
    assert set(cli.COMMANDS) == FILES


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_keeps_the_contract(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = __import__(f"attnspan.cli.{name}", fromlist=["HELP"])
    assert command.HELP
    assert "\n" not in command.HELP
    assert cli.main([name, "--help"]) == 0
    assert f"usage: attnspan {name}" in capsys.readouterr().out


def test_help_lists_each_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in cli.COMMANDS:
        command = __import__(f"attnspan.cli.{name}", fromlist=["HELP"])
        assert f"{name} {command.HELP}" in text


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnspan {attnspan.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["docter"], ["--frob"]])
def test_a_wrong_call_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert doctor.HELP in " ".join(said.err.split())
    assert all(argument in said.err for argument in arguments)


def test_a_wrong_argument_of_a_command_shows_that_commands_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--frob"]) == 2
    assert "--frob" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: argparse.Namespace) -> int:
        raise ArgumentError("back: given -1, needed 0 or more")

    monkeypatch.setattr(doctor, "run", refuse)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "attnspan doctor: back: given -1, needed 0 or more\n"


# --- the doctor --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    for name in ("torch", "array_api_compat", "jax", "flax", "matplotlib"):
        pytest.importorskip(name)
    return examine()


def test_all_is_well_here(healthy: dict[str, Any]) -> None:
    assert [name for name, entry in healthy["packages"].items() if not entry["ok"]] == []
    for name, entry in healthy["front_ends"].items():
        assert entry["works"], f"{name}: {entry['cause']}"
        assert any("cpu" in device for device in entry["devices"])
    assert healthy["front_ends"]["torch"]["threads"] >= 1
    assert healthy["install"] == []
    assert healthy["attnspan"]["version"] == attnspan.__version__
    assert healthy["machine"]["usable_cores"] <= healthy["machine"]["cores"]


def test_every_implementation_is_named(healthy: dict[str, Any]) -> None:
    folder = Path(attnspan.__file__).parent / "implementations"
    names = {entry["name"] for entry in healthy["implementations"]}
    rooms = {room.stem for room in folder.iterdir() if room.name != "__pycache__"}
    assert names == rooms - {"__init__", "base", "bounded"}
    for entry in healthy["implementations"]:
        assert entry["available"] == (entry["cause"] is None)


def test_the_ranges_are_those_of_pyproject(healthy: dict[str, Any]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    for name, entry in healthy["packages"].items():
        if name != "jaxlib":  # jax says which jaxlib it takes
            assert name + entry["needed"] in stated, "pyproject.toml has changed: pip install -e . again"


def test_the_text_says_what_the_json_says(healthy: dict[str, Any]) -> None:
    text = doctor._text(healthy)
    for entry in healthy["implementations"]:
        assert entry["name"] in text
    for name, entry in healthy["packages"].items():
        assert f"{name:17} {entry['version']}" in text
    assert text.count("works; ") == 3
    assert "to get the rest" not in text


def test_a_missing_framework_is_named_with_the_way_to_get_it() -> None:
    found = examine(missing=["jax", "jaxlib", "flax", "torch", "array_api_compat", "matplotlib"])
    assert found["packages"]["jax"]["cause"] == "not installed"
    assert found["front_ends"]["numpy"]["works"], found["front_ends"]["numpy"]["cause"]
    for name in ("torch", "jax"):
        entry = found["front_ends"][name]
        assert not entry["works"]
        assert entry["cause"] == f"{name}: not installed"
        assert entry["fix"] == f'pip install "attnspan[{name}]"'
    assert found["install"] == [f'pip install "attnspan[{extra}]"' for extra in ("torch", "jax", "plot")]
    for entry in found["implementations"]:
        if entry["name"] == "sdpa":  # PyTorch's own kernel
            assert not entry["available"]
            assert "torch: not installed" in entry["cause"]
        if entry["name"] == "eager":
            assert entry["serves"] == ["numpy"]
    text = doctor._text(found)
    assert "does not work: torch: not installed" in text
    assert "not available: numpy: the arrays are NumPy's, not PyTorch's; torch: not installed" in text
    assert 'to get the rest\n  pip install "attnspan[torch]"' in text


def test_a_broken_import_shows_its_cause() -> None:
    said = "libfoo.so.1: cannot open shared object file"
    found = examine(broken={"torch": said}, missing=["jax", "jaxlib", "flax"])
    entry = found["front_ends"]["torch"]
    assert entry["cause"] == f"torch: failed to import: OSError: {said}"
    assert entry["fix"] == "pip install --force-reinstall --no-deps torch"


def test_a_dependency_missing_inside_a_package_is_not_called_a_missing_package() -> None:
    pytest.importorskip("jax")
    found = examine(missing=["ml_dtypes", "torch"])
    assert found["packages"]["jax"]["cause"] == (
        "failed to import: ModuleNotFoundError: No module named 'ml_dtypes'"
    )


def test_a_version_outside_the_range_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "1.26.4")
    entry = doctor._package("numpy", None, ">=2")
    assert not entry["ok"]
    assert entry["cause"] == "1.26.4 is outside the range >=2"
    assert entry["fix"] == 'pip install "numpy>=2"'


@pytest.mark.parametrize(
    ("version", "needed", "inside"),
    [
        ("2", ">=2", True),
        ("2.0.0", ">=2", True),
        ("1.26.4", ">=2", False),
        ("2.13.0+cpu", ">=2.6,<2.15", True),
        ("2.15.0", ">=2.6,<2.15", False),
        ("2.14.9.dev1", "<2.15,>=2.6", True),
        ("0.10.2", ">=0.10,<0.11", True),
        ("0.9.9", ">=0.10,<0.11", False),
        ("3", ">3", False),
        ("3.0", "<=3", True),
    ],
)
def test_ranges_compare_numbers(version: str, needed: str, inside: bool) -> None:
    assert doctor._within(version, needed) is inside


# --- the native core -----------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["attnspan._native"] = None  # as if it had not been compiled
"""
BROKEN = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "attnspan._native":
            raise ImportError("_native.so: undefined symbol: frob")
sys.meta_path.insert(0, Broken())
"""


def test_the_native_core_is_tried(healthy: dict[str, Any]) -> None:
    found, text = healthy["native"], doctor._text(healthy)
    if found["works"]:
        assert found["serves"] == ["numpy", "torch", "jax"]
        assert found["isa"] in found["isas"] and found["kernel_isa"] in found["isas"]
        assert f"works for numpy, torch, jax; instruction set {found['isa']}" in text
    else:
        assert found["cause"] in text and found["fix"] in text


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (WITHOUT, "it did not compile when attnspan was installed"),
        (BROKEN, "the native core does not load: _native.so: undefined symbol: frob"),
    ],
)
def test_without_the_native_core_the_cause_and_the_compiler_are_said(before: str, cause: str) -> None:
    found = json.loads(fresh.output(before + DOCTOR))
    assert not found["native"]["works"]
    assert cause in found["native"]["cause"]
    assert found["native"]["fix"].startswith("ATTNSPAN_NATIVE=require pip install -v")
    assert all(entry["works"] for entry in found["front_ends"].values())
    text = doctor._text(found)
    assert f"not available: {cause}" in text
    assert found["native"]["fix"] in text
    assert f"C++ compiler found now: {found['native']['compiler'] or 'none'}" in text


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ('{"url": "file:///src/my%20span", "dir_info": {"editable": true}}', "-e '/src/my span'"),
        ('{"url": "file:///src/span", "dir_info": {}}', "/src/span"),
        (None, "attnspan"),
    ],
)
def test_the_way_to_compile_it_names_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, url: str | None, origin: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return url

    monkeypatch.setattr(doctor.importlib.metadata, "distribution", lambda name: Installed())
    assert doctor._rebuild().endswith(f" --force-reinstall {origin}")


def test_the_compiler_is_the_one_that_cxx_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor._compiler() is None


def test_a_wrong_instruction_set_is_the_doctors_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("attnspan._native")
    monkeypatch.setenv("ATTNSPAN_ISA", "sse9")
    found = examine()
    assert found["native"]["cause"].startswith("ATTNSPAN_ISA: given sse9, needed")
    assert found["native"]["fix"] is None


def test_a_wrong_answer_is_not_called_working(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr(attnspan, "attention", lambda q, k, v, **_: np.full((1, 1, 2), 0.5))
    entry = doctor._front_end("numpy", {"numpy": {"ok": True}})
    assert not entry["works"]
    assert "gave [[[0.5, 0.5]]]" in entry["cause"]
