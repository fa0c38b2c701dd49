"""Two trainings in turn: the second begins once the first has pruned the model to its final size.

Source: LoSparse (Li et al., ICML 2023), appendix E: the model is pruned first, and then distilled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.recovery.finetune import Finetune
from eckart.training.optimizer_settings import Optimization


class InTurn(Method):
    """Settings of two trainings, each with its own optimizer and schedule; the first one prunes the residual."""

    captions: ClassVar = Finetune.captions

    kind: Literal["in_turn"] = Field("in_turn", description="two trainings, one after the other (LoSparse)")
    first: Finetune = Field(Finetune(), description="first training, in which the residual is pruned")
    then: Finetune = Field(Finetune(), description="second training, usually with distillation")

    @property
    def trainings(self) -> Mapping[str, Optimization]:
        return {"first": self.first, "then": self.then}

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        for name, training in {"first": self.first, "then": self.then}.items():
            for path, mistake in training.contradictions(recipe):
                yield path.replace("recovery", f"recovery.{name}", 1), mistake
            if not training.steps:
                yield f"recovery.{name}.steps", "is 0; write at least 1, or a single training of kind finetune"
