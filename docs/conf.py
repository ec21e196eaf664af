"""How the pages are built: ``sphinx-build -W --keep-going -n docs docs/_build/html``.

Nothing is fetched, neither while building nor by the built pages: formulas become MathML, which
browsers draw themselves, and there is no intersphinx.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

project = "attnspan"
author = "the attnspan developers"
copyright = "the attnspan developers, Apache-2.0"
release = metadata.version("attnspan")

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

default_role = "code"  # a name in single backticks, as docstrings write them
autodoc_typehints = "none"  # a docstring's Parameters say what a value is, in shapes and letters
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # pages name the members they show
numpydoc_class_members_toctree = False

copybutton_selector = "div:not(.highlight-text) > div.highlight pre"  # outputs are not for copying
copybutton_exclude = ".linenos, .gp, .go"  # nor are prompts

html_theme = "furo"
html_title = f"attnspan {release}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"


def inline_math(self: Any, node: nodes.math) -> None:
    """Write an inline formula as MathML."""
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(self: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own as MathML."""
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def link_reports(app: Sphinx, page: str, source: list[str]) -> None:
    """Link the reports of the case table, ``owner/name#1``; a repository is named once in a row."""
    if page != "cases":
        return
    report = re.compile(r"(?<![\w/.`-])([\w.-]+/[\w.-]+)#(\d+)")
    lines = source[0].splitlines()
    for n, line in enumerate(lines):
        last = ""

        def link(match: re.Match[str]) -> str:
            nonlocal last
            text = f"#{match[2]}" if match[1] == last else match[0]
            last = match[1]
            return f"[{text}](https://github.com/{match[1]}/issues/{match[2]})"

        lines[n] = report.sub(link, line)
    source[0] = "\n".join(lines) + "\n"


def shorten_citations(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Write a docstring's references as [1], though each has a name of its own among all pages."""
    for text in list(tree.findall(nodes.Text)):
        if label := re.fullmatch(r"\[R[0-9a-f]{12}-(\d+)\]", text):
            text.parent.replace(text, nodes.Text(f"[{label[1]}]"))


def setup(app: Sphinx) -> None:
    """Register what stands above."""
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("source-read", link_reports)
    app.connect("doctree-resolved", shorten_citations)
