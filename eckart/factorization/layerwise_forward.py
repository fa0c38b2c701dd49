"""A forward pass of all calibration data that stops at each target, so that the target can be replaced before it runs.

Each batch's forward is a coroutine that pauses where a target is called. When all of them have paused, the target's
inputs are known and it can be replaced; the forwards then call its replacement. So factorizing a model in order costs
one forward, whatever code is between its layers. The price is memory: what each forward needs later is kept for all
calibration tokens. And a model must not store anything of a forward on its modules, as other batches run in between.

For error compensation (eckart/factorization/error_compensation.py), the original model runs beside it in forwards of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch
from eckart.calibration.statistics import Collector, Statistics
from eckart.factorization.error_compensation import DenseModules
from eckart.model.module_context import frozen
from eckart.model.targets import Target


@contextmanager
def layerwise_forward(
    model: PreTrainedModel,
    groups: Iterable[Sequence[Target]],
    batches: Iterable[Batch],
    dense: DenseModules | None = None,
) -> Iterator[LayerwiseForward]:
    """Begin a layerwise forward of `batches`; the model is in eval mode until the context ends.

    Args:
        groups: targets that read one tensor each, in order of execution.
        dense: the modules that were replaced, to run the original model as well; None: it does not run.
    """
    with frozen(model):
        forward = LayerwiseForward(model, list(batches), dense)
        try:
            for group in groups:
                forward.pause_at(group[0].name)
            yield forward
        finally:
            forward.end()


class LayerwiseForward:
    """The forwards of all batches, each paused at the same target."""

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch], dense: DenseModules | None) -> None:
        self._model = model
        self._batches = batches
        self._dense = dense
        self._forwards = [_Forward(model, batch) for batch in batches]
        self._dense_forwards = [_Forward(model, batch) for batch in batches] if dense else []
        self._undo: dict[str, Callable[[], None]] = {}

    def pause_at(self, name: str) -> None:
        """Make all forwards pause when they call the target `name`, until `advance_to` has been there."""
        module = self._model.get_submodule(name)
        own, patched = module.forward, "forward" in vars(module)  # by accelerate

        def forward(*args: Tensor) -> Tensor:
            _Forward.pause(name, args[0])
            current = self._model.get_submodule(name)
            result: Tensor = own(*args) if current is module else current(*args)
            return result

        def undo() -> None:
            del module.forward
            if patched:
                module.forward = own

        module.forward = forward
        self._undo[name] = undo

    def advance_to(self, group: Sequence[Target]) -> Statistics:
        """Run all forwards up to `group` and return statistics of its inputs; with `dense`, also dense_inputs.

        Raises:
            ValueError: a batch does not call the target, or an input is not finite; the message names the target.
        """
        first = group[0]
        collector = Collector(self._model, group, frozenset({"inputs"}))
        for number, batch in enumerate(self._batches):
            collector.start(batch)
            dense_inputs = None
            if self._dense:
                with self._dense.back():
                    dense_inputs = self._dense_forwards[number].advance_to(first.name)
            collector.add_inputs(first, self._forwards[number].advance_to(first.name), dense_inputs)
        self._undo.pop(first.name)()
        return collector.finish()

    def end(self) -> None:
        """Stop all forwards where they are, and restore the modules that they would have paused at."""
        for undo in self._undo.values():
            undo()
        for forward in (*self._forwards, *self._dense_forwards):
            forward.throw()


class _Forward(greenlet):
    """A forward that runs from pause to pause while its caller waits; thrown into, it ends where it is."""

    def __init__(self, model: PreTrainedModel, batch: Batch) -> None:
        super().__init__(partial(_run, model, batch))

    @torch.no_grad()
    def advance_to(self, name: str) -> Tensor:
        """Run on to the next pause and return the input of the target `name`.

        Raises:
            ValueError: it pauses at another target, or ends.
        """
        pause = None if self.dead else self.switch()
        if pause is None or pause[0] != name:
            raise ValueError(f"{name}: not every batch runs it when its turn comes; exclude this target")
        inputs: Tensor = pause[1]
        return inputs

    @staticmethod
    def pause(name: str, inputs: Tensor) -> None:
        """Wait here, if the code runs inside such a forward."""
        current = getcurrent()
        if isinstance(current, _Forward) and current.parent:
            current.parent.switch((name, inputs))


def _run(model: PreTrainedModel, batch: Batch) -> None:
    model(**batch)
