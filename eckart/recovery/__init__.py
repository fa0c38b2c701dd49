"""Recoveries: the training that heals a factorized model. One file each, all of them rules of one loop."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eckart.recovery.finetune import Finetune
from eckart.recovery.in_turn import InTurn
from eckart.recovery.mixed_rank import MixedRank

Recovery = Annotated[Finetune | MixedRank | InTurn, Field(discriminator="kind")]
