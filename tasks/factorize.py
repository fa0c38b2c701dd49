"""Factorize: truncate the targets to their ranks → models/factorized/RECIPE-KEEP, a loadable Hugging Face folder."""

from __future__ import annotations

from eckart import hub, layers
from eckart.evidence import load_evidence
from eckart.residual import Residual, rest
from eckart.svd import decompose
from eckart.targets import weight_of
from eckart.weighting import Weighting, weigh
from tasks.calibration import IMPORTANCE, load_targets
from tasks.candidates import FACTORIZED, RANKS, SCORES, load_decision, source_model
from tasks.dataset import load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, load
from tasks.params import section
from tasks.stage import StageError, candidate, output, run_candidate, say


def factorize(recipe: str, keep: str) -> None:
    """Replace every target that has a rank by the best factors of that rank under the recipe's weighting.

    With a residual, what the factors leave of W stands beside them until recovery has pruned it.
    """
    name, weighting = candidate(recipe, keep), section(f"recipes.{recipe}.weighting", Weighting)
    residual = section(f"recipes.{recipe}.residual", Residual | None)
    ranks = load_decision(name).ranks
    model, tokenizer = load(source_model(name, TEACHER), kind_of(load_task()).auto)
    evidence = {**load_evidence(IMPORTANCE), **load_evidence(RANKS / name / SCORES)}
    for target in load_targets().targets:
        rank = ranks[target.name]
        if rank is None:
            continue
        weight = weight_of(model.get_submodule(target.name))
        try:
            left, right = decompose(weight, weigh(weighting, target, evidence)).truncate(rank)
        except ValueError as error:
            raise StageError(f"{target.name}: {error}") from error
        layers.factorize(model, target.name, left, right, rest(weight, left, right) if residual else None)
    with output(FACTORIZED / name) as folder:
        hub.save(model, folder)
        tokenizer.save_pretrained(folder)
    say(f"{len(layers.factorized(model))} targets factorized, {model.num_parameters():,} parameters in all")


if __name__ == "__main__":
    run_candidate("factorize", factorize)
