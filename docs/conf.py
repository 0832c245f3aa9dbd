"""Configuration of the documentation site, which `make docs` builds. Pages load nothing from other sites."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generate
import reference

from paceline.version import __version__

DOCS = Path(__file__).parent

project = "Paceline"
author = "The Paceline developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures, most of which have no page
myst_heading_anchors = 3
smartquotes = False  # would turn the -- of options into dashes

html_theme = "furo"
html_title = f"Paceline {version}"
html_copy_source = False
html_show_copyright = False
html_show_search_summary = False  # browsers do not let a page from a file:// address read other pages
html_theme_options = {"top_of_page_buttons": []}


def setup(app: Any) -> None:
    generate.write(DOCS / generate.GENERATED)
    app.connect("source-read", _relink)
    app.connect("autodoc-process-docstring", _restructure)
    app.connect("autodoc-skip-member", _skip)


def _relink(app: Any, page: str, content: list[str]) -> None:
    """Point links to files of the repository at the site. Pages write them for readers of docs/ as files."""
    if not page.startswith(generate.GENERATED):
        content[0] = generate.relink(content[0], DOCS, DOCS)


def _restructure(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = reference.as_rst(lines)


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    return True if name == "model_config" else None
