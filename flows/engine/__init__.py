"""The engine: DVC decides what is stale, and a stage runs in a process of its own."""

from flows.engine.stages import (
    Outcome,
    Planned,
    StageChanged,
    WorkspaceUnusable,
    cache_dir,
    check_workspace,
    execute_here,
    machine,
    plan,
    run,
)

__all__ = [
    "Outcome",
    "Planned",
    "StageChanged",
    "WorkspaceUnusable",
    "cache_dir",
    "check_workspace",
    "execute_here",
    "machine",
    "plan",
    "run",
]
