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

html_theme = "furo"
html_title = f"attnspan {release}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["tables.css"]
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
    """Link what the case table writes as GitHub shows it: ``owner/name#1`` and ``PR#1`` behind it."""
    if page == "cases":
        source[0] = re.sub(
            r"(?<![\w/.`-])([\w.-]+/[\w.-]+)#(\d+)",
            r"[\g<0>](https://github.com/\1/issues/\2)",
            source[0],
        )


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
