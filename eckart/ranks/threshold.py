"""Threshold: a rank search that learns soft thresholds on the singular values together with the weights.

Source: SoftLM (Bhatnagar et al., 2024), sections 4.1 to 4.5 and the algorithm there.

Every target is written as W = U T(Σ) Vᵀ and has one threshold α_i, which starts at 0. With `thresholds: block`, all
targets of a block of the model share one, as section 4.4 words it (section 4.2: one for each linear layer). With a
steepness s and a weight γ::

    T(σ) = σ tanh(s (σ − α)) where σ ≥ α, else 0                                    (eq. 6, c = 0)
    task loss + γ Σ_i e^−α_i                                                        (eq. 9 and 10)

All weights, U, Σ, V and α train together until the components with σ > α meet the budget. Then α is frozen, and U, Σ
and V train for `frozen_steps` more steps (section 4.5). What is ours:

- `frozen_steps` is 0 by default (choice): U T(Σ) Vᵀ becomes the dense weight when the budget is met, and recovery
  trains its factors.
- While α is frozen, the σ of a component that is cut stays as it is (choice): the optimizer's momentum could lift it
  over α again, and the budget would be exceeded. A component whose σ falls below α is cut for good.
- The step that meets the budget can remove many components at once. It is shortened, for Σ and α alike, so that the
  budget is only just met (choice): the component that was removed last would exceed the budget. Singular values that
  are equal up to rounding are removed together, and then more is lost.
- The largest σ of a target is cut at 0 instead of α (choice): no factorization has rank 0, and a target with its
  largest σ just above α would have T(Σ) ≈ 0 and could hardly train. This matters if the scales of targets differ,
  because α starts and moves alike for all targets. It passes all σ of a pooler (near 0.3) long before it reaches the σ
  of a feed-forward layer (near 2).
- α stays in [0, largest σ] (choice). A negative α would let negative σ pass, and the loss would push that α ever
  harder.
- A target counts as dense until its factors are smaller than the dense weight, as in all rank searches here.
- The paper does not give s. T rises from 0 to σ within about 2/s above α. This width should be small compared with the
  singular values that matter, because T shrinks the values within it. It should also take α several steps to cross, so
  that the loss can show which components must stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.passes import layer_of
from eckart.model.batches import Batch
from eckart.model.layers import LowRankLinear, factorize_target, merge
from eckart.model.targets import Target, weight_of
from eckart.ranks.budget import Ranks, rank_or_dense, ranked_allowance, total
from eckart.ranks.search_problem import KEPT, SearchProblem, SearchResult
from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.training.learning_rate import Schedule
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule, module_state

_HALVINGS = 40  # bisections of the last step; 2^−40 is well below the rounding of float32
_QUARTERS = (0.75, 0.5, 0.25)  # shares whose step is recorded when the search passes them
_REACHED = "reached"  # key of `ThresholdSearch.reached` in the state of the rule


class Threshold(Optimization, Method):
    """Settings of a rank search that trains U, Σ, V and one threshold for each target until the ranks meet the budget.

    The search takes at most `steps` optimizer steps, and then `frozen_steps` with frozen thresholds.
    """

    alone = True
    one_pass: ClassVar = True
    leaves_low_rank: ClassVar = True
    captions: ClassVar = {**KEPT, "threshold": "Mean over the targets of the size below which singular values are cut."}

    kind: Literal["threshold"] = Field("threshold", description="learns a soft threshold on singular values (SoftLM)")
    steps: int = Field(3000, ge=1, description="maximum number of optimizer steps; the search ends when keep is met")
    batch_size: int = Field(32, ge=1, description="examples in each step")
    learning_rate: float = Field(2e-5, gt=0, description="peak learning rate, after the warm-up")
    warmup: float = Field(0.0, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    schedule: Schedule = Field(
        "constant", description="learning rate after the warm-up: constant; linear and cosine fall to last_rate"
    )
    frozen_steps: int = Field(
        0,
        ge=0,
        description="more optimizer steps with frozen thresholds α, once keep is met, in which U, Σ and V train",
    )
    thresholds: Literal["layer", "block"] = Field(
        "layer", description="what has a threshold α of its own: each linear layer, or each block of the model"
    )
    sharpness: float = Field(
        10.0, gt=0, description="steepness s of the soft threshold, which rises within about 2/s of α"
    )
    pressure: float = Field(0.1, gt=0, description="weight γ of Σ e^−α in the loss, which raises the thresholds α")
    threshold_learning_rate: float = Field(0.01, gt=0, description="learning rate of the thresholds α")

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.weighting.statistics or recipe.weighting.reads_shaping:
            yield "weighting", "threshold cuts the singular values of W itself, so no weighting applies; write none"
        if recipe.shaping is not None:
            yield "shaping", "threshold trains all weights and would fill the pruned ones again; write null"

    @property
    def optimization(self) -> Optimization:
        return super().optimization.model_copy(update={"steps": self.steps + self.frozen_steps})

    def search(self, problem: SearchProblem) -> SearchResult:
        rule = ThresholdSearch(problem.model, problem.targets, self, problem.keep)
        problem.train(self, rule)
        return SearchResult(rule.ranks(), changed=True, reached=rule.reached)


def soft_threshold(sigma: Tensor, alpha: Tensor, sharpness: float) -> Tensor:
    """Return T(σ) of eq. 6 with c = 0, for singular values `sigma` `(k,)` and thresholds `alpha` `()` or `(k,)`."""
    return torch.where(sigma >= alpha, sigma * torch.tanh(sharpness * (sigma - alpha)), 0.0)


def _not_largest(sigma: Tensor) -> Tensor:
    """Return whether each singular value `(k,)` is not the largest, which survives any threshold."""
    return torch.arange(len(sigma), device=sigma.device) != sigma.argmax()


class _Values(nn.Module):
    """Parameters of the search: Σ of every target, each `(min(out, in),)` in float32, and all α `(thresholds,)`."""

    def __init__(self, spectra: Sequence[Tensor], thresholds: int) -> None:
        super().__init__()
        self.sigma = nn.ParameterList(values.float() for values in spectra)
        self.alpha = nn.Parameter(torch.zeros(thresholds))


class ThresholdSearch(Rule):
    """Training rule that learns soft thresholds on the singular values of the targets.

    `finish` replaces each target by a dense layer; its weight has the rank that was found.
    """

    def __init__(self, model: PreTrainedModel, targets: Sequence[Target], settings: Threshold, keep: float) -> None:
        """Replace the targets of `model` by low-rank layers of U, V and a gate T(Σ).

        Args:
            keep: share of the targets' parameters that may be kept.

        Raises:
            NoRank: `keep` is too small for the smallest ranks.
            ValueError: a weight is not finite.
        """
        self.settings = (settings, keep)
        self.method = settings
        self.keep = keep
        self.model = model
        self.targets = tuple(targets)
        self.budget = ranked_allowance(targets, keep)
        for target in targets:
            if not torch.isfinite(weight_of(model.get_submodule(target.name))).all():
                raise ValueError(f"the weight of {target.name} is not finite")
        self.layers: list[LowRankLinear] = []
        spectra: list[Tensor] = []
        for target in targets:
            weight = weight_of(model.get_submodule(target.name)).cpu().double()
            left, spectrum, right = torch.linalg.svd(weight, full_matrices=False)
            self.layers.append(factorize_target(model, target.name, left, right))
            spectra.append(spectrum)
        by_block = settings.thresholds == "block"
        owners = [(by_block and layer_of(target)) or target.name for target in targets]
        groups = list(dict.fromkeys(owners))
        self.groups = torch.tensor([groups.index(owner) for owner in owners])
        """For each target, the index of its threshold."""
        self.values = _Values(spectra, len(groups))
        self.before = module_state(self.values)
        self.steps = 0
        self.reached: dict[float, int] = {}
        """Share of the targets' parameters → number of steps after which the targets kept no more than it."""
        self._set_gates()

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """Return Σ and the thresholds α, after moving them to the model's device.

        Neither has weight decay (choice).
        """
        self.values.to(self.layers[0].left.weight.device)
        self.groups = self.groups.to(self.layers[0].left.weight.device)
        return [
            {"params": list(self.values.sigma), "lr": self.method.learning_rate, "weight_decay": 0.0},
            {"params": [self.values.alpha], "lr": self.method.threshold_learning_rate, "weight_decay": 0.0},
        ]

    def before_forward(self, step: int) -> None:
        self.values.zero_grad()  # the Trainer clears only the gradients of the model
        self.before = module_state(self.values)
        self._set_gates()

    def _set_gates(self) -> None:
        for layer, sigma, alpha in zip(self.layers, self.values.sigma, self._alphas(), strict=True):
            layer.gate = soft_threshold(sigma, alpha * _not_largest(sigma), self.method.sharpness).to(layer.left.weight)

    def _alphas(self) -> Tensor:
        """Return the threshold of every target, `(targets,)`."""
        return self.values.alpha[self.groups]

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor:
        """Return γ Σ e^−α, the term of the loss that raises the thresholds."""
        return self.method.pressure * torch.exp(-self.values.alpha).sum()

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        if self.done:
            return
        self.steps = step + 1
        if self.met:
            self._keep_cut()
        else:
            self._raise_thresholds()
        last = self.reached[self.keep] + self.method.frozen_steps if self.met else self.method.steps
        if self.steps >= last:
            self.done = True
            self.values.requires_grad_(False).zero_grad()

    @property
    def met(self) -> bool:
        """Whether the budget is met, so that the thresholds are frozen."""
        return self.keep in self.reached

    def _raise_thresholds(self) -> None:
        self._bound()
        parameters, whole = self._parameters(), sum(target.parameters for target in self.targets)
        for share in [quarter for quarter in _QUARTERS if quarter > self.keep and parameters <= quarter * whole]:
            self.reached.setdefault(share, self.steps)
        if parameters <= self.budget:
            self.reached[self.keep] = self.steps
            self._take_back()
            self.values.alpha.requires_grad_(False)
            self.values.alpha.grad = None  # without a gradient the optimizer leaves it as it is

    def _bound(self) -> None:
        """Clip every α to [0, largest σ of its targets]."""
        largest = torch.stack([sigma.max() for sigma in self.values.sigma])
        bounds = torch.zeros_like(self.values.alpha).scatter_reduce(0, self.groups, largest, "amax")
        self.values.alpha.copy_(self.values.alpha.minimum(bounds).clamp(min=0))

    def _keep_cut(self) -> None:
        """Undo the last step for each σ that was below its threshold before it."""
        for number, (sigma, alpha) in enumerate(zip(self.values.sigma, self._alphas(), strict=True)):
            before = self.before[f"sigma.{number}"].to(sigma)
            sigma.copy_(torch.where((before <= alpha) & _not_largest(before), before, sigma))

    def _take_back(self) -> None:
        """Shorten the last optimizer step so that the budget is only just met.

        The point is found by bisection between Σ and α before the step (budget not met) and after it (met).
        """
        after = module_state(self.values)
        self._move(after, 0.0)
        if self._parameters() <= self.budget:  # the budget was met before the step, too
            return
        missed, met = 0.0, 1.0
        for _ in range(_HALVINGS):
            part = (missed + met) / 2
            self._move(after, part)
            if self._parameters() > self.budget:
                missed = part
            else:
                met = part
        self._move(after, met)

    def _move(self, after: Mapping[str, Tensor], part: float) -> None:
        """Set Σ and α to the values at the fraction `part` of the last step, which ended at `after`."""
        for name, value in self.values.named_parameters():
            value.copy_(torch.lerp(self.before[name].to(value), after[name], part))
        self._bound()

    def measures(self) -> dict[str, float]:
        """Return the share of parameters that is kept and the mean threshold."""
        return {"kept": self._share(), "threshold": float(self._alphas().detach().mean())}

    def state(self) -> dict[str, Tensor]:
        """Return Σ, the thresholds α, and the shares that were reached, each with its number of steps."""
        reached = torch.tensor([*self.reached.items()], dtype=torch.float64).reshape(-1, 2)
        return {**module_state(self.values), _REACHED: reached}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.values.load_state_dict({name: value for name, value in state.items() if name != _REACHED})
        self.reached = {share: int(steps) for share, steps in state[_REACHED].tolist()}
        self.values.alpha.requires_grad_(not self.met)

    @torch.no_grad()
    def finish(self) -> None:
        """Merge U T(Σ) Vᵀ into dense weights.

        Truncated at the rank that was found, such a weight loses nothing but rounding.
        """
        self._set_gates()
        for target in self.targets:
            merge(self.model, target.name)
        self.layers = []

    def ranks(self) -> Ranks:
        """Return the number of surviving components of each target by name, or None if the target stays dense.

        Raises:
            ValueError: the budget was never met.
        """
        if not self.met:
            raise ValueError(
                f"after {self.steps} steps the targets keep {self._share():.4f} of their parameters, more than "
                f"keep={self.keep}: raise ranks.steps, ranks.threshold_learning_rate or ranks.pressure"
            )
        return self._ranks()

    @torch.no_grad()
    def _ranks(self) -> Ranks:
        """Count the components of each target above its α (None: dense). The largest component always survives."""
        counts = [(sigma > alpha).sum() for sigma, alpha in zip(self.values.sigma, self._alphas(), strict=True)]
        survivors = zip(self.targets, torch.stack(counts).clamp(min=1).tolist(), strict=True)
        return {target.name: rank_or_dense(target, rank) for target, rank in survivors}

    def _parameters(self) -> int:
        return total(self.targets, self._ranks())

    def _share(self) -> float:
        return self._parameters() / sum(target.parameters for target in self.targets)
