"""Search: decide the ranks of a candidate → models/ranks/RECIPE-KEEP and, where it trains, its training curve.

Beside ranks.json stand, for recipes that change the dense weights before they are factorized, the model so `shaped`,
and the scores that shaping gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from eckart.calibration.losses import Batch, Loss
from eckart.calibration.statistics import load_statistics, save_statistics
from eckart.factorization.weightings import Weighting
from eckart.model import hf_format
from eckart.model.targets import Storage
from eckart.ranks import RankSearch
from eckart.ranks.budget import NoRank, Rank, allowance, stored, total
from eckart.ranks.search_problem import Found, SearchProblem
from eckart.recipe_parts import Source, train_together
from eckart.residual import Residual
from eckart.shaping import Shaping
from eckart.shaping.outcome import average_rank, empty_rows, share_left
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule
from tasks.artifacts.importance_files import IMPORTANCE, load_targets
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import RANKS, SCORES, SEARCH_CURVES, SHAPED, Decision
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Importance, Labels, Seed, Trainer, section
from tasks.data.loading import batches, encoded
from tasks.models.model_io import DENSE, load
from tasks.nlp_tasks import kind_of, objective_of
from tasks.nlp_tasks.nlp_task import Collate
from tasks.runtime.stage_runner import StageError, explained, leads, output, run_candidate, say
from tasks.training.loop import train


def search(recipe: str, keep: str) -> None:
    """Write the rank of every target, the loss that the weighted spectrum predicts, and what was trained on the way."""
    name, part = candidate_name(recipe, keep), f"recipes.{recipe}"
    shaping = section(f"{part}.shaping", Shaping | None)
    residual = section(f"{part}.residual", Residual | None)
    method = section(f"{part}.ranks", RankSearch)
    seed, task = section("seed", Seed), load_task()
    set_seed(seed)
    kind = kind_of(task)
    model, tokenizer = load(DENSE[section(f"{part}.source", Source)], kind.auto)
    collate, objective = kind.collate(tokenizer, model), objective_of(task, section("importance.labels", Labels))
    training = _Training(model, tokenizer, collate, SEARCH_CURVES / f"{name}.jsonl", seed, objective.training_loss)
    problem = SearchProblem(
        model=model,
        targets=stored(load_targets().targets, section(f"{part}.storage", Storage)),
        keep=float(keep) * (residual.low_rank if residual else 1),  # sparse rows get the rest
        seed=seed,
        objective=objective,
        weighting=section(f"{part}.weighting", Weighting),
        statistics=load_statistics(IMPORTANCE),
        train=training,
        calibration=partial(_calibration, model, tokenizer, collate),
    )
    with explained(), output(RANKS / name) as folder:
        rank_left = None
        if shaping:
            problem = _shape(problem, shaping, float(keep), folder)
            rank_left = average_rank(model, problem.targets)
            left = share_left(model.get_submodule(target.name) for target in problem.targets)
            empty = empty_rows(model, problem.targets)
            say(f"{left:.0%} of the weights are left, of rank {rank_left:.1f} on average; {empty} rows are empty")
        found = _find(problem, method, bool(residual))
        decision = Decision(
            keep=float(keep),
            ranks=dict(found.ranks),
            predicted_loss=found.spectra
            and {name: _error_left(found.spectra[name], rank) for name, rank in found.ranks.items()},
            parameters_before=sum(target.parameters for target in problem.targets),
            parameters_after=total(problem.targets, found.ranks),
            steps=training.steps,
            average_rank=rank_left,
            as_shaped=bool(shaping) and not found.changed,
        )
        _check_and_say(decision, problem)
        if shaping or found.changed:
            hf_format.save(model, folder / SHAPED)
            tokenizer.save_pretrained(folder / SHAPED)
        (folder / "ranks.json").write_text(decision.model_dump_json(indent=2))


@dataclass
class _Training:
    """Trainings of one model that follow each other on one curve."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    collate: Collate
    curve: Path
    seed: int
    loss: Loss | None
    steps: int = 0
    """That were taken."""

    def __post_init__(self) -> None:
        self.curve.parent.mkdir(parents=True, exist_ok=True)
        if leads():
            self.curve.write_text("")

    def __call__(self, settings: Optimization, rule: Rule, rows: int | None = None) -> None:
        self.steps += train(
            self.model,
            self.collate,
            _sample(encoded("train", self.tokenizer), rows, self.seed),
            self.curve,
            **settings.options(),
            seed=self.seed,
            rules=[rule],
            before=self.steps,
            loss=self.loss,
            **section("trainer", Trainer).options(),
        )
        self.model.cpu()


def _sample(data: Dataset, rows: int | None, seed: int) -> Dataset:
    """So many of the rows at random, or all where there are no more."""
    if rows is None or rows >= len(data):
        return data
    return data.select(torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:rows].tolist())


def _calibration(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, collate: Collate, rows: int
) -> Sequence[Batch]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = encoded("calibration", tokenizer)
    some = data.select(range(min(rows, len(data))))
    model.to(device)  # type: ignore[arg-type]
    return list(batches(some, collate, section("importance", Importance).batch_size, device))


def _shape(problem: SearchProblem, shaping: Shaping, keep: float, folder: Path) -> SearchProblem:
    """Shape the model for the whole `keep`, sparse rows included; the scores that this gives join the statistics."""
    scores = shaping.shape(replace(problem, keep=keep))
    save_statistics(scores, folder / SCORES)
    return replace(problem, statistics={**problem.statistics, **scores})


def _find(problem: SearchProblem, method: RankSearch, beside_rows: bool) -> Found:
    if not problem.keep:
        return Found({target.name: 0 for target in problem.targets})
    try:
        return method.search(problem)
    except NoRank as error:
        if beside_rows:
            raise StageError(
                f"for the factors, residual.low_rank · keep: {error}, or raise residual.low_rank"
            ) from error
        raise


def _check_and_say(decision: Decision, problem: SearchProblem) -> None:
    if problem.keep and decision.parameters_after > allowance(problem.targets, problem.keep):
        raise StageError(
            f"the ranks keep {decision.parameters_after} parameters, more than {problem.keep:g} of all allows"
        )
    share = decision.parameters_after / decision.parameters_before
    dense = sum(rank is None for rank in decision.ranks.values())
    say(f"{len(decision.ranks)} targets keep {share:.4f} of their parameters, {dense} stay dense")


def _error_left(spectrum: Tensor, rank: Rank) -> float:
    return 0.0 if rank is None else float(spectrum[rank:].square().sum() / 2)


def _is_shared(recipe: str) -> bool:
    """Whether it trains, and several processes can do so together."""
    part = f"recipes.{recipe}"
    return train_together([section(f"{part}.shaping", Shaping | None), section(f"{part}.ranks", RankSearch)])


if __name__ == "__main__":
    run_candidate("search", search, trains=_is_shared)
