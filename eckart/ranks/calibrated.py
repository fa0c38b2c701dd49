"""Calibrated: a rank search whose predicted losses are calibrated by forward passes, and chosen by the model's output.

Source: LEMS (ICML 2026; github.com/lems-svd/lems). The predicted loss of target l at rank r is::

    e_l(r) = KL_l(r₀) · E_l(r) / E_l(r₀) · (1 + γ h_α(b))

E_l(r) = ½ Σ_{k>r} S_k² is the weighted energy that rank r cuts. KL_l(r₀) is the KL divergence of the model's
predictions from the original's if only l is factorized, at r₀ = a tenth of its break-even rank: one measurement puts
the curve of each target in units of the model's output. Errors of early blocks pass through all later ones. For block b
of 0 … B::

    H_α(b) = Σ_{k=b..B} (k + 1)^−α,    h_α(b) = (H_α(b) − H_α(B)) / (H_α(0) − H_α(B))

so h is 1 for the first block and 0 for the last one, as in the authors' code. With α = 0 it is linear; the larger α,
the more the first blocks differ from all others. The waterfill (eckart/ranks/waterfill.py) shares the budget out over
e_l.

The pair (α, γ) is chosen by the whole model. For each pair, the model is compressed as the recipe compresses it, also
layer by layer and anchored, and the KL divergence of its predictions on other calibration examples decides. The plain
waterfill, without any of these factors, is a candidate too: on these examples, the result is never worse than it.

Departs from the authors' code:

- It draws ten pairs in [0, 3] × [0, 7] with Optuna (TPE). We try a grid of ten over the same range (choice).
- An integer linear program allocates ranks of 0.1 or 0.3 to 0.95 of break-even. We walk the hull, from rank 1 to dense.
- KL_l and the choice use the same examples, at temperature 0.6, without the first 256 tokens of each. We use different
  examples, temperature 1, and all predictions (choice). Both sets are part of the calibration data, so the statistics
  have seen them: they are held out from KL_l only.
- For models that predict values, the mean squared error takes the place of the KL divergence (choice).

A target outside of all blocks has the depth of the block before it in order of execution, or of the first block. In an
encoder-decoder, the decoder's blocks follow those of the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from eckart.calibration.passes import layer_of
from eckart.factorization.factorize import InOrder, factorize_model
from eckart.factorization.single_target_ablation import losses_of_replacements
from eckart.model.batches import Batch
from eckart.model.layers import restored
from eckart.model.module_context import frozen
from eckart.model.targets import Target
from eckart.ranks.budget import Ranks, largest_rank, ranked_allowance
from eckart.ranks.search_problem import SearchProblem, SearchResult, Spectra, losses_of_components
from eckart.ranks.waterfill import Filling
from eckart.recipe_parts import Contradiction, RecipeParts

_LEAST_ENERGY = 1e-6  # share of a target's energy that r₀ cuts at least: the scale is a ratio to it


class Calibrated(Filling):
    """Settings of a waterfill over losses that are calibrated by the model's predictions and weighted by depth."""

    asks_frozen: ClassVar = True
    pairs: ClassVar = True

    kind: Literal["calibrated"] = Field(
        "calibrated",
        description="waterfill over predicted losses, scaled by measured ones and weighted by depth; the compressed "
        "model's own predictions choose among several depth weights (LEMS)",
    )
    examples: int = Field(
        32, ge=1, description="calibration examples for measuring each target alone, in one forward pass per target"
    )
    held_out: int = Field(
        32, ge=1, description="maximum number of further calibration examples, which choose among alpha and gamma"
    )
    alpha: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] = Field(
        (0.0, 1.0, 3.0), description="powers α of depth to try; 0: the weight falls linearly from first to last block"
    )
    gamma: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] = Field(
        (0.0, 1.0, 3.0, 7.0), description="weights γ of depth to try, each with each α; 0: depth does not matter"
    )

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.residual is not None:
            yield (
                "residual",
                "makes up for what the factors lose, so calibrated ranks have nothing to measure; write null",
            )

    def search(self, problem: SearchProblem) -> SearchResult:
        ranked_allowance(problem.targets, problem.keep)  # before the measurements, which take long
        examples = problem.calibration(self.examples)
        held_out = problem.calibration(self.held_out, self.examples)
        if not held_out:
            raise ValueError(
                f"ranks calibrated measure targets on {self.examples} calibration examples, which leaves none to "
                "choose by: give more examples (in params.yaml: data.sizes.calibration), or lower ranks.examples"
            )
        spectra = problem.spectra()
        with frozen(problem.model):
            scales = _scales(problem, spectra, examples)
            best, measured = self._chosen(problem, spectra, scales, held_out)
        return SearchResult(best, spectra, remark=measured)

    def _chosen(
        self, problem: SearchProblem, spectra: Spectra, scales: Mapping[str, float], held_out: Sequence[Batch]
    ) -> tuple[Ranks, str]:
        """Return the candidate whose model is nearest to the original on `held_out`, and a sentence about it."""
        in_order = problem.in_order and problem.in_order.model_copy(update={"refine": None})  # would take too long
        batches = problem.calibration(None) if in_order else ()
        found: list[tuple[float, str, Ranks]] = []
        for label, ranks in problem.progress(self._candidates(problem, spectra, scales), "Candidates", "candidate"):
            small = _factorized(problem, problem.targets, ranks, in_order, batches)
            divergence = losses_of_replacements(problem.model, {"": small}, held_out, problem.objective)[""]
            del small  # before the next is made
            _check_finite(divergence, f"at {label}")
            found.append((divergence, label, ranks))
        least, label, ranks = min(found, key=lambda candidate: candidate[0])
        measure = "KL divergence" if problem.objective.classes else "squared error"
        plain = "" if label == found[0][1] else f", {found[0][0]:.4g} at {found[0][1]}"
        return ranks, f"{measure} {least:.4g} at {label}{plain}; {len(found)} candidates"

    def _candidates(
        self, problem: SearchProblem, spectra: Spectra, scales: Mapping[str, float]
    ) -> list[tuple[str, Ranks]]:
        """Return a label and the ranks of each candidate, the plain waterfill first; equal ranks count once."""
        candidates = [("plain losses", self.filled(problem.targets, spectra, problem.keep))]
        pairs = dict.fromkeys((alpha if gamma else 0.0, gamma) for gamma in self.gamma for alpha in self.alpha)
        for alpha, gamma in pairs:
            depth = depth_factors(problem.targets, alpha, gamma)
            scaled = {name: values * math.sqrt(scales[name] * depth[name]) for name, values in spectra.items()}
            ranks = self.filled(problem.targets, scaled, problem.keep)
            if all(ranks != other for _, other in candidates):
                candidates.append((f"alpha {alpha:g}, gamma {gamma:g}", ranks))
        return candidates


def depth_factors(targets: Iterable[Target], alpha: float, gamma: float) -> dict[str, float]:
    """Return 1 + γ h_α(b) for each of `targets`, which are in order of execution: name → factor."""
    numbers: dict[str, int] = {}
    blocks: dict[str, int] = {}
    block = 0
    for target in targets:
        if name := layer_of(target):
            block = numbers.setdefault(name, len(numbers))
        blocks[target.name] = block
    powers = [(number + 1) ** -alpha for number in range(len(numbers))]
    later = [math.fsum(powers[number:-1]) for number in range(len(numbers))]  # H(b) − H(B)
    return {name: 1 + gamma * (later[block] / later[0] if any(later) else 0.0) for name, block in blocks.items()}


def _scales(problem: SearchProblem, spectra: Spectra, examples: Sequence[Batch]) -> dict[str, float]:
    """Return KL_l(r₀) / E_l(r₀) of each target; 1 if no rank makes it smaller, or if it has no energy."""
    left = {name: _energies(values) for name, values in spectra.items()}
    ranks = {
        target.name: _measured_rank(target, left[target.name])
        for target in problem.targets
        if largest_rank(target) and float(left[target.name][0]) > 0
    }
    measured = [target for target in problem.targets if target.name in ranks]
    small = _factorized(problem, measured, ranks)
    alone = {target.name: {layer.name: small[layer.name] for layer in target.layers} for target in measured}
    divergences = losses_of_replacements(problem.model, alone, examples, problem.objective, problem.progress)
    for name, divergence in divergences.items():
        _check_finite(divergence, f"with {name} factorized")
    scales = {name: max(divergences[name], 0.0) / float(left[name][rank]) for name, rank in ranks.items()}
    return {**dict.fromkeys(spectra, 1.0), **scales}


def _check_finite(divergence: float, where: str) -> None:
    if not math.isfinite(divergence):
        raise ValueError(
            f"predictions of the original model, or of the model {where}, are not finite: load it as float32"
        )


def _energies(spectrum: Tensor) -> Tensor:
    """Return E(r) for each r from 0: the predicted loss of the components after the first r, `(min(out, in),)`."""
    return losses_of_components(spectrum.double()).flip(0).cumsum(0).flip(0)


def _measured_rank(target: Target, energies: Tensor) -> int:
    """Return r₀: a tenth of the largest rank that makes `target` smaller, or less if that would cut hardly anything."""
    cutting = int((energies > _LEAST_ENERGY * energies[0]).sum()) - 1  # the last rank that cuts enough
    return min(max(1, largest_rank(target) // 10), cutting)


def _factorized(
    problem: SearchProblem,
    targets: Sequence[Target],
    ranks: Ranks,
    in_order: InOrder | None = None,
    batches: Sequence[Batch] = (),
) -> dict[str, nn.Module]:
    """Factorize `targets`, put the dense modules back, and return the modules that were in their places, by name."""
    names = [layer.name for target in targets for layer in target.layers]
    with restored(problem.model, names), torch.no_grad():
        factorize_model(
            problem.model, targets, ranks, problem.weighting, problem.statistics, in_order=in_order, batches=batches
        )
        return {name: problem.model.get_submodule(name) for name in names}
