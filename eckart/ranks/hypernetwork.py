"""Hypernetwork: a rank search that learns differentiable binary masks over the singular values of the targets.

Source: ARS (Gao et al., NAACL 2024), sections 3.3 to 3.6, algorithm 1, appendix B; the ablations are those of table 5.

The weights stay frozen. Every target l is written as W = left diag(m_l) right, and a small network learns the logits
o_l of all masks m_l::

    m_l = round(σ((o_l + g + b) / τ)), g ~ Gumbel(0, 1)                             (eq. 9, straight-through)
    task loss + λ R(T(m), keep · T_total) + γ/L Σ_l R_align(m_l)                    (eq. 8)

T is the number of parameters, and R grows with the excess of T over the budget. R_align draws each mask to the largest
singular values. The rank of a target is the number of ones in its mask, without noise. Three points are ours:

- T counts min(dense, factorized) for each target, because a target stays dense if its factors are larger than its dense
  weight. The gradient of T is always that of the factorized count (choice). Above the break-even rank, at which both
  sizes are equal, min has no gradient, and masks that start there would never be pushed down.
- R_align can use singular values of norm 1, so that γ means the same for all targets, models and weightings. The paper
  uses raw singular values.
- The masks meet the budget only roughly: R stops pushing at the budget, and the noise, with its median above 0, is
  absent at the end. So that recipes of the same keep can be compared, one threshold on o_l + b over all targets makes
  the ranks meet it exactly (choice). If the masks keep too many components, the threshold drops the least confident
  ones. If they keep too few, it adds those that were nearest to being kept. Components above a target's break-even rank
  are free, because the target is dense by then. The measure `added` tells how many ranks the threshold adds; it falls
  with more steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.factorization.weighted_svd import Decomposition
from eckart.model.batches import Batch
from eckart.model.layers import LowRankLinear, factorize_target, set_weight
from eckart.model.targets import Target
from eckart.ranks.budget import Rank, Ranks, cost, largest_rank, rank_or_dense, ranked_allowance
from eckart.ranks.search_problem import KEPT, SearchProblem, SearchResult, SearchSplit
from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.training.learning_rate import Schedule
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule, module_state

_NOISE = "generator"  # key of the noise generator's state in the state of the rule


class Hypernetwork(Optimization, Method):
    """Settings of a rank search that learns one mask for each target, while the weights stay frozen."""

    alone = True
    one_pass: ClassVar = True
    asks_frozen: ClassVar = True
    captions: ClassVar = {
        "R": "By how much the masks exceed the budget: the logarithm of their parameters ÷ what keep allows, 0 within "
        "it.",
        "R_align": "How far the masks are from keeping the largest singular values of their targets; 0 where they all "
        "do.",
        **KEPT,
        "added": "Ranks that the final threshold would add to those of the masks without noise, ÷ the ranks it leaves; "
        "below 0 it takes some away. The nearer to 0, the more the ranks are the search’s own.",
    }

    kind: Literal["hypernetwork"] = Field(
        "hypernetwork", description="a network learns masks over the singular values (ARS)"
    )
    steps: int = Field(750, ge=1, description="optimizer steps of the search; the weights are frozen")
    batch_size: int = Field(32, ge=1, description="examples in each step")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate, after the warm-up")
    warmup: float = Field(0.0, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    schedule: Schedule = Field(
        "constant", description="learning rate after the warm-up: constant; linear and cosine fall to last_rate"
    )
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    split: SearchSplit = Field(
        "train",
        description="examples that the search trains on. train: those of the fine-tuning; calibration: those of the "
        "calibration statistics, which can be of another text (data.calibration_texts)",
    )
    examples: int | None = Field(4000, ge=1, description="maximum number of these examples; null: all")
    budget_weight: float = Field(16.0, gt=0, description="weight λ of the penalty R on parameters above the budget")
    alignment_weight: float = Field(
        10.0, ge=0, description="weight γ of R_align, which makes masks keep the largest singular values; 0: none"
    )
    alignment_values: Literal["raw", "normalized"] = Field(
        "raw", description="singular values in R_align. raw: as in the paper; normalized: to norm 1 in each target"
    )
    temperature: float = Field(0.4, gt=0, description="temperature τ of the masks")
    offset: float = Field(3.0, description="offset b of the masks; at 3 the search starts at full rank")
    hypernetwork: bool = Field(True, description="false: train the masks themselves, without a network")
    selection: Literal["ranks", "elements"] = Field(
        "ranks",
        description="what a mask with r ones keeps. ranks: the r largest singular values; elements: those at the ones",
    )

    @property
    def leaves_low_rank(self) -> bool:
        return self.selection == "elements"

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.storage == "pivoted":
            yield (
                "storage",
                "is pivoted, so the last ranks cost nearly nothing and masks that start at full rank would not shrink; "
                "write factors",
            )

    def search(self, problem: SearchProblem) -> SearchResult:
        parts = problem.decompositions()
        rule = HypernetworkSearch(problem.model, problem.targets, parts, self, problem.keep, problem.seed)
        problem.train(self, rule, self.examples, self.split)
        if self.selection == "ranks":
            return SearchResult(rule.ranks(), {name: part.spectrum for name, part in parts.items()})
        for name, weight in rule.selected_weights().items():
            set_weight(problem.model.get_submodule(name), weight)
        return SearchResult(rule.ranks(), changed=True)


class _Network(nn.Module):
    """Network that computes the mask logits o_l `(N_l,)` of every target from random constants z `(L, 32)` (table A1).

    It consists of a bidirectional GRU, LayerNorm, GELU and one linear layer for each target.
    """

    z: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("z", torch.randn(len(sizes), 32))
        self.gru = nn.GRU(32, 64, bidirectional=True)
        self.norm = nn.LayerNorm(128)
        self.heads = nn.ModuleList(nn.Linear(128, size) for size in sizes)

    def forward(self) -> list[Tensor]:
        features = gelu(self.norm(self.gru(self.z)[0]))
        return [head(row) for head, row in zip(self.heads, features, strict=True)]


class _Gates(nn.Module):
    """Mask logits o_l `(N_l,)` that are trained directly, without a network (ablation of table 5)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.gates = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self) -> list[Tensor]:
        return list(self.gates)


class HypernetworkSearch(Rule):
    """Training rule that learns masks over the components of the targets; `finish` puts the dense modules back."""

    def __init__(
        self,
        model: PreTrainedModel,
        targets: Sequence[Target],
        decompositions: Mapping[str, Decomposition],
        settings: Hypernetwork,
        keep: float,
        seed: int,
    ) -> None:
        """Freeze `model` and replace its targets by their factors of full rank, min(out, in).

        Args:
            decompositions: target name → its weighted decomposition.
            keep: share of the targets' parameters that may be kept.

        Raises:
            NoRank: `keep` is too small for the smallest ranks.
            ValueError: no rank makes any target smaller.
        """
        self.names = [target.name for target in targets]
        # targets that no rank makes smaller stay dense and have no mask
        self.masked = [target for target in targets if largest_rank(target)]
        if not self.masked:
            raise ValueError("no rank makes any target smaller: include larger targets")
        self.budget = ranked_allowance(targets, keep)
        self.total = sum(target.parameters for target in targets)
        self.unmasked_parameters = self.total - sum(target.parameters for target in self.masked)
        self.settings = (settings, keep, seed)
        self.method = settings
        self.model = model
        self.decompositions = decompositions

        sizes = [min(target.out_features, target.in_features) for target in self.masked]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network: nn.Module = _Network(sizes) if settings.hypernetwork else _Gates(sizes)
            self.generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        self.masks: list[Tensor] = []
        self._measured: dict[str, Tensor] = {}

        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.dense = {target.name: model.get_submodule(target.name) for target in self.masked}
        self.layers: list[LowRankLinear] = []
        for name in self.dense:
            self.layers.append(factorize_target(model, name, decompositions[name].left, decompositions[name].right))
        model.requires_grad_(False)
        for module in self.dense.values():
            module.requires_grad_(False)

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """Return the network's parameters, after moving the network to the model's device."""
        self.network.to(self.layers[0].left.weight.device)
        options = {"lr": self.method.learning_rate, "weight_decay": self.method.weight_decay}
        return [{"params": list(self.network.parameters()), **options}]

    def before_forward(self, step: int) -> None:
        self.network.zero_grad()  # the Trainer clears only the gradients of the model
        self.masks = [self._mask(logits) for logits in self.network()]
        for layer, mask in zip(self.layers, self.masks, strict=True):
            layer.gate = mask.to(layer.left.weight)

    def _mask(self, logits: Tensor) -> Tensor:
        """Return the mask m_l of eq. 9: zeros and ones, with the gradient of the sigmoid."""
        # drawn on the CPU, so that training on any device sees the same noise
        noise = -torch.empty(logits.shape).exponential_(generator=self.generator).log()
        soft = torch.sigmoid((logits + noise.to(logits) + self.method.offset) / self.method.temperature)
        return soft.detach().round() + (soft - soft.detach())

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor:
        """Return the penalty λ R + γ/L Σ R_align of eq. 8, which is added to the task loss."""
        parameters = self._parameters()
        # R(a, b) = log(max(a, b)/b), with a = parameters and b = budget; here without a gradient at a = b
        excess = torch.log1p(torch.relu(parameters / self.budget - 1))
        gap = torch.stack(
            [self._gap(target, mask) for target, mask in zip(self.masked, self.masks, strict=True)]
        ).mean()
        self._measured = {"R": excess.detach(), "R_align": gap.detach(), "kept": parameters.detach() / self.total}
        loss = self.method.budget_weight * excess
        # `elements` may keep any components, so masks need not be drawn to the leading ones
        return loss if self.method.selection == "elements" else loss + self.method.alignment_weight * gap

    def _parameters(self) -> Tensor:
        """Return the parameter count T(m): the value of Σ min(dense, factorized), the gradient of Σ (out + in) 1ᵀm."""
        ranks = torch.stack([mask.sum() for mask in self.masks])
        steps = ranks.new_tensor([target.step for target in self.masked])
        dense = ranks.new_tensor([target.parameters for target in self.masked])
        counted = torch.minimum(steps * ranks.detach().clamp(min=1), dense).sum() + self.unmasked_parameters
        slope = (steps * ranks).sum()
        return counted + (slope - slope.detach())

    def _gap(self, target: Target, mask: Tensor) -> Tensor:
        """Return R_align = ‖m ⊙ s − m′ ⊙ s‖² (eq. 7): how far a mask m is from keeping the leading components.

        The mask m′ has as many ones as m, at the leading components. s are the singular values, raw or scaled to norm
        1.
        """
        s = self.decompositions[target.name].spectrum.to(mask)
        if self.method.alignment_values == "normalized":
            s = s / s.norm().clamp(min=torch.finfo(s.dtype).tiny)
        leading = torch.arange(len(mask), device=mask.device) < mask.detach().sum()
        return ((mask - leading.to(mask)) * s).square().sum()

    def measures(self) -> dict[str, float]:
        """Return R, the mean R_align, the share of parameters kept by the last masks, and `added` (see captions)."""
        dense_from = [largest_rank(target) + 1 for target in self.masked]  # smallest rank at which a target is dense
        with torch.no_grad():
            without_noise = [int((logits + self.method.offset > 0).sum()) for logits in self.network()]
        after_threshold = [len(chosen) for _, chosen in self._chosen()]
        added = 1 - sum(map(min, without_noise, dense_from)) / sum(map(min, after_threshold, dense_from))
        return {name: float(value) for name, value in self._measured.items()} | {"added": added}

    def state(self) -> dict[str, Tensor]:
        """Return the state of the network, including its input z, and the state of the noise generator."""
        return {**module_state(self.network), _NOISE: self.generator.get_state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.network.load_state_dict({name: value for name, value in state.items() if name != _NOISE})
        self.generator.set_state(state[_NOISE].cpu())

    def finish(self) -> None:
        """Put the unchanged dense modules back, and unfreeze the parameters that were trainable before the search."""
        device = self.layers[0].left.weight.device
        for name, module in self.dense.items():
            self.model.set_submodule(name, module.to(device).train(self.model.training))
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.masks, self.layers = [], []

    def ranks(self) -> Ranks:
        """Return the rank of each target by name, or None if the target stays dense.

        The parameters meet the budget and fall short of it by less than the price of one rank.
        """
        ranks: dict[str, Rank] = dict.fromkeys(self.names)
        for target, chosen in self._chosen():
            ranks[target.name] = rank_or_dense(target, len(chosen))
        return ranks

    def selected_weights(self) -> dict[str, Tensor]:
        """Return the weights made of the components that are kept: target name → `(out, in)`, without dense targets.

        The decomposition of such a weight under the same weighting has exactly these components, in the same order.
        """
        weights = {}
        for target, chosen in self._chosen():
            if len(chosen) <= largest_rank(target):
                parts, indices = self.decompositions[target.name], sorted(chosen)
                weights[target.name] = parts.left[:, indices] @ parts.right[indices]
        return weights

    @torch.no_grad()
    def _chosen(self) -> list[tuple[Target, list[int]]]:
        """Return each target with the indices of the components that it keeps.

        These are the components with a confidence o_l above one threshold, shared by all targets, at which the budget
        is just met. The most confident component of every target is always kept, so that no target has rank 0.
        """
        confidences = [logits.tolist() for logits in self.network()]
        best = [max(range(len(values)), key=values.__getitem__) for values in confidences]
        chosen = [[index] for index in best]
        left = self.budget - self.unmasked_parameters - sum(target.step for target in self.masked)
        # equal confidences are sorted by their index, so that they spread over the targets
        order = sorted((-value, index, n) for n, values in enumerate(confidences) for index, value in enumerate(values))
        for _, index, n in order:
            if index == best[n]:
                continue
            target, rank = self.masked[n], len(chosen[n])
            # one more rank costs less if it makes the target dense, and nothing if the target is dense already
            price = min(cost(target, rank + 1), target.parameters) - min(cost(target, rank), target.parameters)
            if price > left:
                break
            chosen[n].append(index)
            left -= price
        return list(zip(self.masked, chosen, strict=True))
