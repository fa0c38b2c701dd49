"""`Method`, the base class of a recipe's parts, such as its weighting and its rank search.

A method is a frozen class in a file of its own, with its settings from params.yaml as fields. It also has a line in the
registry of its family: the `__init__.py` of ranks/, recovery/, shaping/ or residual/, or factorization/weightings.py.
Its other attributes tell the pipeline what the method needs and can do, so other code contains no list of methods.
docs/how-to/extend.md shows how to add a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from eckart.model.targets import Storage
from eckart.training.optimizer_settings import Optimization

Contradiction = tuple[str, str]
"""Path of a part in its recipe, and a message that says what is wrong and what to write instead."""


Source = Literal["teacher", "base"]
"""The dense model that a recipe begins with. teacher: the original model, which has learned the task. base: the base
model with a new head, which learns the task while it is compressed."""


class Method(BaseModel):
    """Base class of methods. A subclass overrides those attributes in which it differs from most methods."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str
    """Name of the method in params.yaml; subclasses make it a Literal."""

    captions: ClassVar[Mapping[str, str]] = {}
    """Captions in the report: name of a measure of the method's training rule → caption."""

    alone: ClassVar[bool] = False
    """Whether the method must train in a single process, because it trains parameters outside the model or runs the
    model twice in a step."""

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
    def one_pass(self) -> bool:
        """Whether all examples of a step must be in one forward pass, because its graph also holds parameters outside
        the model, which are trained with it."""
        return False

    @property
    def pairs(self) -> bool:
        """Whether the method accepts targets of two layers: an attention product, or an embedding tied to the head."""
        return False

    @property
    def asks_frozen(self) -> bool:
        """Whether the method computes the loss of the model without training the weights.

        Such a method needs a model that has already learned the task.
        """
        return False

    @property
    def judges_by_loss(self) -> bool:
        """Whether the method compares values of the loss, of the model before and after a change."""
        return False

    @property
    def leaves_low_rank(self) -> bool:
        """Whether the method itself reduces the dense weights to low rank."""
        return False

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        """Yield each contradiction between this method and the other parts of `recipe`, the recipe it belongs to."""
        yield from ()


class RecipeParts(Protocol):
    """Interface of `Recipe` as methods see it: `Recipe` itself cannot be imported here, because it imports methods."""

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
