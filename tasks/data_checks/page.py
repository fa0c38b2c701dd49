"""The findings as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from tasks.data_checks.findings import Findings
from tasks.runtime.templates import template


def page(found: Findings) -> str:
    """The whole page; every text in it is escaped. The same findings give the same bytes."""
    return template(Path(__file__).with_name("page.html.j2")).render(found=found)
