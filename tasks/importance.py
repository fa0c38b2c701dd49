"""Importance: find the targets and gather the statistics, one pass for each group of layers → data/importance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Loss
from eckart.calibration.statistics import NO_GRADIENT, OF_GRADIENTS, collect, has_gradients, passes, save_statistics
from eckart.calibration.warnings import few_tokens, padding_warning, underflow_warning
from eckart.model.attention_products import find_products
from eckart.model.targets import Target, Targets, find_targets
from tasks.artifacts.importance_files import IMPORTANCE, TARGETS
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Importance, Model, TargetPatterns, section
from tasks.data.loading import batches, encoded
from tasks.models.model_io import TEACHER, load, place
from tasks.nlp_tasks import calibration_loss, kind_of
from tasks.runtime.stage_runner import explained, output, run, say, warn

Rows = Callable[[int, int], Iterator[Batch]]
"""So many calibration rows at most, in batches of that size, where the model is."""


def importance() -> None:
    """Write targets.json, with the reason why each other layer is none, and a file for each kind of statistic."""
    params, task = section("importance", Importance), load_task()
    kind = kind_of(task)
    model, tokenizer = load(TEACHER, kind.auto, device_map=section("model", Model).device_map)
    data, collate = encoded("calibration", tokenizer), kind.collate(tokenizer, model)
    device = place(model)

    def rows(count: int, size: int) -> Iterator[Batch]:
        return batches(data.select(range(min(count, len(data)))), collate, size, device)

    with explained(), output(IMPORTANCE) as folder:
        found = _find(model, next(rows(2, 2)))
        sampled = [target for target in found.targets if target.sampled]
        loss = calibration_loss(task, params.labels)
        warn(padding_warning(model, rows(params.batch_size, params.batch_size)))
        if {*params.statistics} & {*OF_GRADIENTS}:
            warn(underflow_warning(model, next(rows(2, 2)), sampled, loss))
        _gather(model, sampled, loss, rows, len(data), folder)
        (folder / TARGETS.name).write_text(found.model_dump_json(indent=2))


def _find(model: PreTrainedModel, batch: Batch) -> Targets:
    patterns = section("targets", TargetPatterns)
    found = find_targets(model, batch, **patterns.model_dump(exclude={"products"}))
    if patterns.products:
        found = find_products(model, batch, found)
    pairs = sum(len(target.layers) > 1 for target in found.targets)
    say(f"{len(found.targets)} targets, {pairs} of them of two maps, {len(found.excluded)} linear maps excluded")
    warn(found.census.warning)
    return found


def _gather(model: PreTrainedModel, targets: list[Target], loss: Loss, rows: Rows, count: int, folder: Path) -> None:
    """Write the statistics of each pass before the next one begins.

    Raises:
        ValueError: no target has a gradient, and some statistics are of these; or as `collect` says.
    """
    params = section("importance", Importance)
    todo, moved = passes(targets, params.layers_at_once), False
    for number, each in enumerate(todo, 1):
        statistics = collect(
            model,
            _progress(rows(count, params.batch_size), count, f"{number}/{len(todo)}"),
            each.targets,
            params.statistics,
            loss,
            then=each.then,
            offload_activations=params.offload_activations,
        )
        moved |= has_gradients(statistics)
        warn(few_tokens(each.targets, statistics, count))
        save_statistics(statistics, folder, part=number if len(todo) > 1 else None)
        del statistics  # before the next pass
    if todo and {*params.statistics} & {*OF_GRADIENTS} and not moved:
        raise ValueError(NO_GRADIENT)


def _progress(every: Iterator[Batch], rows: int, number: str) -> Iterator[Batch]:
    done = 0
    for batch in every:
        yield batch
        done += len(next(iter(batch.values())))
        say(f"statistics from {done}/{rows} rows, pass {number}")


if __name__ == "__main__":
    run("importance", importance)
