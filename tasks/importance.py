"""Stage importance: find the target layers and gather their calibration statistics → data/importance."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedModel

from eckart.calibration.calibrate import calibrate
from eckart.calibration.passes import passes
from eckart.calibration.robust_gradients import RobustGradients
from eckart.calibration.routed_tokens import without_unreached
from eckart.calibration.statistics_files import join_statistics, load_statistics, save_statistics
from eckart.calibration.warnings import unreached_warning
from eckart.model.attention_products import find_products
from eckart.model.batches import Batch, batch_size
from eckart.model.experts import unfuse
from eckart.model.targets import Targets, find_targets, unmatched_warning
from tasks.artifacts.paths import IMPORTANCE, SHARDS, TARGETS
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Importance, Model, TargetPatterns
from tasks.data.loading import batches, encoded
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import explained, output, run, say, warn

EXAMPLES = "examples.txt"
"""Name of the file in a shard's folder with the number of its examples."""


def importance() -> None:
    """Find the target layers, record why other linear layers are excluded, and gather the calibration statistics.

    With `importance.shards`, other stages have done so for parts of the examples: their statistics are joined.
    """
    shards = [SHARDS / name for name in section("importance", Importance).shards]
    with explained(), output(IMPORTANCE) as folder:
        if shards:
            join_statistics({shard: int((shard / EXAMPLES).read_text()) for shard in shards}, folder)
            shutil.copy(shards[0] / TARGETS.name, folder)
        else:
            gather(folder)
        _leave_out_unreached(folder)


def gather(folder: Path, part: Callable[[int], range] = range, warn: Callable[[str | None], None] = warn) -> int:
    """Write the statistics of a part of the calibration examples, and the targets, to `folder`.

    Args:
        part: function that returns the indices of the part, from the number of all examples.
        warn: function that is called with each warning, or with None.

    Returns:
        The number of examples in the part.
    """
    params, patterns, task = section("importance", Importance), section("targets", TargetPatterns), load_task()
    kind = kind_of(task)
    loss = kind.objective(params.labels).calibration_loss
    model, tokenizer = load(TEACHER, kind.auto, device_map=section("model", Model).device_map)
    data, collate, device = encoded("calibration", tokenizer), kind.collate(tokenizer, model), to_device(model)

    def examples(indices: range, size: int) -> Iterator[Batch]:
        return batches(data.select(indices), collate, size, device)

    def first(count: int, size: int) -> Iterator[Batch]:
        return examples(range(min(count, len(data))), size)

    warnings: list[str] = []

    def noted(warning: str | None) -> None:
        warn(warning)
        warnings.extend(filter(None, [warning]))

    targets = _find(model, next(first(2, 2)), patterns)
    warn(targets.census.warning)
    noted(unmatched_warning(model, patterns.include, patterns.exclude))
    groups = passes([target for target in targets.targets if target.sampled], params.layers_at_once)
    indices, number = part(len(data)), 0  # of the pass

    def all_examples() -> Iterator[Batch]:
        nonlocal number
        number += 1
        count = 0
        for batch in examples(indices, params.batch_size):
            yield batch
            count += batch_size(batch)
            say(f"statistics from {count}/{len(indices)} examples, pass {number}/{len(groups)}")

    for statistics in calibrate(
        model,
        all_examples,
        groups,
        params.statistics,
        loss,
        examples=len(data),
        checked=list(first(params.batch_size, params.batch_size)),
        warn=noted,
        offload_activations=params.offload_activations,
        robust=RobustGradients(params.clip, params.edges),
    ):
        save_statistics(statistics, folder, part=number if len(groups) > 1 else None)
        del statistics  # frees them before the next pass
    _write(targets.model_copy(update={"warnings": tuple(warnings)}), folder)
    return len(indices)


def _leave_out_unreached(folder: Path) -> None:
    """Take experts that no token reached from the targets in `folder`, with a warning."""
    targets, statistics = Targets.model_validate_json((folder / TARGETS.name).read_text()), load_statistics(folder)
    if idle := unreached_warning(targets.targets, statistics):
        warn(idle)
        _write(
            without_unreached(targets, statistics).model_copy(update={"warnings": (*targets.warnings, idle)}), folder
        )


def _write(targets: Targets, folder: Path) -> None:
    (folder / TARGETS.name).write_text(targets.model_dump_json(indent=2))


def _find(model: PreTrainedModel, batch: Batch, patterns: TargetPatterns) -> Targets:
    if patterns.experts:
        unfuse(model)
    targets = find_targets(model, batch, **patterns.model_dump(exclude={"products", "experts"}))
    if patterns.products:
        targets = find_products(model, batch, targets)
    pairs = sum(len(target.layers) > 1 for target in targets.targets)
    say(
        f"{len(targets.targets)} targets, {pairs} of them pairs of linear layers, "
        f"{len(targets.excluded)} linear layers excluded"
    )
    return targets


if __name__ == "__main__":
    run("importance", importance)
