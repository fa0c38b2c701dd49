"""Pages and cards from templates of jinja2: what a template does not find is an error."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, select_autoescape


def template(file: Path) -> Template:
    """The template of a file. In HTML (`page.html.j2`) all that is put into it is escaped, in Markdown nothing."""
    environment = Environment(
        loader=FileSystemLoader(file.parent),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(file.name)
