"""A walk through a model, from what one target reads to what the next one does, with all calibration data at once.

Each batch's forward is a coroutine that pauses where a target is called. When all of them are there, what they read is
known, and the target can be replaced: what is then called is the module that is there by now. So a model that changes
on the way costs one forward, whatever code stands between its layers. What the forwards need further on stays in
memory, of all calibration tokens; and a model must keep nothing of a forward on its modules, as those of other batches
come in between.

The dense model walks beside it in forwards of its own, for anchoring (eckart/factorization/error_compensation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch
from eckart.calibration.statistics import Collector, Statistics
from eckart.factorization.error_compensation import DenseModules
from eckart.model.module_context import forward_of, frozen
from eckart.model.targets import Target


@contextmanager
def walking(
    model: PreTrainedModel,
    groups: Iterable[Sequence[Target]],
    batches: Iterable[Batch],
    dense: DenseModules | None = None,
) -> Iterator[Walk]:
    """A walk of `model` over `batches`, as long as the context; the model is in eval mode until then.

    Args:
        groups: targets that read one tensor each, in order of execution.
        dense: the modules that made way for others, to walk beside the dense model; None: the model walks alone.
    """
    with frozen(model):
        walk = Walk(model, list(batches), dense)
        try:
            for group in groups:
                walk.pause_at(group[0].name)
            yield walk
        finally:
            walk.end()


class Walk:
    """The forwards, and where they are."""

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch], dense: DenseModules | None) -> None:
        self._model = model
        self._batches = batches
        self._dense = dense
        self._forwards = [_Forward(model, batch) for batch in batches]
        self._beside = [_Forward(model, batch) for batch in batches] if dense else []
        self._undo: dict[str, Callable[[], None]] = {}

    def pause_at(self, name: str) -> None:
        """Have all forwards pause where they call the target `name`, until they have been there."""
        module = self._model.get_submodule(name)
        own = module.forward

        def forward(*args: Tensor) -> Tensor:
            _Forward.pause(name, args[0])
            there = self._model.get_submodule(name)
            result: Tensor = own(*args) if there is module else there(*args)
            return result

        pauses = ExitStack()
        pauses.enter_context(forward_of(module, forward))
        self._undo[name] = pauses.close

    def to(self, group: Sequence[Target]) -> Statistics:
        """Go on to `group`, and give the statistics of what it reads: inputs, and dense_inputs beside the dense model.

        Raises:
            ValueError: a batch does not come there, or what is read is not fit; the message names the target.
        """
        leader = group[0]
        collector = Collector(self._model, group, frozenset({"inputs"}))
        for number, batch in enumerate(self._batches):
            collector.start(batch)
            beside = None
            if self._dense:
                with self._dense.back():
                    beside = self._beside[number].go_on(leader.name)
            collector.read(leader, self._forwards[number].go_on(leader.name), beside)
        self._undo.pop(leader.name)()
        return collector.finish()

    def end(self) -> None:
        for undo in self._undo.values():
            undo()
        for forward in (*self._forwards, *self._beside):
            forward.throw()


class _Forward(greenlet):
    """A forward that runs while its caller waits, from pause to pause. Thrown away, it ends where it is."""

    def __init__(self, model: PreTrainedModel, batch: Batch) -> None:
        super().__init__(partial(_run, model, batch))

    @torch.no_grad()
    def go_on(self, name: str) -> Tensor:
        """What the target `name` reads, where this forward pauses next.

        Raises:
            ValueError: it pauses elsewhere, or ends.
        """
        pause = None if self.dead else self.switch()
        if pause is None or pause[0] != name:
            raise ValueError(f"{name}: not every batch runs it when its turn comes; exclude this target")
        reads: Tensor = pause[1]
        return reads

    @staticmethod
    def pause(name: str, reads: Tensor) -> None:
        """Wait there, if a forward of a walk is what runs."""
        here = getcurrent()
        if isinstance(here, _Forward) and here.parent:
            here.parent.switch((name, reads))


def _run(model: PreTrainedModel, batch: Batch) -> None:
    model(**batch)
