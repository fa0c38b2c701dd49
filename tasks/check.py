"""Stage check: check the splits against the limits in params.yaml before training → reports/check.json and .html, and,
if the data break no limit, data/checked.json.

The stage teacher depends on data/checked.json. Without this file the run stops before anything is trained. Its content
is always the same, so that training is not repeated if only the limits change.
"""

from __future__ import annotations

from pathlib import Path

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split, load_split, load_task
from tasks.config.params_file import section
from tasks.config.schema import Check
from tasks.data_checks.champion_data import changes, load_reference
from tasks.data_checks.counts import of_splits
from tasks.data_checks.findings import FINDINGS, Findings
from tasks.runtime.stage_runner import run, say
from tasks.runtime.templates import template

CHECKED = Path("data/checked.json")
PAGE = Path("reports/check.html")
_TEMPLATE = Path(__file__).with_name("data_checks") / "page.html.j2"
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")  # calibration is a sample of train


def check() -> None:
    """Check the splits, and how the training data differ from the champion's, against the limits in params.yaml.

    Raises:
        StageError: the data break a limit.
    """
    limits, task = section("check", Check), load_task()
    splits = {name: load_split(name) for name in _SPLITS}
    counts, changed = of_splits(splits, task, limits), changes(splits["train"], task, load_reference(), limits)
    result = Findings(findings=(*counts, *changed))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    FINDINGS.write_text(result.model_dump_json(indent=2) + "\n")
    PAGE.write_text(template(_TEMPLATE).render(result=result))
    if result.broken:
        for finding in result.findings:
            say(finding.line)
        lines = "; ".join(finding.line for finding in result.broken)
        raise StageError(
            f"the data break {len(result.broken)} of the limits of check in params.yaml: {lines}. See {PAGE}"
        )
    say(f"the data break no limit of check in params.yaml: {PAGE}")
    CHECKED.write_text('{"passed": true}\n')


if __name__ == "__main__":
    run("check", check)
