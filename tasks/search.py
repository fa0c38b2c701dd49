"""Stage search: choose the rank of every target → models/ranks/RECIPE-KEEP and a training curve.

The curve is empty if neither shaping nor the search trains the model. If they change its weights, the changed model is
saved beside ranks.json, and so are the scores that shaping computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset
from pydantic import BaseModel
from transformers import PreTrainedModel, set_seed

from eckart.calibration.losses import Loss
from eckart.calibration.robust_gradients import RobustGradients
from eckart.calibration.statistics_files import load_statistics, save_statistics
from eckart.factorization.factorize import InOrder
from eckart.factorization.weightings import Weighting
from eckart.model.batches import Batch
from eckart.model.experts import unfuse
from eckart.model.targets import Storage, Targets
from eckart.ranks import RankSearch
from eckart.ranks.search import ChosenRanks, search_ranks
from eckart.ranks.search_problem import SearchProblem, SearchSplit
from eckart.recipe_parts import Source, train_together
from eckart.residual import Residual
from eckart.shaping import Shaping
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule
from tasks.artifacts.decision import Decision
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import IMPORTANCE, RANKS, SCORES, SEARCH_CURVES, SHAPED, TARGETS
from tasks.artifacts.task_spec import Split, load_task
from tasks.config.params_file import section
from tasks.config.schema import Clip, Count, Edges, Labels, Seed, Trainer
from tasks.data.loading import batches, encoded
from tasks.models.device import to_device
from tasks.models.model_io import SOURCE_FOLDERS, load, save
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks._prediction import Collate
from tasks.runtime.stage_runner import explained, leads, output, run_candidate, say
from tasks.training.loop import train


class SearchParts(BaseModel):
    """Parts of a recipe on which the ranks depend."""

    source: Source
    shaping: Shaping | None
    weighting: Weighting
    ranks: RankSearch
    residual: Residual | None
    storage: Storage
    sequential: InOrder | None


def search(recipe: str, keep: str) -> None:
    """Search the rank of every target. Save the ranks, their predicted losses, and the model if its weights changed."""
    name, parts = candidate_name(recipe, keep), section(f"recipes.{recipe}", SearchParts)
    seed, trainer, size = section("seed", Seed), section("trainer", Trainer), section("importance.batch_size", Count)
    kind = kind_of(load_task())
    objective = kind.objective(section("importance.labels", Labels))
    set_seed(seed)
    model, tokenizer = load(SOURCE_FOLDERS[parts.source], kind.auto)
    data = _Data(
        model=model,
        collate=kind.collate(tokenizer, model),
        encoded=cache(lambda split: encoded(split, tokenizer)),
        batch_size=size,
        loss=objective.training_loss,
        dropout=objective.dropout,
        seed=seed,
        trainer=trainer,
        curve=SEARCH_CURVES / f"{name}.jsonl",
    )
    targets = Targets.model_validate_json(TARGETS.read_text()).targets
    unfuse(model, targets)
    problem = SearchProblem(
        model=model,
        targets=targets,
        keep=float(keep),
        seed=seed,
        objective=objective,
        weighting=parts.weighting,
        statistics=load_statistics(IMPORTANCE),
        robust=RobustGradients(section("importance.clip", Clip), section("importance.edges", Edges)),
        train=data.train,
        calibration=data.calibration,
        in_order=parts.sequential,
    )
    with explained(), output(RANKS / name) as folder:
        chosen = search_ranks(
            problem, parts.ranks, shaping=parts.shaping, residual=parts.residual, storage=parts.storage
        )
        decision = _decision(chosen, float(keep), data.steps)
        _report(decision, chosen)
        (folder / "ranks.json").write_text(decision.model_dump_json(indent=2))
        if chosen.shaped:
            save_statistics(chosen.shaped.scores, folder / SCORES)
        if chosen.shaped or chosen.changed:
            save(model, folder / SHAPED)


@dataclass
class _Data:
    """Model and data of a rank search. Every training of the model appends to the same training curve."""

    model: PreTrainedModel
    collate: Collate
    encoded: Callable[[Split], Dataset]
    """Function that returns the tokenized examples of a split: a search that does not train needs no training data."""
    batch_size: int
    """Examples in each batch of `calibration`."""
    loss: Loss | None
    dropout: bool
    seed: int
    trainer: Trainer
    curve: Path
    steps: int = 0
    """Training steps taken so far."""

    def __post_init__(self) -> None:
        self.curve.parent.mkdir(parents=True, exist_ok=True)
        if leads():
            self.curve.write_text("")

    def train(
        self, settings: Optimization, rule: Rule, examples: int | None = None, split: SearchSplit = "train"
    ) -> None:
        """Train the model on at most `examples` random examples of `split` (None: all), then move it to the CPU."""
        data = self.encoded(split)
        if examples is not None and examples < len(data):
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.seed))
            data = data.select(order[:examples].tolist())
        self.steps += train(
            self.model,
            self.collate,
            data,
            self.curve,
            settings,
            self.trainer,
            seed=self.seed,
            rules=[rule],
            before=self.steps,
            loss=self.loss,
            dropout=self.dropout,
        )
        self.model.cpu()

    def calibration(self, examples: int | None, skip: int = 0) -> Sequence[Batch]:
        """Move the model to the accelerator; return calibration examples there, in batches (see Calibration)."""
        data = self.encoded("calibration")
        rows = [*range(len(data))[skip : None if examples is None else skip + examples]]  # select refuses empty ranges
        return list(batches(data.select(rows), self.collate, self.batch_size, to_device(self.model)))


def _decision(chosen: ChosenRanks, keep: float, steps: int) -> Decision:
    before, after = chosen.parameters
    return Decision(
        keep=keep,
        ranks=dict(chosen.ranks),
        predicted_loss=chosen.predicted_loss,
        parameters_before=before,
        parameters_after=after,
        steps=steps,
        reached=dict(chosen.reached),
        widths=dict(chosen.widths),
        average_rank=chosen.shaped and chosen.shaped.average_rank,
        as_shaped=chosen.shaped is not None and not chosen.changed,
    )


def _report(decision: Decision, chosen: ChosenRanks) -> None:
    if chosen.remark:
        say(chosen.remark)
    if decision.reached:
        say(f"The thresholds met {decision.reached_in_words}")
    if shaped := chosen.shaped:
        say(
            f"{shaped.share_left:.0%} of the weights are left, of rank {shaped.average_rank:.1f} on average; "
            f"{shaped.empty_rows} rows are empty"
        )
    share = decision.parameters_after / decision.parameters_before
    narrowed = len(decision.narrowed)
    dense = sum(rank is None and name not in decision.narrowed for name, rank in decision.ranks.items())
    say(
        f"{len(decision.ranks)} targets keep {share:.4f} of their parameters, {dense} stay dense"
        + f", {narrowed} lose neurons" * bool(narrowed)
    )


def _trains_together(recipe: str) -> bool:
    """Whether the recipe trains the model in this stage, and several processes can share this training."""
    parts = section(f"recipes.{recipe}", SearchParts)
    return train_together([parts.shaping, parts.ranks])


if __name__ == "__main__":
    run_candidate("search", search, trains=_trains_together)
