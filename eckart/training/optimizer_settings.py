"""Optimizer settings that all trainings have."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Optimization(BaseModel):
    """Settings of a training with AdamW and a linear warm-up."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schedule: ClassVar[Literal["linear", "constant"]] = "linear"
    """Learning rate after the warm-up: falls linearly to 0, or stays constant."""

    steps: int = Field(60, ge=0, description="optimizer steps")
    batch_size: int = Field(16, ge=1, description="examples in each step")
    learning_rate: float = Field(5e-5, gt=0, description="peak learning rate, after the warm-up; falls linearly to 0")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of AdamW")

    def options(self) -> dict[str, Any]:
        """Return the optimizer settings, without what subclasses add, as keyword arguments of the training loop."""
        return {"schedule": self.schedule, **{name: getattr(self, name) for name in Optimization.model_fields}}
