"""Sphinx: ``make docs`` builds the site, every warning an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.ext.napoleon import Config, NumpyDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "bnb-patches"
author = "bnb-patches contributors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["generated", "requirements.txt"]

myst_heading_anchors = 3
default_role = "code"  # docstrings have `words` like this
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
nitpicky = False  # types of torch and of the standard library lead nowhere: there is no network in a build

html_theme = "furo"
html_title = "bnb-patches"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # messages are quoted word for word
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _sections)


def _sections(app: Sphinx, what: str, name: str, item: object, options: Any, lines: list[str]) -> None:
    """Parameters, Returns and Raises. Of attributes there are none: their sentences are not ``type: description``."""
    if what not in ("attribute", "property"):
        lines[:] = NumpyDocstring(lines, Config(), app, what, name, item, options).lines()
