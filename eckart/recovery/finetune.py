"""Plain fine-tuning of the factorized model on the task, with or without a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.recovery.distillation import Distillation
from eckart.recovery.lora import Lora, LoraRule
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule


class Finetune(Optimization, Method):
    """Settings of plain fine-tuning, which trains all parameters of the model, or low-rank updates of them."""

    for_dense: ClassVar = True
    pairs: ClassVar = True
    captions: ClassVar = Distillation.captions

    kind: Literal["finetune"] = Field("finetune", description="trains all parameters on the task")
    distillation: Distillation | None = Field(
        None,
        description="distillation from the original model: {layers: 1.0, logits: 1.0, temperature: 2.0}; null: none",
    )

    lora: Lora | None = Field(
        None, description="trains low-rank updates of the weights only: {rank: 8, alpha: 16.0}; null: all parameters"
    )

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if self.lora and recipe.residual is not None:
            yield "recovery.lora", "freezes the residual, which must train; write null"
        if self.distillation:
            yield from self.distillation.contradictions()

    def rules(self, problem: RecoveryProblem) -> Iterator[Rule]:
        if self.lora:
            yield LoraRule(problem.model, self.lora, problem.seed)
        if self.distillation:
            yield self.distillation.rule(problem)
