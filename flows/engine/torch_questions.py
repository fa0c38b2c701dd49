"""Questions that need torch. A fork of the warm server answers them, so that a flow need not import torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.engine import stage_processes
from tasks.config import params_file, validation


def checked_params() -> dict[str, Any]:
    """Return the typed sections of params.yaml, as `validation.check` does, without importing torch for the check."""
    if not validation.found_good(params_file.read()):
        lines: list[str] = []
        try:
            _ask("python -m tasks.config.validation", lines)
        except stage_processes.CommandFailed as failure:
            raise params_file.ParamsError("\n".join(lines) or str(failure)) from None
    return validation.check()


def gpus() -> int:
    """Return the number of GPUs that stages can use here."""
    lines: list[str] = []
    _ask("python -m tasks.runtime.gpu_count", lines)
    return int(lines[-1])


def _ask(command: str, lines: list[str]) -> None:
    with stage_processes.reaping():
        stage_processes.run(command, Path.cwd(), lines.append, {})
