"""Importance: find the targets and gather the evidence, one pass for each group of layers → data/importance."""

from __future__ import annotations

from collections.abc import Iterator

from eckart.evidence import collect, passes, save_evidence
from eckart.losses import Batch
from eckart.products import find_products
from eckart.targets import find_targets
from tasks.batches import batches, encoded
from tasks.dataset import load_task
from tasks.importance_files import IMPORTANCE, TARGETS
from tasks.kinds import evidence_loss, kind_of
from tasks.models import TEACHER, load, place
from tasks.params import Importance, Model, TargetPatterns, section
from tasks.stage import explained, output, run, say


def importance() -> None:
    """Write targets.json, with the reason why each other linear map is none, and the evidence, a file for each kind."""
    params, patterns = section("importance", Importance), section("targets", TargetPatterns)
    task = load_task()
    kind = kind_of(task)
    model, tokenizer = load(TEACHER, kind.auto, device_map=section("model", Model).device_map)
    data, collate = encoded("calibration", tokenizer), kind.collate(tokenizer, model)
    device = place(model)
    with explained(), output(IMPORTANCE) as folder:
        batch = next(batches(data.select(range(1)), collate, 1, device))
        found = find_targets(model, batch, **patterns.model_dump(exclude={"products"}))
        if patterns.products:
            found = find_products(model, batch, found)
        pairs = sum(len(target.maps) > 1 for target in found.targets)
        say(f"{len(found.targets)} targets, {pairs} of them of two maps, {len(found.excluded)} linear maps excluded")
        todo = passes([target for target in found.targets if target.sampled], params.layers_at_once)
        for number, each in enumerate(todo, 1):
            every = _progress(batches(data, collate, params.batch_size, device), len(data), f"{number}/{len(todo)}")
            save_evidence(  # and let it go before the next pass
                collect(
                    model,
                    every,
                    each.targets,
                    params.evidence,
                    evidence_loss(task, params.labels),
                    then=each.then,
                    offload_activations=params.offload_activations,
                ),
                folder,
                part=number if len(todo) > 1 else None,
            )
        (folder / TARGETS.name).write_text(found.model_dump_json(indent=2))


def _progress(every: Iterator[Batch], rows: int, number: str) -> Iterator[Batch]:
    done = 0
    for batch in every:
        yield batch
        done += len(next(iter(batch.values())))
        say(f"evidence from {done}/{rows} rows, pass {number}")


if __name__ == "__main__":
    run("importance", importance)
