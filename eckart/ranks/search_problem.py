"""The input of shaping and rank searches, which run before the factorization, and the result of a search."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from torch import Tensor

from eckart.calibration.robust_gradients import UNCHANGED, RobustGradients
from eckart.calibration.statistics import Statistics
from eckart.factorization.decomposition import decompose_target
from eckart.factorization.weighted_svd import Decomposition, spectrum
from eckart.factorization.weightings import Weighting, weigh
from eckart.model.batches import Batch
from eckart.model.mlps import Widths
from eckart.model.targets import Product, Target, weight_of
from eckart.progress import Progress, silent
from eckart.ranks.budget import Ranks
from eckart.recipe_parts import Method
from eckart.training.optimizer_settings import Optimization
from eckart.training.problem import Problem
from eckart.training.rules import Rule

if TYPE_CHECKING:
    from eckart.factorization.factorize import InOrder

Spectra = Mapping[str, Tensor]
"""Target name → its weighted singular values `(min(out, in),)`, descending."""

SearchSplit = Literal["train", "calibration"]
"""A split that a search may train on."""

KEPT = {"kept": "Parameters of all targets after ÷ before, were they factorized at this step."}
"""Caption of the measure `kept`, which several searches report."""


def losses_of_components(spectrum: Tensor) -> Tensor:
    """Return the predicted loss of cutting each component of a target, ½ S_k², from its weighted singular values."""
    return spectrum.square() / 2


class Train(Protocol):
    """Function that trains the search's model on the task, with the common training loop, and leaves it on the CPU.

    Its arguments are the settings of the optimizer, the training rule of the method, the largest number of examples to
    use, drawn at random (None: all), and the split that they are taken from.
    """

    def __call__(
        self, settings: Optimization, rule: Rule, examples: int | None = None, split: SearchSplit = "train"
    ) -> None: ...


class Calibration(Protocol):
    """Function that returns calibration examples in batches: at most `examples` after the first `skip`; None: all.

    Afterwards the search's model is on the device of these batches.
    """

    def __call__(self, examples: int | None, skip: int = 0) -> Sequence[Batch]: ...


@dataclass(frozen=True)
class SearchProblem(Problem):
    """Input of shaping and of rank searches, with a model that is still dense.

    Attributes:
        weighting: weighting of the recipe.
        statistics: calibration statistics of the dense model that `weighting` reads.
        train: runs the training loop, for searches that train.
        calibration: returns the calibration examples.
        robust: how `statistics` were gathered, for searches that gather their own.
        progress: shows how far the search has come.
        in_order: settings of the factorization in order of execution that follows; None: all at once.
    """

    weighting: Weighting
    statistics: Statistics
    train: Train
    calibration: Calibration
    robust: RobustGradients = UNCHANGED
    progress: Progress = field(default_factory=lambda: silent)  # not the function itself, which would be a method
    in_order: InOrder | None = None

    def spectra(self) -> Spectra:
        """Return the weighted singular values of every target's current weight.

        Raises:
            ValueError: a weight or its statistics cannot be decomposed; the message names the target.
        """
        targets = self.progress(self.targets, "Singular values", "target")
        return {target.name: self._spectrum(target) for target in targets}

    def decompositions(self) -> dict[str, Decomposition]:
        """Return the weighted decomposition of every target's current weight: target name → decomposition.

        Raises:
            ValueError: a weight or its statistics cannot be decomposed; the message names the target.
        """
        return {
            target.name: decompose_target(self.model, target, self.weighting, self.statistics)
            for target in self.progress(self.targets, "Decompositions", "target")
        }

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
    """Result of a rank search.

    Attributes:
        ranks: rank of every target; None if it stays dense.
        spectra: weighted singular values that the ranks truncate, of all targets with a rank; None if no loss can be
            predicted from them.
        changed: whether the search changed the weights of the model.
        remark: a sentence about the choice for the log and the report, or "".
        widths: the MLPs to narrow. Ranks and spectra of their targets are those of the smaller layers.
        reached: share of the targets' parameters → training steps after which the targets first kept no more than it.
    """

    ranks: Ranks
    spectra: Spectra | None = None
    changed: bool = False
    remark: str = ""
    widths: Widths = field(default_factory=dict)
    reached: Mapping[float, int] = field(default_factory=dict)


class ByFormula(Method):
    """Base class of rank searches that compute ranks only from `keep` and the targets' spectra and sizes."""

    pairs: ClassVar = True

    def search(self, problem: SearchProblem) -> SearchResult:
        spectra = problem.spectra()
        return SearchResult(self.ranks(problem.targets, spectra, problem.keep), spectra)

    @abstractmethod
    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        """Return ranks at which `targets` keep at most the share `keep` of their parameters.

        Raises:
            NoRank: `keep` is too small for the smallest ranks.
        """
