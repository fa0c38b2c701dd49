"""Load jinja2 templates of pages and cards. An undefined name in a template is an error."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, select_autoescape


def template(file: Path) -> Template:
    """Load a template. Inserted values are escaped in HTML templates (`*.html.j2`), not in Markdown."""
    return _environment(file.parent).get_template(file.name)


@cache  # it keeps the templates that it has compiled: there is a card for each candidate
def _environment(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
