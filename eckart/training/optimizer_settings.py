"""Optimizer settings that all trainings have."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from eckart.training.learning_rate import Schedule


class Optimization(BaseModel):
    """Settings of a training with AdamW and a linear warm-up."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(60, ge=0, description="optimizer steps")
    batch_size: int = Field(16, ge=1, description="examples in each step")
    learning_rate: float = Field(5e-5, gt=0, description="peak learning rate, after the warm-up")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    schedule: Schedule = Field(
        "linear", description="learning rate after the warm-up: constant; linear and cosine fall to last_rate"
    )
    last_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="learning rate that a linear or cosine schedule has fallen to after the last step, ÷ the peak",
    )
    weight_decay: float = Field(0.01, ge=0, description="weight decay of AdamW")

    @property
    def optimization(self) -> Optimization:
        """These settings, without what subclasses add; with the steps of all phases, if there are several."""
        return Optimization(**{name: getattr(self, name) for name in Optimization.model_fields})
