"""Evaluate: score a candidate after each step, and measure it → reports/evaluate/RECIPE-KEEP.json and, what each test
row contributed, reports/rows/RECIPE-KEEP.parquet."""

from __future__ import annotations

from transformers import PreTrainedModel

from eckart.budget import allowance
from eckart.layers import factorized, residual_rows
from eckart.targets import Target
from tasks.candidate_files import EVALUATIONS, FACTORIZED, FINETUNED, RANKS, SHAPED, load_decision
from tasks.candidate_names import candidate_name
from tasks.dataset import load_task
from tasks.importance_files import load_targets
from tasks.kinds import kind_of
from tasks.models import load, place, size
from tasks.params import Model, section
from tasks.records import Evaluation, TargetSize
from tasks.scoring import all_scores, same_weights, score_on, write_rows
from tasks.stage import StageError, run_candidate


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
    sizes = _sizes(model, targets)
    same = before if same_weights(FACTORIZED / name, FINETUNED / name) else None
    scores, rows = all_scores(model, tokenizer, "recovered", same)
    result = Evaluation(
        shaped=shaped,
        factorized=before and before.score,
        recovered=scores.score,
        validation=scores.validation,
        size=size(model, FINETUNED / name, task.max_length),
        zero_shot=scores.zero_shot,
        targets=sizes,
        target_parameters=sum(size.parameters for size in sizes.values()),
    )
    if result.target_parameters > (allowed := allowance(targets, float(keep))):
        raise StageError(
            f"the targets keep {result.target_parameters} parameters, more than the {allowed} of keep={keep}"
        )
    write_rows(name, ({"factorized": before.rows} if before else {}) | {"recovered": rows})
    EVALUATIONS.mkdir(parents=True, exist_ok=True)
    (EVALUATIONS / f"{name}.json").write_text(result.model_dump_json(indent=2))


def _sizes(model: PreTrainedModel, targets: tuple[Target, ...]) -> dict[str, TargetSize]:
    ranks, rows = factorized(model), residual_rows(model)
    return {
        target.name: TargetSize(
            rank=ranks.get(target.name), rows=rows.get(target.name, 0), parameters=_parameters(model, target)
        )
        for target in targets
    }


def _parameters(model: PreTrainedModel, target: Target) -> int:
    """Of the maps that are `target`, as `model` stores them; biases are not counted."""
    parts = (part for map in target.maps for part in model.get_submodule(map.name).named_parameters())
    return sum(values.numel() for name, values in parts if name != "bias")


if __name__ == "__main__":
    run_candidate("evaluate", evaluate)
