"""`Method`, the base class of a recipe's parts: methods describe themselves, so other code needs no list of names.

A method is a frozen class in a file of its own, with its settings from params.yaml as fields. It also has a line in the
registry of its family: the `__init__.py` of ranks/, recovery/, shaping/ or residual/, or factorization/weightings.py.
docs/extending.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from eckart.model.targets import Storage
from eckart.training.optimizer_settings import Optimization

Contradiction = tuple[str, str]
"""Path of a part in its recipe, and a message: the mistake, and what to write instead."""


Source = Literal["teacher", "base"]
"""The dense model that a recipe begins with. teacher: the original model, which has learned the task. base: the base
model with a new head, which learns the task while it is compressed."""


class Method(BaseModel):
    """Base class of methods, with the properties of most methods as defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    """Name of the method in params.yaml; subclasses make it a Literal."""

    captions: ClassVar[Mapping[str, str]] = {}
    """Captions in the report: name of a measure of the method's training rule → caption."""

    alone: ClassVar[bool] = False
    """Whether the method works in one process only: it trains parameters that are not the model's, or runs the model
    twice."""

    for_dense: ClassVar[bool] = False
    """Whether the method can also train a dense model, not only a factorized one."""

    reads_shaping: ClassVar[bool] = False
    """Whether the method reads the scores that shaping computed."""

    by_size: ClassVar[bool] = False
    """Whether the method is a rank search that uses nothing but the sizes of the targets and `keep`."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the calibration statistics that the method reads."""
        return ()

    @property
    def trainings(self) -> Mapping[str, Optimization]:
        """Optimizer settings of the method's trainings, in order.

        A key is the name of the field that holds the settings; "" if the method itself holds them.
        """
        return {"": self} if isinstance(self, Optimization) else {}

    @property
    def trains(self) -> bool:
        """Whether the method takes training steps."""
        return any(training.steps for training in self.trainings.values())

    @property
    def pairs(self) -> bool:
        """Whether the method accepts targets of two layers: an attention product, or an embedding tied to the head."""
        return False

    @property
    def asks_frozen(self) -> bool:
        """Whether the method computes the model's loss without training the weights."""
        return False

    @property
    def leaves_low_rank(self) -> bool:
        """Whether the method itself reduces the dense weights to low rank."""
        return False

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        """Yield what makes no sense in `recipe`, the recipe that this method is a part of."""
        yield from ()


class RecipeParts(Protocol):
    """Interface of `Recipe` for its parts; it avoids a circular import."""

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
    """Whether several processes can run the trainings of `methods` together; False if no method trains."""
    present = [method for method in methods if method is not None]
    return any(method.trains for method in present) and not any(method.alone for method in present)
