"""Stage importance: find the target layers and gather their calibration statistics → data/importance."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from eckart.calibration.calibrate import calibrate
from eckart.calibration.losses import Batch, batch_size
from eckart.calibration.robust_gradients import RobustGradients
from eckart.calibration.routed_tokens import without_unreached
from eckart.calibration.statistics import load_statistics, passes, save_statistics
from eckart.model.attention_products import find_products
from eckart.model.experts import unfuse
from eckart.model.targets import Targets, find_targets
from tasks.artifacts.paths import IMPORTANCE, TARGETS
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Importance, Model, TargetPatterns, section
from tasks.data.loading import batches, encoded
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks._prediction import place
from tasks.runtime.stage_runner import explained, output, run, say, warn


def importance() -> None:
    """Find the target layers, record why other linear layers are excluded, and gather the calibration statistics."""
    params, patterns, task = section("importance", Importance), section("targets", TargetPatterns), load_task()
    kind = kind_of(task)
    loss = kind.objective(params.labels).calibration_loss
    model, tokenizer = load(TEACHER, kind.auto, device_map=section("model", Model).device_map)
    data, collate, device = encoded("calibration", tokenizer), kind.collate(tokenizer, model), place(model)

    def examples(count: int, size: int) -> Iterator[Batch]:
        """Return the first `count` calibration examples in batches of `size`."""
        return batches(data.select(range(min(count, len(data)))), collate, size, device)

    with explained(), output(IMPORTANCE) as folder:
        targets = _find(model, next(examples(2, 2)), patterns)
        warnings: list[str] = []

        def noted(warning: str | None) -> None:
            warn(warning)
            warnings.extend(filter(None, [warning]))

        groups = passes([target for target in targets.targets if target.sampled], params.layers_at_once)
        number = 0  # of the pass

        def all_examples() -> Iterator[Batch]:
            nonlocal number
            number += 1
            count = 0
            for batch in examples(len(data), params.batch_size):
                yield batch
                count += batch_size(batch)
                say(f"statistics from {count}/{len(data)} examples, pass {number}/{len(groups)}")

        for statistics in calibrate(
            model,
            all_examples,
            groups,
            params.statistics,
            loss,
            checked=list(examples(params.batch_size, params.batch_size)),
            warn=noted,
            offload_activations=params.offload_activations,
            robust=RobustGradients(params.clip, params.edges),
        ):
            save_statistics(statistics, folder, part=number if len(groups) > 1 else None)
            del statistics  # frees them before the next pass
        found = without_unreached(targets, load_statistics(folder)).model_copy(update={"warnings": tuple(warnings)})
        (folder / TARGETS.name).write_text(found.model_dump_json(indent=2))


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
    warn(targets.census.warning)
    return targets


if __name__ == "__main__":
    run("importance", importance)
