"""Imports point one way, and importing attnspan pulls in no framework."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import attnspan
from tests import fresh

SOURCE = Path(attnspan.__file__).parent

# From the bottom up; a file may import from its own layer and from those below it.
LAYERS = (
    {"errors", "arrays", "shapes", "values", "_native"},  # _native is compiled, and imports nothing
    {"statistics"},  # needs arrays alone, so that every implementation may stream it
    {"masks", "scores", "biases"},
    {"native", "softmax", "dropout", "torch_ops", "request", "implementations"},
    {"planner", "repeated"},
    {"attention"},
    {"plots"},
    {"__init__"},  # `import attnspan` itself: the names that a user sees
    {"torch", "jax"},
    {"bench", "book", "cli"},
    {"__main__"},
)
RANK = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
ALONE = "oracle"  # imports nothing of ours, and nothing of ours imports it
# What an implementation may import from its own folder; None is its __init__.
SHARED = {"base", "bounded", None}
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "matplotlib"}


# --- reading imports ---------------------------------------------------------------------------


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("attnspan", *parts))


FILES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


def imports(code: str, module: str, is_package: bool = False) -> list[tuple[int, str]]:
    """List (line, module of ours) for each import, lazy ones included and TYPE_CHECKING ones not.

    `from x import y` counts as x.y where that is a module, else as x; `import_module("x")` counts as x.
    """
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                package = module.split(".")[: len(module.split(".")) - up]
                origin = ".".join([*package, *filter(None, [origin])])
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                found.append((node.lineno, deeper if deeper in FILES else origin))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.JoinedStr):  # f"attnspan.cli.{name}": its constant beginning
                first = first.values[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value.rstrip(".")))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(code))
    return [(line, name) for line, name in found if name.split(".")[0] == "attnspan"]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def leaf(module: str) -> str | None:
    return module.split(".")[2] if module.count(".") > 1 else None


def outside(target: str, module: str) -> bool:
    """Tell whether an implementation's file imports what belongs to another implementation."""
    its_own = module.split(".")[:3]  # a file, or a folder and all that is in it
    return leaf(target) not in SHARED and target.split(".")[:3] != its_own


def wrong_imports(code: str, module: str, is_package: bool = False) -> list[str]:
    """Say what is wrong with each import in one file; empty means that all point down."""
    here = room(module)
    if here not in RANK and here != ALONE:
        return [f"{module}: {here!r} stands in no layer; give it one in {Path(__file__).name}"]
    wrong = []
    for line, target in imports(code, module, is_package):
        there = room(target)
        where = f"{module}, line {line}: {target}"
        if there == ALONE != here:
            wrong.append(f"{where}: nothing imports the oracle")
        elif here == ALONE:
            wrong.append(f"{where}: the oracle imports nothing of ours")
        elif there not in RANK:
            wrong.append(f"{where}: {there!r} stands in no layer")
        elif RANK[there] > RANK[here]:
            wrong.append(f"{where}: {there} stands above {here}")
        elif here == there == "implementations" and not is_package and outside(target, module):
            wrong.append(f"{where}: implementations never import each other")
    return wrong


# --- one way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    file = FILES[module]
    assert wrong_imports(file.read_text(), module, file.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        ("attnspan.masks.base", "import attnspan.attention", "attention stands above masks"),
        ("attnspan.masks.base", "def f():\n from attnspan import planner", "planner stands above masks"),
        ("attnspan.masks.base", "from .. import planner", "planner stands above masks"),
        ("attnspan.masks.base", "from ..planner import choose", "planner stands above masks"),
        ("attnspan.masks", "from ..planner import choose", "planner stands above masks"),
        ("attnspan.scores.dot", "import attnspan as asp", "__init__ stands above scores"),
        ("attnspan.planner", "import_module('attnspan.torch')", "torch stands above planner"),
        ("attnspan.planner", "import_module(f'attnspan.jax.{name}')", "jax stands above planner"),
        ("attnspan.oracle", "from attnspan.errors import refusal", "the oracle imports nothing of ours"),
        ("attnspan.statistics.streaming", "import attnspan.softmax", "softmax stands above statistics"),
        ("attnspan.implementations.eager", "import attnspan.oracle", "nothing imports the oracle"),
        (
            "attnspan.implementations.tiled",
            "from attnspan.implementations.eager import x",
            "never import each other",
        ),
        ("attnspan.cellar", "", "stands in no layer"),
        ("attnspan.planner", "from attnspan.cellar import wine", "stands in no layer"),
    ],
)
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, module: str, code: str, said: str) -> None:
    for name in ("attnspan.planner", "attnspan.attention"):
        monkeypatch.setitem(FILES, name, Path())  # so that the cases hold before those files exist
    found = wrong_imports(code, module, is_package=module == "attnspan.masks")
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("attnspan.masks.base", "if TYPE_CHECKING:\n import attnspan.attention"),
        ("attnspan.masks.base", "if typing.TYPE_CHECKING:\n import attnspan.attention"),
        ("attnspan.masks.base", "from attnspan.errors import refusal"),
        ("attnspan.masks.base", "from . import spans"),
        ("attnspan.planner", "import numpy, torch"),
        ("attnspan.cli.doctor", "import attnspan.torch"),
        ("attnspan.implementations.tiled", "from attnspan.implementations.base import Implementation"),
        ("attnspan.implementations.tiled", "from attnspan.statistics import RunningStatistics"),
    ],
)
def test_the_check_can_pass(module: str, code: str) -> None:
    assert wrong_imports(code, module) == []


def test_the_check_reads_every_file() -> None:
    assert {"attnspan", "attnspan.errors", "attnspan.cli", "attnspan.cli.doctor"} <= FILES.keys()


# --- nothing heavy -----------------------------------------------------------------------------


def frameworks_loaded_by(code: str) -> set[str]:
    listing = f"\nimport sys\nprint(*({FRAMEWORKS!r} & set(sys.modules)))"
    return set(fresh.output(code + listing).split())


@pytest.mark.parametrize(
    "code",
    [
        "import attnspan",
        "from attnspan import attention, inspect, plan, masked_softmax",
        "import attnspan.masks, attnspan.scores, attnspan.biases, attnspan.oracle, attnspan.cli",
        "from attnspan.cli import main; main(['--help']); print()",
    ],
)
def test_importing_pulls_in_no_framework(code: str) -> None:
    if "main" in code:  # its help goes elsewhere, so that the listing stands alone
        code = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}"
    assert frameworks_loaded_by(code) == set()


def test_computing_in_numpy_pulls_in_no_framework() -> None:
    assert frameworks_loaded_by(USE["numpy"].replace("print(", "str(")) == set()


def test_the_framework_check_can_fail() -> None:
    assert frameworks_loaded_by("import attnspan, matplotlib") == {"matplotlib"}


# --- each front end without the others -----------------------------------------------------------

USE = {
    "numpy": """
import numpy as np, attnspan as asp
from attnspan.masks import Causal
x = np.ones((1, 3, 2), np.float32)
print(asp.attention(x, x, x, mask=Causal()).sum())
""",
    "torch": """
import torch, attnspan as asp, attnspan.torch
from attnspan.masks import Causal
x = torch.ones(1, 3, 2, requires_grad=True)
out = asp.attention(x, x, x, mask=Causal()).sum()
out.backward()
layer = attnspan.torch.DotProductAttention(dropout=0.0)
print(out.item())
""",
    "jax": """
import jax, jax.numpy as jnp, attnspan as asp, attnspan.jax
from attnspan.masks import Causal
x = jnp.ones((1, 3, 2))
out, _ = jax.value_and_grad(lambda x: asp.attention(x, x, x, mask=Causal()).sum())(x)
layer = attnspan.jax.DotProductAttention(dropout=0.0)
print(float(out))
""",
}
OWN = {"numpy": set(), "torch": {"torch", "array_api_compat"}, "jax": {"jax", "jaxlib", "flax"}}
OPTIONAL = FRAMEWORKS | {"array_api_compat"}


@pytest.mark.parametrize("name", USE)
def test_each_front_end_works_where_the_others_are_missing(name: str) -> None:
    pytest.importorskip(name)
    assert float(fresh.output(USE[name], missing=OPTIONAL - OWN[name])) == pytest.approx(6.0)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_missing_is_what_the_blocker_makes_it(name: str) -> None:
    done = fresh.run(USE[name], missing={name})
    assert done.returncode != 0
    assert f"No module named '{name}'" in done.stderr


def test_values_made_before_their_library_are_pytrees_once_it_is_used():
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    found = fresh.output(
        "import numpy as np, attnspan as asp\n"
        "from attnspan.masks import ValidLens\n"
        "mask = ValidLens([1, 2])\n"
        "import jax\n"
        "import attnspan.jax\n"
        "print(len(jax.tree.leaves(mask)), type(jax.tree.leaves(mask)[0]).__name__)\n"
        "import torch.utils._pytree as pytree\n"
        "x = np.ones((2, 3, 1))\n"
        "asp.plan(x, x, x)\n"
        "print(type(pytree.tree_leaves(mask)[0]).__name__)\n"
    )
    assert found == "1 ndarray\nndarray\n"
