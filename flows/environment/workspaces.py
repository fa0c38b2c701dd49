"""The folder of the workspaces that a study makes, and the main workspace that such a workspace belongs to."""

from __future__ import annotations

from pathlib import Path

WORKSPACES = Path("workspaces")


def main_workspace() -> Path:
    """Return the absolute path of the working directory or, if a study made this workspace, of the main workspace."""
    here = Path.cwd()
    main = here.parent.parent
    made = here.parent.name == WORKSPACES.name and (here / ".git").is_file() and (main / ".dvc").is_dir()
    return main if made else here
