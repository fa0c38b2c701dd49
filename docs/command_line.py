"""Write the page docs/reference/cli.md from the commands and their help: `python -m docs.command_line` prints it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from typer.cli import get_docs_for_click

from flows.cli import app

_HELP = "* `--help`: Show this message and exit.\n"  # an option of each command


def page() -> str:
    """Return the text of docs/reference/cli.md."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="eckart")
    lines = [
        "# Command line",
        "",
        "<!-- Written by `make docs` from flows/cli.py; edits are overwritten. -->",
        "",
        _first(group.help),
        "",
        "`eckart COMMAND --help` prints the same as this page. In a clone without an activated environment, write",
        "`.venv/bin/python -m flows` for `eckart`.",
        "",
        "`eckart --version` prints the version. `eckart --install-completion` makes your shell complete commands and",
        "options.",
    ]
    panels: dict[str, list[Any]] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        panels.setdefault(command.rich_help_panel, []).append(command)
    for panel, commands in panels.items():
        lines += ["", f"## {panel}", "", "| command | what it does |", "|---|---|"]
        lines += [
            f"| [`eckart {command.name}`](#eckart-{command.name}) | {_first(command.help)} |" for command in commands
        ]
        for command in commands:
            lines += ["", *_command(command, context)]
    return "\n".join(lines) + "\n"


def _first(text: str | None) -> str:
    """Return the first paragraph of a help text on one line, as a cell of a table."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def _command(command: Any, context: typer.Context) -> Iterator[str]:
    """Yield the lines of a command's section: what `typer utils docs` writes, and its examples as code."""
    examples, command.epilog = command.epilog, None
    text = get_docs_for_click(obj=command, ctx=context, indent=2, call_prefix="eckart")
    yield from text.replace(_HELP, "").replace("**Options**:\n\n\n", "").strip().splitlines()
    title, *lines = examples.splitlines()
    yield from ["", f"**{title.rstrip(':')}**:", "", "```bash", *textwrap.dedent("\n".join(lines)).splitlines(), "```"]


if __name__ == "__main__":
    print(page(), end="")
