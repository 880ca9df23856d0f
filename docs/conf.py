"""Sphinx: ``make docs`` builds the site, every warning an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "bnb-patches"
author = "bnb-patches contributors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
