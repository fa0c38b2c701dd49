"""The report of a compression, for each layer and for the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import cast

from eckart.model.census import Census
from eckart.model.mlps import narrowed
from eckart.ranks.budget import Rank, cost, largest_rank
from eckart.ranks.search import ChosenRanks


@dataclass(frozen=True)
class CompressedTarget:
    """Size, rank and predicted loss of one target layer after compression.

    Attributes:
        shape: shape `(out, in)` of the layer's dense weight.
        rank: rank of the factors; None if the layer stays dense.
        parameters: (before, after), without biases.
        predicted_loss: ½ Σ S_k² over the weighted singular values S_k that were cut, in the unit that
            `Report.loss_unit` names. None if the rank search predicts no loss. An MLP that loses neurons has its loss
            at its last layer.
        no_rank: whether the layer stays dense at any keep, because no rank makes it smaller.
        narrowed: whether the layer is smaller because its MLP lost neurons. `rank` is that of the smaller layer.
    """

    shape: tuple[int, int]
    rank: Rank
    parameters: tuple[int, int]
    predicted_loss: float | None
    no_rank: bool
    narrowed: bool


@dataclass(frozen=True)
class Report:
    """Report of a compression, for each layer and for the whole model; print it for a summary.

    Attributes:
        targets: name of a target layer → its result, in order of execution.
        excluded: name of each other linear layer or weight matrix → why it is not a target.
        census: the original model's numbers of parameters, by kind.
        parameters: the whole model's number of parameters, (before, after).
        macs: mean multiply-accumulates for an example of the first batch, (before, after).
        scores: the model's score, (before, after); None unless `largest_drop` was given.
        refined: name of each refined transformer layer → its error on held-out examples, (before, after).
        remark: what the rank search says about its choice, or "".
        loss_unit: what the predicted losses measure; the recipe's weighting decides it.
        seconds: seconds that each part took: statistics, search, factorization, and with `largest_drop` scoring.
            Several keeps share the statistics. With `largest_drop`, all sizes that were tried count.
    """

    targets: Mapping[str, CompressedTarget]
    excluded: Mapping[str, str]
    census: Census
    parameters: tuple[int, int]
    macs: tuple[int, int]
    scores: tuple[float, float] | None
    refined: Mapping[str, tuple[float, float]]
    remark: str
    loss_unit: str
    seconds: Mapping[str, float]

    @property
    def target_parameters(self) -> tuple[int, int]:
        """Number of parameters of all target layers, (before, after), without biases."""
        before, after = zip(*(target.parameters for target in self.targets.values()), strict=True)
        return sum(before), sum(after)

    @property
    def keep(self) -> float:
        """Share of the target layers' parameters that is kept."""
        before, after = self.target_parameters
        return after / before

    @property
    def predicted_loss(self) -> float | None:
        """Sum of the predicted losses of all target layers; None if any layer has no predicted loss."""
        losses = [target.predicted_loss for target in self.targets.values()]
        return None if None in losses else sum(cast("list[float]", losses))

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each target layer that was factorized."""
        return {name: target.rank for name, target in self.targets.items() if target.rank is not None}

    def __str__(self) -> str:
        before, after = self.target_parameters
        narrowed = [target for target in self.targets.values() if target.narrowed]
        dense = [target for target in self.targets.values() if target.rank is None and not target.narrowed]
        unshrinkable = sum(target.no_rank for target in dense)
        ranks = sorted(self.ranks.values())
        lines = [
            ("parameters", f"{_change(self.parameters)}; targets {before:,} → {after:,} ({self.keep:.1%} kept)"),
            ("MACs", f"{_change(self.macs)} an example"),
            (
                "targets",
                f"{len(self.targets)}: {len(ranks)} factorized, {len(dense)} left dense"
                + (f" ({unshrinkable} because no rank makes them smaller)" if unshrinkable else "")
                + f"; {len(narrowed)} have fewer neurons" * bool(narrowed),
            ),
        ]
        if ranks:
            lines.append(("ranks", f"{ranks[0]} / {median(ranks):g} / {ranks[-1]} (minimum / median / maximum)"))
        others = [f"{count:,} in {name}" for name, count in self.census.rows if name != "targets"]
        if others:
            lines.append(("unchanged", "; ".join(others)))
        if self.predicted_loss is not None:
            lines.append(("predicted loss", f"{self.predicted_loss:.3g}: {self.loss_unit}"))
        if self.remark:
            lines.append(("search", self.remark))
        if self.scores is not None:
            lines.append(("score", "{:.4g} → {:.4g}".format(*self.scores)))
        if self.refined:
            middle = (median(errors[place] for errors in self.refined.values()) for place in (0, 1))
            lines.append(
                (
                    "refined",
                    f"{len(self.refined)} layers; held-out error {next(middle):.3g} → {next(middle):.3g} (median)",
                )
            )
        lines.append(("seconds", ", ".join(f"{name} {taken:.1f}" for name, taken in self.seconds.items())))
        if self.census.warning:
            lines.append(("warning", self.census.warning))
        lines.append(("next", "fine-tune it like any model (transformers.Trainer), then eckart.save(model, folder)"))
        return "\n".join(f"{name:<16}{text}" for name, text in lines)


def compressed_targets(chosen: ChosenRanks) -> dict[str, CompressedTarget]:
    """Return name of a target → its result."""
    return {
        target.name: CompressedTarget(
            shape=(target.out_features, target.in_features),
            rank=chosen.ranks[target.name],
            parameters=(target.parameters, cost(after, chosen.ranks[target.name])),
            predicted_loss=None if chosen.predicted_loss is None else chosen.predicted_loss[target.name],
            no_rank=not largest_rank(target),
            narrowed=after != target,
        )
        for target, after in zip(chosen.targets, narrowed(chosen.targets, chosen.widths), strict=True)
    }


def _change(numbers: tuple[int, int]) -> str:
    before, after = numbers
    return f"{before:,} → {after:,} (−{1 - after / before:.1%})" if after < before else f"{before:,} → {after:,}"
