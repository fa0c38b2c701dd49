"""Evaluate: score a candidate after each step, and measure it → reports/evaluate/RECIPE-KEEP.json."""

from __future__ import annotations

import filecmp
from pathlib import Path

from transformers import PreTrainedModel

from eckart.budget import allowance, cost
from eckart.layers import factorized, residual_rows
from eckart.targets import Target
from tasks.candidate_files import EVALUATIONS, FACTORIZED, FINETUNED, RANKS, SHAPED, load_decision
from tasks.dataset import load_split, load_task
from tasks.importance_files import load_targets
from tasks.kinds import kind_of
from tasks.models import load, place, size
from tasks.params import Evaluate, Model, section
from tasks.records import Evaluation, Score, TargetSize
from tasks.stage import StageError, candidate_name, run_candidate, say
from tasks.zero_shot import zero_shot


def evaluate(recipe: str, keep: str) -> None:
    """Score the shaped, the factorized and the recovered model on the test split; hold the last to its budget."""
    name, task, targets = candidate_name(recipe, keep), load_task(), load_targets().targets
    kind = kind_of(task)
    settings, device_map = section("evaluate", Evaluate), section("model", Model).device_map

    def scored(model: PreTrainedModel, step: str) -> Score:
        result = kind.score(model, tokenizer, load_split("test"), task, settings.batch_size)
        say(f"{step}: {task.metric} {result.metric:.4f}")
        return result

    shaped = None
    if load_decision(name).average_rank is not None:
        model, tokenizer = load(RANKS / name / SHAPED, kind.auto, device_map=device_map)
        shaped = scored(model, "shaped")
    model, tokenizer = load(FACTORIZED / name, kind.auto, device_map=device_map)
    before = None if residual_rows(model) else scored(model, "factorized")
    model, tokenizer = load(FINETUNED / name, kind.auto, device_map=device_map)
    place(model)
    sizes = _sizes(model, targets)
    same = before if _same_weights(FACTORIZED / name, FINETUNED / name) else None
    result = Evaluation(
        shaped=shaped,
        factorized=before,
        recovered=same or scored(model, "recovered"),
        size=size(model, FINETUNED / name, task.max_length),
        zero_shot=zero_shot(model, tokenizer, settings.zero_shot, settings.batch_size),
        targets=sizes,
        target_parameters=sum(_parameters(target, sizes[target.name]) for target in targets),
    )
    if result.target_parameters > (allowed := allowance(targets, float(keep))):
        raise StageError(
            f"the targets keep {result.target_parameters} parameters, more than the {allowed} of keep={keep}"
        )
    EVALUATIONS.mkdir(parents=True, exist_ok=True)
    (EVALUATIONS / f"{name}.json").write_text(result.model_dump_json(indent=2))


def _same_weights(one: Path, other: Path) -> bool:
    """Whether recovery took no step, so that there is nothing new to score."""
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


def _sizes(model: PreTrainedModel, targets: tuple[Target, ...]) -> dict[str, TargetSize]:
    ranks, rows = factorized(model), residual_rows(model)
    return {target.name: TargetSize(rank=ranks.get(target.name), rows=rows.get(target.name, 0)) for target in targets}


def _parameters(target: Target, size: TargetSize) -> int:
    return cost(target, size.rank) + size.rows * target.in_features


if __name__ == "__main__":
    run_candidate("evaluate", evaluate)
