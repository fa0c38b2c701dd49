"""Recoveries: methods that train a factorized model until it predicts well again.

Each recovery has its own file and adds its rules to the common training loop.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eckart.recovery.finetune import Finetune
from eckart.recovery.in_turn import InTurn
from eckart.recovery.mixed_rank import MixedRank

Recovery = Annotated[Finetune | MixedRank | InTurn, Field(discriminator="kind")]
