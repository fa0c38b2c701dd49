"""The folder of the workspaces that a study makes, and the main workspace that such a workspace belongs to."""

from __future__ import annotations

from pathlib import Path

WORKSPACES = Path("workspaces")


def main_workspace() -> Path:
    """Return the absolute path of the working directory or, if a study made this workspace, of the main workspace."""
    here = Path.cwd()
    if not (here / ".git").is_file():
        return here
    records = here / (here / ".git").read_text().removeprefix("gitdir:").strip()  # such as MAIN/.git/worktrees/NAME
    if records.parent.name != "worktrees":  # a submodule
        return here
    # the folder `workspaces` may be a link; and the main workspace may itself be a worktree, as of a bare repository
    places = (records.resolve().parents[2], here.parent.parent)
    found = (main for main in places if (main / ".dvc").is_dir() and (main / WORKSPACES).resolve() == here.parent)
    return next(found, here)
