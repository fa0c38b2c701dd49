"""Plain fine-tuning of the factorized model on the task, with or without a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from eckart.recipe_parts import Method
from eckart.recovery.distillation import Distillation
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule


class Finetune(Optimization, Method):
    """Settings of plain fine-tuning, which trains all parameters of the model."""

    for_dense: ClassVar = True
    pairs: ClassVar = True
    captions: ClassVar = Distillation.captions

    kind: Literal["finetune"] = Field("finetune", description="trains all parameters on the task")
    distillation: Distillation | None = Field(
        None,
        description="distillation from the original model: {layers: 1.0, logits: 1.0, temperature: 2.0}; null: none",
    )

    def rules(self, problem: RecoveryProblem) -> Iterator[Rule]:
        if self.distillation:
            yield self.distillation.rule(problem)
