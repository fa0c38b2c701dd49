"""Evaluate: score a candidate after each step, and measure it → reports/evaluate/RECIPE-KEEP.json and, what each row
contributed, reports/rows/RECIPE-KEEP.parquet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from eckart.factorization.single_target_ablation import losses_alone
from eckart.model.layers import factorized, residual_rows
from eckart.model.targets import Target
from eckart.ranks.budget import allowance
from eckart.recipe_parts import Source
from tasks.artifacts.importance_files import load_targets
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import EVALUATIONS, FACTORIZED, FINETUNED, RANKS, SHAPED, load_decision, source_model
from tasks.artifacts.results_schema import Evaluation, TargetSize
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Evaluate, Model, section
from tasks.data.loading import batches, encoded
from tasks.models.model_io import DENSE, TEACHER, load, place, size
from tasks.nlp_tasks import kind_of, objective_of
from tasks.runtime.stage_runner import StageError, run_candidate
from tasks.scoring.splits import Rows, all_scores, same_weights, score_on, write_rows


def evaluate(recipe: str, keep: str) -> None:
    """Score the shaped, the factorized and the recovered model; measure the last, and hold it to its budget."""
    name, task, targets = candidate_name(recipe, keep), load_task(), load_targets().targets
    kind, device_map = kind_of(task), section("model", Model).device_map
    shaped = None
    if load_decision(name).as_shaped:
        model, tokenizer = load(RANKS / name / SHAPED, kind.auto, device_map=device_map)
        shaped = score_on("test", model, tokenizer, "shaped").score
    model, tokenizer = load(FACTORIZED / name, kind.auto, device_map=device_map)
    before = None if residual_rows(model) else score_on("test", model, tokenizer, "factorized")
    model, tokenizer = load(FINETUNED / name, kind.auto, device_map=device_map)
    place(model)
    alone = {} if _others_weights(recipe, name) else _losses_alone(name, targets)
    sizes = _sizes(model, targets, alone)
    same = before if same_weights(FACTORIZED / name, FINETUNED / name) else None
    scores, rows = all_scores(model, tokenizer, "recovered", same)
    result = Evaluation(
        shaped=shaped,
        factorized=before and before.score,
        recovered=scores.score,
        validation=scores.validation,
        size=size(model, FINETUNED / name, task.max_length),
        zero_shot=scores.zero_shot,
        continuations=scores.continuations,
        targets=sizes,
        target_parameters=sum(size.parameters for size in sizes.values()),
    )
    if result.target_parameters > (allowed := allowance(targets, float(keep))):
        raise StageError(
            f"the targets keep {result.target_parameters} parameters, more than the {allowed} of keep={keep}"
        )
    first: dict[str, Rows] = {"factorized": {"test": before.rows}} if before else {}
    write_rows(name, first | {"recovered": rows})
    EVALUATIONS.mkdir(parents=True, exist_ok=True)
    (EVALUATIONS / f"{name}.json").write_text(result.model_dump_json(indent=2))


def _others_weights(recipe: str, name: str) -> bool:
    """Whether what is factorized are other weights than the dense model's, for which the search has predicted."""
    part = f"recipes.{recipe}"
    in_order: object = section(f"{part}.sequential", Any)
    return in_order is not None or source_model(name, DENSE[section(f"{part}.source", Source)]) != TEACHER


def _losses_alone(name: str, targets: tuple[Target, ...]) -> dict[str, float]:
    settings, decision = section("evaluate", Evaluate), load_decision(name)
    if not settings.probes or decision.predicted_loss is None:
        return {}
    task = load_task()
    kind = kind_of(task)
    (dense, tokenizer), (small, _) = load(TEACHER, kind.auto), load(FACTORIZED / name, kind.auto)
    place(small)
    data = encoded("validation", tokenizer)
    some = data.select(range(min(settings.probes, len(data))))
    probes = list(batches(some, kind.collate(tokenizer, dense), settings.batch_size, place(dense)))
    factored = [target for target in targets if decision.ranks[target.name] is not None]
    return losses_alone(dense, small, factored, probes, objective_of(task))


def _sizes(model: PreTrainedModel, targets: tuple[Target, ...], alone: Mapping[str, float]) -> dict[str, TargetSize]:
    ranks, rows = factorized(model), residual_rows(model)
    return {
        target.name: TargetSize(
            rank=ranks.get(target.name),
            rows=rows.get(target.name, 0),
            parameters=_parameters(model, target),
            loss_alone=alone.get(target.name),
        )
        for target in targets
    }


def _parameters(model: PreTrainedModel, target: Target) -> int:
    """Of the maps that are `target`, as `model` stores them; biases are not counted."""
    parts = (part for map in target.layers for part in model.get_submodule(map.name).named_parameters())
    return sum(values.numel() for name, values in parts if name != "bias")


if __name__ == "__main__":
    run_candidate("evaluate", evaluate)
