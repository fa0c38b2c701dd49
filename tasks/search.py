"""Search: decide the ranks of a candidate → models/ranks/RECIPE-KEEP and, where it trains, its training curve.

Beside ranks.json stand, for recipes that change the dense weights before they are factorized, the model so `shaped`,
and the scores that shaping gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from eckart import hub
from eckart.budget import Rank, Ranks, allowance, total
from eckart.evidence import Evidence, load_evidence, save_evidence
from eckart.layers import set_weight
from eckart.ranks import RankSearch
from eckart.ranks import search as search_by_formula
from eckart.ranks.hypernetwork import Hypernetwork, HypernetworkSearch
from eckart.ranks.threshold import Threshold, ThresholdSearch
from eckart.ranks.tolerance import Tolerance
from eckart.ranks.tolerance import search as search_by_tolerance
from eckart.residual import Residual
from eckart.shaping import Shaping, WeightPruning, average_rank
from eckart.svd import decompose, spectrum
from eckart.targets import Target, weight_of
from eckart.training_rules import Rule
from eckart.weighting import ErrorNorm, Weighting, weigh
from tasks.batches import batches, encoded
from tasks.candidate_files import RANKS, SCORES, SEARCH_CURVES, SHAPED, Decision
from tasks.dataset import load_task
from tasks.importance_files import IMPORTANCE, load_targets
from tasks.kinds import kind_of
from tasks.kinds.kind import Collate, TaskKind, loss_of_training
from tasks.models import TEACHER, load
from tasks.params import Importance, Seed, Trainer, section
from tasks.stage import StageError, candidate_name, explained, leads, output, run_candidate, say
from tasks.training import train

Found = TypeVar("Found")
Spectra = Mapping[str, Tensor]
"""Target → weighted singular values, descending."""


@dataclass
class _Search:
    """A candidate on its way to its ranks. The model is the teacher's, until shaping or a search changes it."""

    keep: float
    weighting: Weighting
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: TaskKind
    targets: tuple[Target, ...]
    evidence: Evidence
    curve: Path
    seed: int
    steps: int = 0
    changed: bool = False


def search(recipe: str, keep: str) -> None:
    """Write the rank of every target, the loss that the weighted spectrum predicts, and what was trained on the way."""
    name, part = candidate_name(recipe, keep), f"recipes.{recipe}"
    shaping = section(f"{part}.shaping", Shaping | None)
    residual = section(f"{part}.residual", Residual | None)
    method = section(f"{part}.ranks", RankSearch)
    seed = section("seed", Seed)
    set_seed(seed)
    kind = kind_of(load_task())
    model, tokenizer = load(TEACHER, kind.auto)
    this = _Search(
        keep=float(keep) * (residual.low_rank if residual else 1),  # sparse rows get the rest
        weighting=section(f"{part}.weighting", Weighting),
        model=model,
        tokenizer=tokenizer,
        kind=kind,
        targets=load_targets().targets,
        evidence=load_evidence(IMPORTANCE),
        curve=SEARCH_CURVES / f"{name}.jsonl",
        seed=seed,
    )
    this.curve.parent.mkdir(parents=True, exist_ok=True)
    if leads():
        this.curve.write_text("")
    with explained(), output(RANKS / name) as folder:
        rank_left = _shape(this, shaping, folder) if shaping else None
        ranks, spectra = _ranks(this, method, bool(residual))
        decision = Decision(
            recipe=recipe,
            keep=float(keep),
            ranks=dict(ranks),
            predicted_loss=spectra and {name: _loss_left(spectra[name], rank) for name, rank in ranks.items()},
            parameters_before=sum(target.parameters for target in this.targets),
            parameters_after=total(this.targets, ranks),
            steps=this.steps,
            average_rank=rank_left,
        )
        _check_and_say(decision, this)
        if this.changed:
            hub.save(this.model, folder / SHAPED)
            tokenizer.save_pretrained(folder / SHAPED)
        (folder / "ranks.json").write_text(decision.model_dump_json(indent=2))


def _shape(this: _Search, shaping: Shaping, folder: Path) -> float:
    """Prune the model; its scores join the evidence. Returns the mean rank that is left."""
    rule = WeightPruning(this.model, this.targets, shaping)
    _train(this, shaping.options(), rule)
    scores = rule.evidence()
    save_evidence(scores, folder / SCORES)
    this.evidence, this.changed = {**this.evidence, **scores}, True
    rank = average_rank(this.model, this.targets)
    say(f"{shaping.remaining:.0%} of the weights are left, of rank {rank:.1f} on average")
    return rank


def _ranks(this: _Search, method: RankSearch, beside_rows: bool) -> tuple[Ranks, Spectra | None]:
    """The ranks, and the weighted spectra that they cut; None where the search itself changed the weights."""
    if not this.keep:
        return {target.name: 0 for target in this.targets}, None
    try:
        match method:
            case Hypernetwork():
                return _by_hypernetwork(this, method)
            case Threshold():
                return _by_threshold(this, method), None
            case Tolerance():
                return _by_tolerance(this, method), None
            case _:
                spectra = {target.name: _of_target(spectrum, this, target) for target in this.targets}
                return search_by_formula(method, this.targets, spectra, this.keep), spectra
    except ValueError as error:
        if beside_rows:
            raise StageError(
                f"for the factors, residual.low_rank · keep: {error}, or raise residual.low_rank"
            ) from error
        raise


def _by_hypernetwork(this: _Search, method: Hypernetwork) -> tuple[Ranks, Spectra | None]:
    parts = {target.name: _of_target(decompose, this, target) for target in this.targets}
    rule = HypernetworkSearch(this.model, this.targets, parts, method, this.keep, this.seed)
    _train(this, method.options(), rule, constant=True)  # section 4.1: a constant learning rate
    selected = rule.shaped_weights()
    if selected is None:
        return rule.ranks(), {name: part.spectrum for name, part in parts.items()}
    for name, weight in selected.items():
        set_weight(this.model.get_submodule(name), weight)
    this.changed = True
    return rule.ranks(), None


def _by_threshold(this: _Search, method: Threshold) -> Ranks:
    rule = ThresholdSearch(this.model, this.targets, method, this.keep)
    _train(this, method.options(), rule, constant=True)  # so that `steps` is a limit and decides nothing else
    this.changed = True
    return rule.ranks()


def _by_tolerance(this: _Search, method: Tolerance) -> Ranks:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = encoded("calibration", this.tokenizer)
    data = data.select(range(min(method.rows, len(data))))
    some = list(batches(data, _collate(this), section("importance", Importance).batch_size, device))
    this.model.to(device)  # type: ignore[arg-type]
    this.changed = True
    return search_by_tolerance(this.model, this.targets, method, this.keep, some, this.weighting, loss=this.kind.loss)


def _train(this: _Search, options: Mapping[str, float], rule: Rule, constant: bool = False) -> None:
    this.steps += train(
        this.model,
        _collate(this),
        encoded("train", this.tokenizer),
        this.curve,
        **options,  # type: ignore[arg-type]
        seed=this.seed,
        rules=[rule],
        schedule="constant" if constant else "linear",
        before=this.steps,
        loss=loss_of_training(this.kind),
        **section("trainer", Trainer).options(),
    )
    this.model.cpu()


def _is_shared(recipe: str) -> bool:
    """Whether it trains, and several processes can do so together."""
    ranks = section(f"recipes.{recipe}.ranks", RankSearch)
    return section(f"recipes.{recipe}.shaping", Shaping | None) is not None and not isinstance(
        ranks, Hypernetwork | Threshold
    )


def _collate(this: _Search) -> Collate:
    return this.kind.collate(this.tokenizer, this.model)


def _of_target(what: Callable[[Tensor, ErrorNorm], Found], this: _Search, target: Target) -> Found:
    """`what` of a target's weight and norm of errors; an error names the target."""
    try:
        weight = weight_of(this.model.get_submodule(target.name))
        return what(weight, weigh(this.weighting, target, this.evidence))
    except ValueError as error:
        raise StageError(f"{target.name}: {error}") from error


def _check_and_say(decision: Decision, this: _Search) -> None:
    if this.keep and decision.parameters_after > allowance(this.targets, this.keep):
        raise StageError(
            f"the ranks keep {decision.parameters_after} parameters, more than {this.keep:g} of all allows"
        )
    share = decision.parameters_after / decision.parameters_before
    dense = sum(rank is None for rank in decision.ranks.values())
    say(f"{len(decision.ranks)} targets keep {share:.4f} of their parameters, {dense} stay dense")


def _loss_left(values: Tensor, rank: Rank) -> float:
    energies = values.square()
    return 0.0 if rank is None else float(energies[rank:].sum() / energies.sum().clamp(min=1e-300))


if __name__ == "__main__":
    run_candidate("search", search, trains=_is_shared)
