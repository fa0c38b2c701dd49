"""A stage's entry in dvc.lock, in DVC's own words but without reading and writing the entries of all others.

DVC parses the whole file for each stage and lays it out anew, comments and all, in Python: seconds where a study has
fifty stages. Here the lines of one entry are replaced. A file that is laid out otherwise is left to DVC.
"""

from __future__ import annotations

import re
from pathlib import Path

from dvc.stage import PipelineStage
from dvc.stage.serialize import to_lockfile
from dvc.utils.serialize import dumps_yaml

_HEAD = "schema: '2.0'\nstages:\n"
_ENTRIES = re.compile(r"(?:  .*\n|\n)*")
_ANCHOR = re.compile(r"[&*]id\d{3}")  # of what stands twice: numbered throughout the file


def write(stage: PipelineStage) -> None:
    """Put what is noted in a stage into dvc.lock, which is whole at every moment."""
    file = Path(stage.dvcfile.path).with_suffix(".lock")
    before = file.read_text("utf-8") if file.exists() else _HEAD
    entry = dumps_yaml({"stages": to_lockfile(stage)}).removeprefix("stages:\n")
    name = re.escape(entry.partition("\n")[0])
    lines = re.compile(rf"^{name}\n(?:    .*\n|\n)*", re.MULTILINE)
    usual = before.startswith(_HEAD) and _ENTRIES.fullmatch(before, len(_HEAD)) and lines.fullmatch(entry)
    if not usual or _ANCHOR.search(before + entry):
        stage.dump(update_pipeline=False)
        return
    after, found = lines.subn(lambda _: entry, before)
    fresh = Path(stage.repo.tmp_dir) / file.name
    fresh.write_text(after if found else before + entry, "utf-8")
    fresh.replace(file)
