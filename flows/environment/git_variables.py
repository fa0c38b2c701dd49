"""Environment variables that git sets for hooks."""

from __future__ import annotations

import os

GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""With them, every git command would work on the main workspace."""


def environment_without_git() -> dict[str, str]:
    """Return this process's environment variables without those that a git hook sets."""
    return {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
