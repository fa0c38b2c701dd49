"""Importance: find the targets and gather the evidence in one pass over the calibration sample → data/importance."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from eckart.batch import Batch
from eckart.evidence import collect, save_evidence
from eckart.targets import find_targets
from tasks.batches import batches, encoded
from tasks.calibration import IMPORTANCE, TARGETS
from tasks.dataset import load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, load
from tasks.params import Importance, TargetPatterns, section
from tasks.stage import explained, output, run, say


def importance() -> None:
    """Write targets.json, with the reason why each other linear map is none, and one file for each kind of evidence."""
    params, patterns = section("importance", Importance), section("targets", TargetPatterns)
    kind = kind_of(load_task())
    model, tokenizer = load(TEACHER, kind.auto)
    data, collate = encoded("calibration", tokenizer), kind.collate(tokenizer, model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]
    with explained(), output(IMPORTANCE) as folder:
        batch = next(batches(data.select(range(1)), collate, 1, device))
        found = find_targets(model, batch, **patterns.model_dump())
        say(f"{len(found.targets)} targets, {len(found.excluded)} linear maps excluded")
        every = _progress(batches(data, collate, params.batch_size, device), len(data))
        save_evidence(collect(model, every, found.targets, params.evidence, kind.loss), folder)
        (folder / TARGETS.name).write_text(found.model_dump_json(indent=2))


def _progress(every: Iterator[Batch], rows: int) -> Iterator[Batch]:
    done = 0
    for batch in every:
        yield batch
        done += len(next(iter(batch.values())))
        say(f"evidence from {done}/{rows} rows")


if __name__ == "__main__":
    run("importance", importance)
