"""A walk through a model, from what one target reads to what the next one does, with all calibration data at once.

Each batch's forward runs in a thread of its own and pauses where a target was called. When all of them are there, what
they read is known, and the target can be replaced: what it then gives is what the module gives that is there by now.
So a model that changes on the way costs one forward, whatever code stands between its layers; what the forwards need
further on stays in memory. One thread runs at a time, always in the same order.

The dense model walks beside it in forwards of its own, for anchoring (eckart/anchoring.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.anchoring import DenseModules
from eckart.evidence import Collector, Evidence, frozen
from eckart.losses import Batch
from eckart.targets import Target


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
    walk = Walk(model, groups, batches, dense)
    with frozen(model):
        try:
            yield walk
        finally:
            walk.end()


class Walk:
    """The forwards, and where they are."""

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Iterable[Sequence[Target]],
        batches: Iterable[Batch],
        dense: DenseModules | None,
    ) -> None:
        self._model = model
        self._dense = dense
        self._runs: _Forward | None = None
        leaders = [group[0].name for group in groups]
        self._hooks = {name: model.get_submodule(name).register_forward_hook(self._hook(name)) for name in leaders}
        self._pairs = [(batch, self._forward(batch), self._forward(batch) if dense else None) for batch in batches]

    def to(self, group: Sequence[Target]) -> Evidence:
        """Go on to `group`, and give the evidence of what it reads: inputs, and dense_inputs beside the dense model.

        Raises:
            ValueError: a batch does not come there, or what is read is not fit; the message names the target.
        """
        leader = group[0]
        collector = Collector(self._model, group, frozenset({"inputs"}))
        for batch, forward, dense in self._pairs:
            collector.start(batch)
            beside = None
            if self._dense and dense:
                with self._dense.back():
                    beside = self._go_on(dense, leader.name)
            collector.read(leader, self._go_on(forward, leader.name), beside)
        self._hooks.pop(leader.name).remove()
        return collector.finish()

    def end(self) -> None:
        for _, *forwards in self._pairs:
            for forward in forwards:
                if forward:
                    forward.abandon()
        for hook in self._hooks.values():
            hook.remove()

    def _forward(self, batch: Batch) -> _Forward:
        return _Forward(lambda: self._model(**batch))

    def _go_on(self, forward: _Forward, name: str) -> Tensor:
        """What the target `name` reads in this forward."""
        self._runs = forward
        pause = forward.go_on()
        if pause is None or pause[0] != name:
            raise ValueError(f"{name}: not every batch runs it when its turn comes; exclude this target")
        return pause[1]

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            assert self._runs, "only forwards of the walk run now"
            self._runs.pause(name, args[0])
            there = self._model.get_submodule(name)
            return output if there is module else there(*args)

        return hook


class _Abandoned(BaseException):
    """Ends a forward that nobody waits for; not caught by what catches errors."""


class _Forward:
    """A forward in a thread that runs while its caller waits, as far as its next pause."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._pause: tuple[str, Tensor] | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._in_thread, daemon=True)
        self._thread.start()

    def go_on(self) -> tuple[str, Tensor] | None:
        """Run to the next pause: the target there, and what it reads; None at the end."""
        self._pause = None
        self._turn.release()
        self._done.acquire()
        if self._error:
            raise self._error
        return self._pause

    def pause(self, name: str, reads: Tensor) -> None:
        """Called in the thread: wait there."""
        self._pause = name, reads
        self._done.release()
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        self._abandoned = True
        self._turn.release()
        self._thread.join()

    def _in_thread(self) -> None:
        self._turn.acquire()
        try:
            if not self._abandoned:
                with torch.no_grad():  # each thread has its own mode
                    self._run()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()
