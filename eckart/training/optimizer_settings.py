"""The settings of an optimizer, which every training has."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Optimization(BaseModel):
    """AdamW with a linear warm-up.

    Attributes:
        steps: optimizer steps.
        batch_size: rows of a step.
        learning_rate: after the warm-up.
        warmup: share of the steps, in [0, 1).
        weight_decay: decoupled, as AdamW has it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schedule: ClassVar[Literal["linear", "constant"]] = "linear"
    """Of the learning rate after its warm-up: down to 0, or constant."""

    steps: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    warmup: float = Field(ge=0, lt=1)
    weight_decay: float = Field(ge=0)

    def options(self) -> dict[str, Any]:
        """These settings alone, as keyword arguments."""
        return {"schedule": self.schedule, **{name: getattr(self, name) for name in Optimization.model_fields}}
