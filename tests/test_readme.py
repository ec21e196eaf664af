"""Every Python block of the README runs, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def names() -> dict[str, Any]:
    """The one namespace in which all blocks run, in their order."""
    pytest.importorskip("torch").manual_seed(0)
    return {}


def test_the_blocks_run_in_their_order(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS[0].splitlines()) == 8
    for block in BLOCKS:
        exec(block, names)
    assert capsys.readouterr().out.strip(), "the plan prints itself"


def test_the_example_has_the_shape_it_says(names: dict[str, Any]) -> None:
    exec(BLOCKS[0], names)
    assert names["out"].shape == (2, 8, 512, 64)


def test_each_decode_step_is_attention_over_the_real_tokens(names: dict[str, Any]) -> None:
    import torch

    exec(BLOCKS[0], names)
    names["steps"] = []
    exec(BLOCKS[1] + "    steps.append(out)\n", names)  # the block ends inside its loop
    q, k, v, pad, P, S = (names[name] for name in ("q", "k", "v", "pad", "P", "S"))
    assert len(names["steps"]) == S - P
    for pos, out in zip(range(P, S), names["steps"], strict=True):
        for b, empty in enumerate(pad.tolist()):
            seen = slice(max(empty, pos - 15), pos + 1)
            scores = q[b, :, pos : pos + 1] @ k[b, :, seen].mT / q.shape[-1] ** 0.5
            right = torch.softmax(scores, -1) @ v[b, :, seen]
            torch.testing.assert_close(out[b], right, rtol=1e-4, atol=1e-5)


def test_every_relative_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_two_commands_stand_between_their_markers() -> None:
    """`.ci/run` reads them from there."""
    part = TEXT.split("<!-- two commands -->")[1].split("<!-- end of the two commands -->")[0]
    lines = [line for line in part.splitlines() if line.strip() and not line.startswith(("```", "#"))]
    assert len(lines) == 2
    assert lines[0].endswith("attnspan book")
    assert lines[1].endswith("pytest")
