"""Run the Python blocks of a page of the docs, and put what they print below them.

A page's ```` ```python ```` blocks run in their order, in one namespace. What a block prints stands
in a ```` ```text ```` block right below it. To write the outputs of pages anew::

    python -m tests.pages docs/ten_minutes.md
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
PACKAGES = ("torch", "jax", "flax", "matplotlib")


def needs(text: str) -> list[str]:
    """Name the optional packages that the blocks of a page import, or draw with."""
    code = "\n".join(match["code"] for match in BLOCK.finditer(text))
    wanted = [name for name in PACKAGES if re.search(rf"^\s*(import|from) (attnspan\.)?{name}\b", code, re.M)]
    return [*wanted, *["matplotlib"] * ("attnspan.plots" in code)]


def run(text: str, name: str) -> tuple[str, dict[str, Any]]:
    """Run the blocks; give the page with what they print now, and the names they made."""
    module = types.ModuleType(f"docs_{name}")  # dataclasses look their module up
    sys.modules[module.__name__] = module

    def shown(match: re.Match[str]) -> str:
        printed = io.StringIO()
        line = text.count("\n", 0, match.start()) + 1
        code = compile("\n" * line + match["code"], f"{name}.md", "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        block = f"```python\n{match['code']}```\n"
        out = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
        return f"{block}\n```text\n{out}```\n" if out else block

    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # for what a page saves
            return BLOCK.sub(shown, text), module.__dict__
    finally:
        del sys.modules[module.__name__]


def main(paths: list[str]) -> None:
    """Write the outputs of pages anew."""
    for path in map(Path, paths):
        path.write_text(run(path.read_text(encoding="utf-8"), path.stem)[0], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
