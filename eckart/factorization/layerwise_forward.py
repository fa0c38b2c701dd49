"""A forward pass of all calibration data that pauses at each target, so that the target can be replaced before it runs.

Each batch's forward pass is a coroutine that pauses when it calls a target. When all passes have paused, the target's
inputs are known and the target can be replaced; the passes then call the replacement. So factorizing all targets in
order takes only one forward pass of each batch, whatever code is between the layers. The price is memory: the
activations that a paused pass still needs are kept for all calibration tokens. Also, a model must not store data of a
forward pass on its modules, because passes of other batches run in between.

For error compensation (eckart/factorization/error_compensation.py), the original model runs at the same time, in
forward passes of its own.

For refinement (eckart/factorization/refinement.py), the passes also pause at the end of a transformer layer. The
compressed model then runs this layer once more, with the parameters that it has by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from eckart.calibration.statistics import Collector, Statistics
from eckart.factorization.error_compensation import DenseModules
from eckart.factorization.residual_sums import first_input
from eckart.factorization.weightings import exact_dtype
from eckart.model.batches import Batch
from eckart.model.layers import present
from eckart.model.module_context import frozen
from eckart.model.targets import Target, weight_of
from eckart.precision import at_least_float32

_EXCLUDE = "exclude it"


class BlockCall(NamedTuple):
    """Arguments of a transformer layer for one batch, and the hidden states that it should return.

    Attributes:
        args, kwargs: arguments of the layer in the compressed model.
        wanted: hidden states `(batch, tokens, out)` that the original layer returns in the original model.
        batch: the batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: Tensor
    batch: Batch


@contextmanager
def layerwise_forward(
    model: PreTrainedModel,
    groups: Iterable[Sequence[Target]],
    batches: Iterable[Batch],
    dense: DenseModules | None = None,
    blocks: Iterable[str] = (),
    readers: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Iterator[LayerwiseForward]:
    """Begin a layerwise forward pass of `batches`; the model is in eval mode until the context ends.

    Args:
        groups: groups of targets with the same input tensor, in order of execution.
        dense: the original modules, to run the original model as well; None: run only the factorized model.
        blocks: names of the transformer layers at whose ends the passes also pause; only with `dense`.
        readers: what `residual_readers` returns, for targets that are to correct the errors of sums, too, each in a
            group of its own; only with `dense`.
    """
    with frozen(model):
        forward = LayerwiseForward(model, list(batches), dense, readers)
        try:
            for group in groups:
                forward.pause_at(group)
            for block in blocks:
                forward.pause_after(block)
            yield forward
        finally:
            forward.end()


class LayerwiseForward:
    """The forward passes of all batches, paused at the same target."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Batch],
        dense: DenseModules | None,
        readers: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._model = model
        self._batches = batches
        self._dense = dense
        self._forwards = [_Forward(model, batch) for batch in batches]
        self._dense_forwards = [_Forward(model, batch, dense=True) for batch in batches] if dense else []
        self._undo: dict[str, Callable[[], None]] = {}
        self._readers = dict(readers)
        self._hooks = {reader: self._remember(reader) for reader in {*chain.from_iterable(readers.values())}}

    def _remember(self, name: str) -> RemovableHandle:
        """Make all passes remember the latest input of the module `name`, until `_forget`."""

        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running, x = _Forward.running(), first_input(args, kwargs)
            if running and x is not None:
                running.inputs[name] = x

        return self._model.get_submodule(name).register_forward_pre_hook(read, with_kwargs=True)

    def _forget(self, name: str) -> None:
        """Let no pass remember inputs of the module `name`; those of all layers are too large together."""
        self._hooks.pop(name).remove()
        for forward in (*self._forwards, *self._dense_forwards):
            forward.inputs.pop(name, None)

    def pause_at(self, group: Sequence[Target]) -> None:
        """Make all passes pause when they call the first target of `group`, until `advance_to` has reached it.

        The original model's passes tell its inputs, or if `_by_outputs`, its outputs.
        """
        name, by_outputs = group[0].name, self._by_outputs(group)
        module = self._model.get_submodule(name)
        own = module.forward

        def forward(*args: Tensor) -> Tensor:
            running = _Forward.running()
            if running and running.dense and by_outputs:
                output: Tensor = own(*args)
                running.pause(name, output)
                return output
            if running:
                running.pause(name, args[0])
            current = self._model.get_submodule(name)
            result: Tensor = own(*args) if current is module else current(*args)
            return result

        self._patch(name, module, forward)

    def _by_outputs(self, group: Sequence[Target]) -> bool:
        """Whether wanted outputs come from the original model's outputs; else from its inputs, which `group` shares.

        Of the two, the smaller takes fewer products.
        """
        first = group[0]
        alone = len(group) == len(first.layers) == 1
        return first.name in self._readers or (alone and first.out_features <= first.in_features)

    def pause_after(self, block: str) -> None:
        """Make all passes pause when the transformer layer `block` ends, until `end_block` has reached this point.

        The compressed model's passes then run the layer again, since its parameters may have changed.
        """
        module = self._model.get_submodule(block)
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output, running = own(*args, **kwargs), _Forward.running()
            if running and running.dense:
                running.pause(block, hidden_states(output))
            elif running:
                del output  # frees its memory
                running.pause(block, (args, kwargs))
                output = own(*args, **kwargs)
            return output

        self._patch(block, module, forward)

    def _patch(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        own, patched = module.forward, "forward" in vars(module)  # accelerate may have patched it

        def undo() -> None:
            del module.forward
            if patched:
                module.forward = own

        module.forward = forward
        self._undo[name] = undo

    def advance_to(self, group: Sequence[Target]) -> Statistics:
        """Run all passes up to the targets `group`, which read the same tensor, and return statistics of this tensor.

        If the original model runs as well, wanted_outputs are among these statistics.

        Raises:
            ValueError: a batch does not call the target, or an input is not finite; the message names the target.
        """
        first = group[0]
        collector = Collector(self._model, group, frozenset({"inputs"}))
        told = self._advance_dense(first.name) if self._dense else [None] * len(self._batches)
        for number, (batch, forward) in enumerate(zip(self._batches, self._forwards, strict=True)):
            collector.start(batch)
            inputs, dense = forward.advance_to(first.name), told[number]
            if dense is not None and self._by_outputs(group):
                dense = self._wanted(first, dense, number)
            collector.add_inputs(first, inputs, dense)
        statistics = collector.finish()
        wanted = statistics.get("dense_products", {})
        if wanted and not self._by_outputs(group):
            wanted = self._by_weights(group, wanted[first.name])
        self._undo.pop(first.name)()
        readers = self._readers.pop(first.name, ())
        for reader in {*readers}.difference(*self._readers.values()):
            self._forget(reader)
        return {**statistics, "wanted_outputs": wanted}

    def _by_weights(self, group: Sequence[Target], products: Tensor) -> dict[str, Tensor]:
        """Return layer → products `(out, in)` of the outputs that it should have, with the inputs that it gets.

        Args:
            products: the same of the inputs that it has in the original model, `(n, in)`.
        """
        exact = products.to(exact_dtype(products))
        names = [layer.name for target in group for layer in target.layers]
        return {name: weight_of(present(self._model, name)).to(exact) @ exact for name in names}

    def _wanted(self, target: Target, outputs: Tensor, number: int) -> Tensor:
        """Return the outputs that `target` should have without its bias, and with the errors of its sum.

        Args:
            outputs: those of the original model, `(…, out)`.
            number: number of the batch.
        """
        wanted = at_least_float32(outputs)
        if (bias := getattr(present(self._model, target.name), "bias", None)) is not None:
            wanted = wanted - bias
        original, current = self._dense_forwards[number].inputs, self._forwards[number].inputs
        for reader in self._readers.get(target.name, ()):
            wanted = wanted + (original[reader].to(wanted) - current[reader].to(wanted)).reshape(wanted.shape)
        return wanted

    def end_block(self, block: str) -> list[BlockCall]:
        """Run all passes of both models to the end of the transformer layer `block`, and return its calls.

        Raises:
            ValueError: a batch does not run the layer's targets within one call of the layer.
        """
        advice = "its blocks cannot be refined: exclude its targets, or write refine: null"
        wanted = self._advance_dense(block, advice)
        calls = [forward.advance_to(block, advice) for forward in self._forwards]
        self._undo.pop(block)()
        return [
            BlockCall(args, kwargs, outputs, batch)
            for (args, kwargs), outputs, batch in zip(calls, wanted, self._batches, strict=True)
        ]

    def _advance_dense(self, name: str, advice: str = _EXCLUDE) -> list[Any]:
        """Run the original model's passes to the module `name`, and return what each pause tells.

        All run before the compressed model's, since the modules take long to exchange. This takes no more memory: a
        paused pass holds these tensors anyway.
        """
        assert self._dense
        with self._dense.back():
            return [forward.advance_to(name, advice) for forward in self._dense_forwards]

    def end(self) -> None:
        """Abandon all paused passes where they are, and take back the changes to modules that made them pause."""
        for undo in self._undo.values():
            undo()
        for hook in self._hooks.values():
            hook.remove()
        for forward in (*self._forwards, *self._dense_forwards):
            forward.throw()


def hidden_states(output: Any) -> Tensor:
    """Return the hidden states among the outputs of a transformer layer: the output itself, or the first of several."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


class _Forward(greenlet):
    """The forward pass of one batch as a coroutine that runs from pause to pause while its caller waits.

    Its `throw` (of greenlet) ends the pass at its current point.
    """

    def __init__(self, model: PreTrainedModel, batch: Batch, dense: bool = False) -> None:
        super().__init__(partial(_run, model, batch))
        self.dense = dense
        self.inputs: dict[str, Tensor] = {}
        """Latest inputs of the modules that the pass is to remember."""

    @torch.no_grad()
    def advance_to(self, name: str, advice: str = _EXCLUDE) -> Any:
        """Run to the next pause, which must be at the module `name`, and return what the pause tells.

        Raises:
            ValueError: the pass pauses at another module, or ends.
        """
        pause = None if self.dead else self.switch()
        if pause is None or pause[0] != name:
            raise ValueError(f"{name}: not every batch runs this layer in this order: {advice}")
        return pause[1]

    @staticmethod
    def running() -> _Forward | None:
        """Return the pass that runs now and has a caller to pause for."""
        current = getcurrent()
        return current if isinstance(current, _Forward) and current.parent else None

    def pause(self, name: str, told: Any) -> None:
        """Pause this pass, which is running, at the module `name`, and tell the caller something."""
        assert self.parent
        self.parent.switch((name, told))


def _run(model: PreTrainedModel, batch: Batch) -> None:
    model(**batch)
