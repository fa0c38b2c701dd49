"""What each target's factors do alone: the dense model with one target after the other replaced.

To set beside what a rank search predicts of a target, which knows nothing of the others either.
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

_ROOM = 2**30  # bytes of answers that are kept


@torch.no_grad()
def losses_alone(
    dense: PreTrainedModel,
    small: PreTrainedModel,
    targets: Iterable[Target],
    batches: Sequence[Batch],
    objective: Objective,
) -> dict[str, float]:
    """Target → distance of the answers from the dense model's: a divergence of classes in nats, or the mean square of
    the differences of values; a mean over predictions. It is of second order, and needs no labels.

    Args:
        dense: comes back as it was.
        small: the same model with factors.
        batches: model inputs, each tensor `(batch, …)`.
    """

    def answers() -> list[Tensor]:
        return [objective.predictions(dense(**batch), batch) for batch in batches]

    with eval_mode(dense):
        layers = _Layers(dense, len(batches))
        with layers.recorded():
            known = answers()
        layers.check(answers, known)
        found: dict[str, float] = {}
        for target in targets:
            present = {each.name: dense.get_submodule(each.name) for each in target.maps}
            for name in present:
                replace(dense, name, small.get_submodule(name))
            with layers.given_before(present):
                others = answers()
            for name, module in present.items():
                replace(dense, name, module)
            found[target.name] = _distance(others, known, objective.classes)
        return found


class _Layers:
    """The layers of a model that is a chain of them: those before a target are not run again, their answers stand.

    All run where a model has several chains, runs a layer twice, or has layers that hand on more than their answers,
    and where these take too much memory.
    """

    def __init__(self, model: PreTrainedModel, batches: int) -> None:
        chains = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        outer = [name for name in chains if not any(name.startswith(f"{other}.") for other in chains)]
        self._chain = list(chains[outer[0]].named_children()) if len(outer) == 1 else []
        self._names = [f"{outer[0]}.{name}." for name, _ in self._chain]
        self._answers: list[list[Any]] = [[] for _ in self._chain]
        self._once_each = list(range(len(self._chain))) * batches
        self._order: list[int] = []
        self._bytes = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note what each layer answers to each batch."""

        def note(number: int, answer: Any) -> None:
            self._order.append(number)
            self._bytes += _bytes(answer)
            if self._bytes > _ROOM:
                self._forget()
            elif self._names:
                self._answers[number].append(answer)

        with ExitStack() as hooks:
            for number, (_, layer) in enumerate(self._chain):
                hooks.enter_context(layer.register_forward_hook(lambda *call, number=number: note(number, call[-1])))
            yield

    def check(self, answers: Callable[[], list[Tensor]], known: Sequence[Tensor]) -> None:
        """Record nothing unless the model's `answers` are the `known` ones when all layers but the last are not run."""
        same = self._order == self._once_each
        if same and self._names:
            try:
                with self._given(len(self._names) - 1):
                    same = all(map(torch.equal, answers(), known))
            except Exception:  # each model misses in its own way what a layer did not do
                same = False
        if not same:
            self._forget()

    def _forget(self) -> None:
        self._names, self._answers = [], [[] for _ in self._chain]

    @contextmanager
    def given_before(self, names: Iterable[str]) -> Iterator[None]:
        """Have the layers before all of the modules `names` answer the same batches as they did."""
        with self._given(min(map(self._known_before, names))):
            yield

    @contextmanager
    def _given(self, layers: int) -> Iterator[None]:
        with ExitStack() as stack:
            for (_, layer), recorded in zip(self._chain[:layers], self._answers, strict=False):
                answers = iter(recorded)
                stack.enter_context(forward_of(layer, lambda *_, answers=answers, **__: next(answers)))
            yield

    def _known_before(self, name: str) -> int:
        """Layers that have run when the module `name` does; 0 where that is not known."""
        return next((number for number, layer in enumerate(self._names) if name.startswith(layer)), 0)


def _bytes(answer: Any) -> int:
    parts = answer if isinstance(answer, tuple) else (answer,)
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _distance(others: Sequence[Tensor], answers: Sequence[Tensor], classes: bool) -> float:
    sums = [
        len(one) * float(logits_error(one, other, 1.0 if classes else None))
        for one, other in zip(others, answers, strict=True)
    ]
    return sum(sums) / sum(map(len, answers))
