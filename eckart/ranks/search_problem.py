"""The input of shaping and rank searches, before anything is factorized, and the result of a search."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from eckart.calibration.losses import Batch
from eckart.calibration.statistics import Statistics
from eckart.factorization.decomposition import decompose_target
from eckart.factorization.weighted_svd import Decomposition, spectrum
from eckart.factorization.weightings import Weighting, weigh
from eckart.model.targets import Product, Target, weight_of
from eckart.ranks.budget import Ranks
from eckart.recipe_parts import Method
from eckart.training.optimizer_settings import Optimization
from eckart.training.problem import Problem
from eckart.training.rules import Rule

Spectra = Mapping[str, Tensor]
"""Target → weighted singular values, descending `(min(out, in),)`."""

KEPT = {"kept": "Parameters of all targets after ÷ before, were they factorized at this step."}
"""The caption of a measure that several searches have."""


class Train(Protocol):
    """Runs the one training loop on the task and leaves the model on the CPU.

    Called with the settings of an optimizer, a rule, and the rows of the training split, at random, that it sees at
    most; None is all.
    """

    def __call__(self, settings: Optimization, rule: Rule, rows: int | None = None) -> None: ...


@dataclass(frozen=True)
class SearchProblem(Problem):
    """The input of shaping and of rank searches; the model is dense.

    Attributes:
        weighting: the recipe's.
        statistics: what `weighting` reads, of the dense model.
        train: the training loop, for searches that train.
        calibration: batches of so many rows of the calibration sample at most, to where it brings the model.
    """

    weighting: Weighting
    statistics: Statistics
    train: Train
    calibration: Callable[[int], Sequence[Batch]]

    def spectra(self) -> Spectra:
        """Return the weighted singular values of every target's present weight.

        Raises:
            ValueError: a weight or its statistics are not fit; the message names the target.
        """
        return {target.name: self._spectrum(target) for target in self.targets}

    def decompositions(self) -> dict[str, Decomposition]:
        """Return the weighted decompositions of all targets, none of which may be a Product.

        Raises:
            ValueError: as `spectra`.
        """
        parts = {
            target.name: decompose_target(self.model, target, self.weighting, self.statistics)
            for target in self.targets
        }
        return cast("dict[str, Decomposition]", parts)

    def _spectrum(self, target: Target) -> Tensor:
        if isinstance(target, Product):
            return decompose_target(self.model, target, self.weighting, self.statistics).spectrum
        try:
            weight = weight_of(self.model.get_submodule(target.name))
            return spectrum(weight, weigh(self.weighting, target, self.statistics))
        except ValueError as error:
            raise ValueError(f"{target.name}: {error}") from error


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        ranks: of every target; None where it stays dense.
        spectra: that the ranks cut; None where there is none to predict a loss by.
        changed: whether the weights of the model are others now.
    """

    ranks: Ranks
    spectra: Spectra | None = None
    changed: bool = False


class ByFormula(Method):
    """Base class of a search that needs nothing but spectra."""

    @property
    def pairs(self) -> bool:
        return True

    def search(self, problem: SearchProblem) -> SearchResult:
        spectra = problem.spectra()
        return SearchResult(self.ranks(problem.targets, spectra, problem.keep), spectra)

    @abstractmethod
    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        """Return ranks for `targets` that keep at most `keep` of their parameters.

        Raises:
            NoRank: `keep` leaves some target no rank.
        """
