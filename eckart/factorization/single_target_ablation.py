"""Ablation of single targets: the original model with one target at a time replaced by its factors.

Its result is compared with what a rank search predicts for a target, which does not know of the others either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Objective, logits_error
from eckart.model.layers import replace
from eckart.model.module_context import eval_mode, forward_of
from eckart.model.targets import Target

_MOST_BYTES = 2**30  # of recorded outputs


@torch.no_grad()
def losses_alone(
    dense: PreTrainedModel,
    small: PreTrainedModel,
    targets: Iterable[Target],
    batches: Sequence[Batch],
    objective: Objective,
) -> dict[str, float]:
    """Return how far the predictions move from the original model's if one target alone is factorized.

    For classes that is the KL divergence in nats, for values the squared error, averaged over predictions. It needs no
    labels.

    Args:
        dense: the original model; it is restored afterwards.
        small: the same model with factors.
        batches: model inputs, each tensor `(batch, …)`.
    """

    def predict() -> list[Tensor]:
        return [objective.predictions(dense(**batch), batch) for batch in batches]

    with eval_mode(dense):
        blocks = _RecordedBlocks(dense, len(batches))
        with blocks.recording():
            expected = predict()
        blocks.check(predict, expected)
        losses: dict[str, float] = {}
        for target in targets:
            modules = {layer.name: dense.get_submodule(layer.name) for layer in target.layers}
            for name in modules:
                replace(dense, name, small.get_submodule(name))
            with blocks.replayed_before(modules):
                predictions = predict()
            for name, module in modules.items():
                replace(dense, name, module)
            losses[target.name] = _distance(predictions, expected, objective.classes)
        return losses


class _RecordedBlocks:
    """The outputs of a model's blocks, replayed so that the blocks before a target need not run again.

    Every block runs if the model has several lists of blocks, runs a block twice, or has blocks that pass on more than
    their outputs, and if the outputs take too much memory.
    """

    def __init__(self, model: PreTrainedModel, batches: int) -> None:
        lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        self._blocks = list(lists[outer[0]].named_children()) if len(outer) == 1 else []
        self._names = [f"{outer[0]}.{name}." for name, _ in self._blocks]
        self._outputs: list[list[Any]] = [[] for _ in self._blocks]
        self._once_each = list(range(len(self._blocks))) * batches
        self._order: list[int] = []
        self._bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record each block's output for each batch."""

        def record(number: int, output: Any) -> None:
            self._order.append(number)
            self._bytes += _bytes(output)
            if self._bytes > _MOST_BYTES:
                self._forget()
            elif self._names:
                self._outputs[number].append(output)

        with ExitStack() as hooks:
            for number, (_, block) in enumerate(self._blocks):
                hooks.enter_context(block.register_forward_hook(lambda *call, number=number: record(number, call[-1])))
            yield

    def check(self, predict: Callable[[], list[Tensor]], expected: Sequence[Tensor]) -> None:
        """Forget the outputs unless the model predicts what is `expected` when only its last block runs."""
        same = self._order == self._once_each
        if same and self._names:
            try:
                with self._replayed(len(self._names) - 1):
                    same = all(map(torch.equal, predict(), expected))
            except Exception:  # each model has its own error if a block did not run
                same = False
        if not same:
            self._forget()

    def _forget(self) -> None:
        self._names, self._outputs = [], [[] for _ in self._blocks]

    @contextmanager
    def replayed_before(self, names: Iterable[str]) -> Iterator[None]:
        """Let the blocks before all of the modules `names` return what they returned for the same batches."""
        with self._replayed(min(map(self._blocks_before, names))):
            yield

    @contextmanager
    def _replayed(self, blocks: int) -> Iterator[None]:
        with ExitStack() as stack:
            for (_, block), recorded in zip(self._blocks[:blocks], self._outputs, strict=False):
                outputs = iter(recorded)
                stack.enter_context(forward_of(block, lambda *_, outputs=outputs, **__: next(outputs)))
            yield

    def _blocks_before(self, name: str) -> int:
        """Return the number of blocks that run before the module `name`; 0 if that is not known."""
        return next((number for number, block in enumerate(self._names) if name.startswith(block)), 0)


def _bytes(output: Any) -> int:
    parts = output if isinstance(output, tuple) else (output,)
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _distance(predictions: Sequence[Tensor], expected: Sequence[Tensor], classes: bool) -> float:
    """Return the mean divergence or squared error over the predictions of all batches."""
    temperature = 1.0 if classes else None
    sums = [len(a) * float(logits_error(a, b, temperature)) for a, b in zip(predictions, expected, strict=True)]
    return sum(sums) / sum(map(len, expected))
