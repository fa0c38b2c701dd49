"""The findings as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.checks.findings import Findings


def page(found: Findings) -> str:
    """The whole page; every text in it is escaped. The same findings give the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2").render(found=found)
