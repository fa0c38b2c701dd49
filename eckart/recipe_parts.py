"""The base class of a recipe's parts: methods describe themselves, so that no other code knows one by its name.

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
    """A method with the properties that most methods have; a method overrides those that differ."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    """The method's name in params.yaml, a Literal."""

    captions: ClassVar[Mapping[str, str]] = {}
    """Measure of its training rule → its caption in the report."""

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
        """The calibration statistics that it reads."""
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
        """Yield the parts of `recipe`, its own one, that make no sense together with it."""
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
    present = [method for method in methods if method is not None]
    return any(method.trains for method in present) and not any(method.alone for method in present)
