"""LoRA: the weights are frozen while small low-rank updates of them are trained, which are added to them at the end.

Source: Hu et al., *LoRA*, ICLR 2022, W + (α/r) B A with B = 0 and A random at first. SVD-LLM (Wang et al., ICLR 2025,
section 3.3) trains such updates of the factors of every layer, first of the left ones and then of the right ones.

Departs from SVD-LLM: both factors have updates in one training, as all gradients are there anyway.

(choice) The weight that a layer runs with is W + (α/r) B A, rounded to the type of W: in bfloat16, what is trained is
what will be saved. A matrix that is no larger than its update would be, such as a factor of rank r, is trained itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers import PreTrainedModel

from eckart.model.layers import parts_of_layers
from eckart.model.probing import is_linear
from eckart.training.rules import Rule


class Lora(BaseModel):
    """Settings of low-rank updates."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(8, ge=1, description="rank r of each update; SVD-LLM's code has 8")
    alpha: float = Field(16.0, gt=0, description="weight α of an update B A, which counts α/r; SVD-LLM's code has 16")


class LoraRule(Rule):
    """Training rule that freezes the model and trains updates of its factors and dense linear layers.

    Biases, norms, embeddings, a language model's head, and tensors that hold several experts stay as they are.
    Optimizer states exist for the updates only.
    """

    def __init__(self, model: PreTrainedModel, settings: Lora, seed: int) -> None:
        """
        Args:
            seed: seed of the matrices A.

        Raises:
            ValueError: the model has no matrix to update.
        """
        self.settings = (settings, seed)
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = list(_matrices(model))
        if not matrices:
            raise ValueError("the model has no factor and no linear layer to update: set recovery.lora to null")
        model.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self.updated: list[tuple[nn.Module, str]] = []
        for module, name in matrices:
            weight = module.get_parameter(name)
            if settings.rank * sum(weight.shape) >= weight.numel():
                weight.requires_grad_(True)
                continue
            register_parametrization(module, name, _Update(weight, settings, generator))
            self.updated.append((module, name))

    @torch.no_grad()
    def finish(self) -> None:
        """Add the updates to the weights; the model then has the parameters that it had before."""
        for module, name in self.updated:
            remove_parametrizations(module, name, leave_parametrized=True)
        for parameter in self.trained:
            parameter.requires_grad_(True)


class _Update(nn.Module):
    """Function W → W + (α/r) B A of a matrix W `(rows, columns)`, whose B and A are trained in float32."""

    def __init__(self, weight: Tensor, settings: Lora, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = settings.alpha / settings.rank
        # drawn on the CPU, so that training on any device begins with the same numbers
        start = torch.randn(settings.rank, columns, generator=generator) / columns**0.5
        self.down = nn.Parameter(start.to(weight.device))
        self.up = nn.Parameter(torch.zeros(rows, settings.rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + (self.scale * self.up) @ self.down).to(weight.dtype)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield each matrix that may have an update, as its module and its name in the module.

    A matrix that several modules share, such as that of a head tied to an embedding, may have none.
    """
    users = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    head, parts = model.get_output_embeddings(), parts_of_layers(model)
    for place, module in model.named_modules():
        if place in parts or (is_linear(module) and module is not head):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2 and users[parameter] == 1:
                    yield module, name
