"""Factorize: truncate the targets to their ranks → models/factorized/RECIPE-KEEP, a loadable Hugging Face folder."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart.calibration.statistics import Statistics, load_statistics
from eckart.factorization.factorize import InOrder, factorize_at_once, factorize_in_order
from eckart.factorization.weightings import Weighting
from eckart.model import hf_format
from eckart.model.layers import factorized
from eckart.recipe_parts import Source
from eckart.residual import Residual
from tasks.artifacts.importance_files import IMPORTANCE, load_targets
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import FACTORIZED, RANKS, SCORES, load_decision, source_model
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Importance, Model, section
from tasks.data.loading import batches, encoded
from tasks.models.model_io import DENSE, load, place
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import NlpTask
from tasks.runtime.stage_runner import explained, output, run_candidate, say


def factorize(recipe: str, keep: str) -> None:
    """Replace every target that has a rank by the best factors of that rank under the recipe's weighting.

    Whatever the recipe's storage these are factors, at the ranks that the storage pays for: recovery trains them, and
    brings them into their storage, which computes the same. With a residual, what the factors leave of W stands beside
    them until recovery has pruned it.
    """
    name = candidate_name(recipe, keep)
    order = section(f"recipes.{recipe}.sequential", InOrder | None)
    device_map = section("model", Model).device_map if order else None
    kind = kind_of(load_task())
    begun_with = DENSE[section(f"recipes.{recipe}.source", Source)]
    model, tokenizer = load(source_model(name, begun_with), kind.auto, device_map=device_map)
    with explained():
        if order:
            _in_order(model, tokenizer, kind, recipe, name, order)
        else:
            _at_once(model, recipe, name)
    with output(FACTORIZED / name) as folder:
        hf_format.save(model, folder)
        tokenizer.save_pretrained(folder)
    say(f"{len(factorized(model))} linear maps factorized, {model.num_parameters():,} parameters in all")


def _in_order(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: NlpTask,
    recipe: str,
    name: str,
    order: InOrder,
) -> None:
    data, size = encoded("calibration", tokenizer), section("importance", Importance).batch_size
    factorize_in_order(
        model,
        load_targets().targets,
        load_decision(name).ranks,
        section(f"recipes.{recipe}.weighting", Weighting),
        _statistics(name),
        batches(data, kind.collate(tokenizer, model), size, place(model)),
        order,
    )


def _at_once(model: PreTrainedModel, recipe: str, name: str) -> None:
    factorize_at_once(
        model,
        load_targets().targets,
        load_decision(name).ranks,
        section(f"recipes.{recipe}.weighting", Weighting),
        _statistics(name),
        residual=section(f"recipes.{recipe}.residual", Residual | None) is not None,
    )


def _statistics(name: str) -> Statistics:
    return {**load_statistics(IMPORTANCE), **load_statistics(RANKS / name / SCORES)}


if __name__ == "__main__":
    run_candidate("factorize", factorize)
