"""Questions that need torch, asked of a fork of the warm server: a flow itself imports none, which takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.engine import stage_processes
from tasks.config import schema, validation


def checked_params() -> dict[str, Any]:
    """What `check_params.check` gives.

    Raises:
        ParamsError: with all mistakes, each with its path and what to write instead.
    """
    if not validation.found_good(schema.read()):
        said: list[str] = []
        try:
            _ask("python -m tasks.config.validation", said)
        except stage_processes.CommandFailed as failure:
            raise schema.ParamsError("\n".join(said) or str(failure)) from None
    return validation.check()


def gpus() -> int:
    """How many GPUs stages find here."""
    said: list[str] = []
    _ask("python -m tasks.runtime.gpu_count", said)
    return int(said[-1])


def _ask(command: str, said: list[str]) -> None:
    with stage_processes.reaping():
        stage_processes.run(command, Path.cwd(), said.append, {})
