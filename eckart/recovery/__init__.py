"""Recoveries: the training that heals a factorized model. One file each, all of them rules of one loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from eckart.optimization import Optimization
from eckart.recovery.distillation import Distillation
from eckart.recovery.mixed_rank import MixedRank


class Finetune(Optimization):
    """Plain fine-tuning of the factorized model on the task, with or without a teacher."""

    kind: Literal["finetune"]
    distillation: Distillation | None


Recovery = Annotated[Finetune | MixedRank, Field(discriminator="kind")]
