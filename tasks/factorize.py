"""Stage factorize: replace the targets with factors of the chosen ranks → models/factorized/RECIPE-KEEP."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic import BaseModel

from eckart.calibration.statistics_files import load_statistics
from eckart.factorization.factorize import InOrder, factorize_model
from eckart.factorization.refinement import NO_STORE
from eckart.factorization.weightings import Weighting
from eckart.model.batches import Batch
from eckart.model.experts import unfuse
from eckart.model.layers import factorized
from eckart.model.targets import Targets
from eckart.recipe_parts import Source
from eckart.residual import Residual
from tasks.artifacts.decision import load_decision
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import CALIBRATION, FACTORIZED, IMPORTANCE, RANKS, SCORES, TARGETS, source_model
from tasks.artifacts.task_spec import SPLITS, load_task
from tasks.config.params_file import section
from tasks.config.schema import Count, Labels, Model
from tasks.data.loading import batches, encoded
from tasks.models.device import to_device
from tasks.models.model_io import SOURCE_FOLDERS, load, save
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import explained, output, run_candidate, say
from tasks.training.refined_blocks import RefinedBlocks

REFINEMENT = "refinement.json"
"""Name of the file in `FACTORIZED / candidate` with the errors of each refined block, if the recipe refines."""


class FactorizationParts(BaseModel):
    """Parts of a recipe on which the factors depend, apart from the ranks."""

    source: Source
    weighting: Weighting
    residual: Residual | None
    sequential: InOrder | None


def factorize(recipe: str, keep: str) -> None:
    """Replace every target that has a rank with the best factors of that rank under the recipe's weighting.

    The saved model has plain factors even if the recipe asks for another storage: the stage finetune trains the factors
    and only then converts them to that storage, which computes the same outputs. If the recipe has a residual, the
    model also keeps the difference between each weight and the product of its factors. Fine-tuning then prunes it.

    If the recipe refines, each refined block is stored until the end, so that a stage that was killed goes on.
    """
    name, parts = candidate_name(recipe, keep), section(f"recipes.{recipe}", FactorizationParts)
    kind, size = kind_of(load_task()), section("importance.batch_size", Count)
    labels = section("importance.labels", Labels)
    calibration: Iterable[Batch] = ()
    device_map = section("model", Model).device_map if parts.sequential else None
    source = source_model(name, SOURCE_FOLDERS[parts.source])
    model, tokenizer = load(source, kind.auto, device_map=device_map)
    targets = Targets.model_validate_json(TARGETS.read_text()).targets
    unfuse(model, targets)
    store = NO_STORE
    if parts.sequential:
        data = encoded("calibration", tokenizer)
        calibration = batches(data, kind.collate(tokenizer, model), size, to_device(model))
    if parts.sequential and parts.sequential.refine:
        inputs = (source, IMPORTANCE, RANKS / name, CALIBRATION, SPLITS / "task.json")
        settings = {**parts.model_dump(mode="json"), "size": size, "labels": labels, "device_map": device_map}
        store = RefinedBlocks(name, inputs, settings)
    decision = load_decision(name)
    with explained():
        refined = factorize_model(
            model,
            targets,
            decision.ranks,
            parts.weighting,
            {**load_statistics(IMPORTANCE), **load_statistics(RANKS / name / SCORES)},
            in_order=parts.sequential,
            batches=calibration,
            residual=parts.residual is not None,
            widths=decision.widths,
            store=store,
            loss=kind.objective(labels).calibration_loss,
        )
    with output(FACTORIZED / name) as folder:
        save(model, folder)
        if refined:
            blocks = [block.model_dump() for block in refined]
            (folder / REFINEMENT).write_text(json.dumps(blocks, indent=1) + "\n")
    store.remove()
    say(f"{len(factorized(model))} linear layers factorized, {model.num_parameters():,} parameters in all")


if __name__ == "__main__":
    run_candidate("factorize", factorize)
