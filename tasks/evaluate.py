"""Stage evaluate: score a candidate after each step of its compression, and measure its size →
reports/evaluate/RECIPE-KEEP.json, with the results of each example in reports/predictions/RECIPE-KEEP.parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from transformers import PreTrainedModel

from eckart.factorization.single_target_ablation import losses_alone
from eckart.model.experts import unfuse
from eckart.model.layers import factorized, residual_rows
from eckart.model.targets import Target, Targets, Tied
from eckart.ranks.budget import allowance
from eckart.recipe_parts import Source
from tasks.artifacts.decision import Decision, load_decision
from tasks.artifacts.errors import StageError
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import EVALUATIONS, FACTORIZED, FINETUNED, RANKS, SHAPED, TARGETS, source_model
from tasks.artifacts.results_schema import Evaluation, Score, TargetSize
from tasks.config.params_file import section
from tasks.config.schema import Model
from tasks.data.loading import batches
from tasks.models.device import to_device
from tasks.models.model_io import SOURCE_FOLDERS, TEACHER, load, size
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import Scored
from tasks.runtime.stage_runner import run_candidate
from tasks.scoring.splits import Predictions, Scorer, load_scorer, write_predictions


class EvaluationParts(BaseModel):
    """Parts of a recipe that tell which weights were factorized, and whether the factors were trained after that."""

    source: Source
    sequential: Any
    recovery: Mapping[str, Any]  # not its type: with that, the stage would depend on the code of the recovery


def evaluate(recipe: str, keep: str) -> None:
    """Score a candidate after shaping, factorization and fine-tuning, and measure its final size.

    If fine-tuning takes no step, the final model is scored for both.

    Raises:
        StageError: the target layers of the fine-tuned model have more parameters than `keep` allows.
    """
    name, parts = candidate_name(recipe, keep), section(f"recipes.{recipe}", EvaluationParts)
    scorer, device_map = load_scorer("test", "validation"), section("model", Model).device_map
    targets, decision = Targets.model_validate_json(TARGETS.read_text()).targets, load_decision(name)
    from_teacher = parts.sequential is None and source_model(name, SOURCE_FOLDERS[parts.source]) == TEACHER
    # loads two models, so it comes before the others; not with a device map, which may place their layers differently
    alone = _losses_alone(name, targets, decision, scorer) if from_teacher and device_map is None else {}
    shaped = None
    if decision.as_shaped:
        shaped = scorer.score_on("test", *scorer.load(RANKS / name / SHAPED), "shaped").score
    before: Scored | None = None
    texts_before: dict[str, Score] = {}
    if trained := parts.recovery.get("steps") != 0:
        model, tokenizer = scorer.load(FACTORIZED / name)
        before = None if residual_rows(model) else scorer.score_on("test", model, tokenizer, "factorized")
        texts_before = scorer.on_texts(model, tokenizer, "factorized") if before else {}
    model, tokenizer = scorer.load(FINETUNED / name)
    sizes = _sizes(model, targets, alone)
    scores, predictions = scorer.all_scores(model, tokenizer, "recovered")
    if not trained:  # the factorized model computes the same; only the storage may be another
        before, texts_before = Scored(scores.score, predictions["test"]), scores.texts
    parameters = sum(size.parameters for size in sizes.values())
    if parameters > (allowed := allowance(targets, float(keep))):
        raise StageError(f"the targets keep {parameters} parameters, more than the {allowed} of keep={keep}")
    result = Evaluation(
        shaped=shaped,
        factorized=before and before.score,
        recovered=scores.score,
        validation=scores.validation,
        size=size(model, FINETUNED / name, scorer.task.max_length),
        zero_shot=scores.zero_shot,
        texts=scores.texts,
        factorized_texts=texts_before,
        continuations=scores.continuations,
        targets=sizes,
        target_parameters=parameters,
    )
    unrecovered: dict[str, Predictions] = {"factorized": {"test": before.predictions}} if before else {}
    write_predictions(name, unrecovered | {"recovered": predictions})
    EVALUATIONS.mkdir(parents=True, exist_ok=True)
    (EVALUATIONS / f"{name}.json").write_text(result.model_dump_json(indent=2))


def _losses_alone(name: str, targets: Sequence[Target], decision: Decision, scorer: Scorer) -> dict[str, float]:
    """Return target name → how far the original model's predictions move if only this target is factorized.

    Targets that stay dense or lose neurons are missing. The result is empty if evaluate.probes is 0, or if the rank
    search predicted no losses with which these could be compared.
    """
    settings, kind = scorer.settings, kind_of(scorer.task)
    if not settings.probes or decision.predicted_loss is None:
        return {}
    (dense, tokenizer), (small, _) = load(TEACHER, kind.auto), load(FACTORIZED / name, kind.auto)
    unfuse(dense, targets)
    to_device(small)
    data = kind.encode(scorer.splits["validation"], tokenizer, "validation")
    probes = data.select(range(min(settings.probes, len(data))))
    examples = list(batches(probes, kind.collate(tokenizer, dense), settings.batch_size, to_device(dense)))
    ranks = {name: rank for name, rank in decision.ranks.items() if name not in decision.narrowed}
    with_rank = [target for target in targets if ranks.get(target.name) is not None]
    return losses_alone(dense, small, with_rank, examples, kind.objective())


def _sizes(model: PreTrainedModel, targets: Sequence[Target], alone: Mapping[str, float]) -> dict[str, TargetSize]:
    ranks, rows = factorized(model), residual_rows(model)
    return {
        target.name: TargetSize(
            rank=ranks.get(target.name),
            rows=rows.get(target.name, 0),
            # the stored parameters of the linear layers, without biases; a tied head has no weight of its own
            parameters=sum(
                values.numel()
                for layer in ((target,) if isinstance(target, Tied) else target.layers)
                for part, values in model.get_submodule(layer.name).named_parameters()
                if not part.endswith("bias")
            ),
            loss_alone=alone.get(target.name),
        )
        for target in targets
    }


if __name__ == "__main__":
    run_candidate("evaluate", evaluate)
