"""The engine: DVC decides what is stale, and a stage runs in a process of its own."""

from flows.engine.stages import (
    Outcome,
    Planned,
    StageChanged,
    WorkspaceUnusable,
    beside_others,
    cache_dir,
    check_workspace,
    plan,
    run,
)

__all__ = [
    "Outcome",
    "Planned",
    "StageChanged",
    "WorkspaceUnusable",
    "beside_others",
    "cache_dir",
    "check_workspace",
    "plan",
    "run",
]
