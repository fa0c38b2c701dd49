"""Check: looks at the splits before anything learns from them → reports/check.json, .html; data/checked.json if all
limits hold.

The teacher depends on data/checked.json, which is the same whatever was checked: other limits train nothing again, and
data that break one stop the run before anything is trained.
"""

from __future__ import annotations

from pathlib import Path

from tasks.artifacts.task_spec import Split, load_split, load_task
from tasks.config.schema import Check, section
from tasks.data_checks.champion_data import changes, load_reference
from tasks.data_checks.counts import of_cells, of_splits
from tasks.data_checks.findings import FINDINGS, Findings
from tasks.data_checks.page import page
from tasks.runtime.stage_runner import StageError, run, say

CHECKED = Path("data/checked.json")
PAGE = Path("reports/check.html")
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")  # calibration is a sample of train


def check() -> None:
    """Hold the splits, and what changed since the champion's data, against the limits of params.yaml."""
    found = findings()
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    FINDINGS.write_text(found.model_dump_json(indent=2) + "\n")
    PAGE.write_text(page(found))
    if found.broken:
        for one in found.findings:
            say(one.line)
        lines = "; ".join(one.line for one in found.broken)
        raise StageError(
            f"the data break {len(found.broken)} of the limits of check in params.yaml: {lines}. See {PAGE}"
        )
    say(f"the data break no limit of check in params.yaml: {PAGE}")
    CHECKED.write_text('{"passed": true}\n')


def findings() -> Findings:
    limits, task, reference = section("check", Check), load_task(), load_reference()
    splits = {name: load_split(name) for name in _SPLITS}
    found = list(of_cells(splits, task, limits))
    if all(one.passed for one in found):
        found += [*of_splits(splits, task, limits), *changes(splits["train"], task, reference, limits)]
    return Findings(findings=tuple(found))


if __name__ == "__main__":
    run("check", check)
