"""Recoveries: the training that heals a factorized model. One file each, all of them rules of one loop."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eckart.recovery.finetune import Finetune
from eckart.recovery.mixed_rank import MixedRank
from eckart.recovery.two_phase import InTurn

Recovery = Annotated[Finetune | MixedRank | InTurn, Field(discriminator="kind")]
