"""Rank searches: methods that divide the parameter budget among the targets. Each search has its own file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eckart.ranks.borrowed import Borrowed
from eckart.ranks.calibrated import Calibrated
from eckart.ranks.hypernetwork import Hypernetwork
from eckart.ranks.threshold import Threshold
from eckart.ranks.tolerance import Tolerance
from eckart.ranks.uniform import Uniform
from eckart.ranks.waterfill import Waterfill
from eckart.ranks.zero_sum import ZeroSum

RankSearch = Annotated[
    Uniform | Waterfill | Calibrated | Hypernetwork | Tolerance | Threshold | ZeroSum | Borrowed,
    Field(discriminator="kind"),
]

Borrowed.model_rebuild(_types_namespace={"RankSearch": RankSearch})  # one of its fields is a RankSearch
