"""What a part of a recipe says of itself, so that no stage, check or report knows a method by its name.

A method is a frozen value, its settings as params.yaml has them, in a file of its own, and a line in the registry of
its family: the `__init__.py` of ranks/, recovery/, shaping/ or residual/, or weighting.py. docs/extending.md shows how.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from eckart.model.targets import Storage
from eckart.training.optimizer_settings import Optimization

Contradiction = tuple[str, str]
"""The path of a part in its recipe, and what is wrong there and what to write."""


Source = Literal["teacher", "base"]
"""The dense model that a recipe begins with: what has learned the task, or what it was before (the base model with a
new head), which learns the task while it is compressed."""


class Method(BaseModel):
    """What holds of most methods; one of which it does not hold says so."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    """Its name in params.yaml, a Literal."""

    captions: ClassVar[Mapping[str, str]] = {}
    """Measure of its training rule → what a reader of the report is told of it."""

    alone: ClassVar[bool] = False
    """Whether it works in one process only: it trains parameters that are not the model's, or runs the model twice."""

    for_dense: ClassVar[bool] = False
    """Whether it trains a dense model as well as a factorized one."""

    reads_shaping: ClassVar[bool] = False
    """Whether it reads the scores that shaping gave."""

    by_size: ClassVar[bool] = False
    """Whether it is a rank search that looks at nothing but the sizes of the targets and `keep`."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The kinds of statistics that it reads from the pass over the calibration data."""
        return ()

    @property
    def trainings(self) -> Mapping[str, Optimization]:
        """Its trainings in turn, by where in it their settings stand; "" is itself."""
        return {"": self} if isinstance(self, Optimization) else {}

    @property
    def trains(self) -> bool:
        """Whether it takes training steps."""
        return any(training.steps for training in self.trainings.values())

    @property
    def pairs(self) -> bool:
        """Whether it accepts targets of two linear layers: an attention product, or an embedding tied to the head."""
        return False

    @property
    def asks_frozen(self) -> bool:
        """Whether it asks for the model's loss while the weights stay as they are."""
        return False

    @property
    def leaves_low_rank(self) -> bool:
        """Whether it itself reduces the dense weights to their ranks."""
        return False

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        """What makes no sense together with it in `recipe`, to which it belongs."""
        yield from ()


class RecipeParts(Protocol):
    """A recipe, as its parts see each other."""

    @property
    def shaping(self) -> Method | None: ...
    @property
    def weighting(self) -> Method: ...
    @property
    def ranks(self) -> Method: ...
    @property
    def residual(self) -> Method | None: ...
    @property
    def storage(self) -> Storage: ...
    @property
    def recovery(self) -> Method: ...


def train_together(methods: Iterable[Method | None]) -> bool:
    """Whether `methods` train, and several processes can do so together."""
    some = [method for method in methods if method is not None]
    return any(method.trains for method in some) and not any(method.alone for method in some)
