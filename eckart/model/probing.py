"""Probing of linear layers: runs a model to find out whether each input vector of a layer belongs to one example.

Calibration statistics need this: each input vector of a layer must belong to one example and, if examples are padded,
to one token of a mask. The probe runs the model on a batch, on a batch with every example twice, and on batches with
other numbers of tokens, and compares the inputs of the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from eckart.model.batches import NOT_TEXT, Batch, batch_size, columns, examples_of, masks_of
from eckart.model.module_context import eval_mode, hooked

NEVER_RAN = "its forward did not run for the batch"
NO_WORDS = "the ids that it looks up are not the batch's input_ids, but positions, types or the like"
_ENOUGH = 256  # tokens of a probe's examples: they tell as much as 2,048, and two of 8 experts get some of them


@torch.no_grad()
def shortened(model: nn.Module, batch: Batch, tokens: int = _ENOUGH) -> Batch:
    """Return a batch of texts cut to `tokens`, if `model` takes so few; any other batch is returned as it is.

    Each text keeps its last tokens, because the labels of the first may not count: those of a prompt, say. It also
    keeps its share of padding. All entries must have the shape of `input_ids`; if texts are padded, there may be only
    one mask.
    """
    shape, masks = batch["input_ids"].shape if "input_ids" in batch else None, masks_of(batch)
    alike = shape is not None and len(shape) == 2 and all(values.shape == shape for values in batch.values())
    if not alike or batch["input_ids"].shape[1] <= tokens:
        return batch
    real = batch[masks[0]].ne(0) if masks else torch.ones_like(batch["input_ids"], dtype=torch.bool)
    if not real.all() and len(masks) > 1:
        return batch
    kept = _last_tokens(real, tokens)
    short = {name: values[kept].unflatten(0, (len(values), tokens)) for name, values in batch.items()}
    try:
        with eval_mode(model):
            model(**short)
    except Exception:  # the model takes a fixed number of tokens; the error's type depends on it
        return batch
    return short


def _last_tokens(real: Tensor, tokens: int) -> Tensor:
    """Return which `tokens` of each text to keep: the last ones, and the last ones of its padding, in their shares.

    Args:
        real: whether a token is no padding, `(batch, tokens)`.
    """
    counts = real.sum(1, keepdim=True)
    most = (counts * tokens + real.shape[1] - 1) // real.shape[1]  # rounded up: a text keeps at least one token

    def last(chosen: Tensor, count: Tensor) -> Tensor:
        return chosen & (chosen.flip(1).cumsum(1).flip(1) <= count)

    return last(real, most) | last(~real, tokens - most)


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a Linear, a Conv1D or a subclass; `Probe.unusable` tells if a subclass computes x Wᵀ + b."""
    return isinstance(module, nn.Linear | Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """Whether `module` is an nn.Embedding, no subclass, with a weight that lookups do not change (no max_norm)."""
    return type(module) is nn.Embedding and module.max_norm is None


@dataclass
class _Reads:
    """Inputs of a layer when the model ran on a variant of the probe's batch, compared with those for the batch itself.

    Attributes:
        counts: number of input vectors in each call of the layer.
        same: whether, in all calls, these vectors equal those for the probe's batch. If one of the batches has more
            examples than the other, only the examples that are in both are compared.
    """

    counts: list[int] = field(default_factory=list)
    same: bool = True


_OtherLength = tuple[int, Mapping[str, _Reads]]
"""Result of a forward pass with another number of tokens: how many more tokens each sequence has (negative: how many
fewer), and name of layer → its inputs."""


class Probe:
    """Records the inputs of layers for a batch and variants of it, and tells whether they belong to single examples.

    The variants are: the same batch again, every example twice, only the first example, and other numbers of tokens.

    Attributes:
        order: names of the layers that ran, in order of execution.

    Raises:
        ValueError: the model cannot be called with the batch.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], batch: Batch) -> None:
        self._model = model
        self._layers = layers
        self._examples = batch_size(batch)
        self._not_linear: dict[str, str] = {}
        self._inputs: dict[str, list[Tensor]] = {}  # keeps the tensors alive, so that no two share an id
        try:
            self._run(batch, lambda name, x: self._inputs.setdefault(name, []).append(x))
            self._again = self._compare(batch, _close)
            self._doubled = self._compare({name: torch.cat([x, x]) for name, x in batch.items()}, _is_first_half)
            self._first = self._compare(examples_of(batch, 0, 1), _is_beginning)
        except Exception as error:  # the type of the error depends on the model
            pictures = self._examples > 1 and any(map(NOT_TEXT.match, batch))
            advice = ". If not every example has one picture, give batches of one example" * pictures
            raise ValueError(
                f"{type(model).__name__} cannot be called with a batch of {', '.join(batch)}: {error}{advice}"
            ) from error
        self.order = list(self._inputs)
        self._counts = {name: [self._count(name, x) for x in calls] for name, calls in self._inputs.items()}
        self._masks = {mask: batch[mask] for mask in masks_of(batch)}
        self._words = [values.flatten() for name, values in batch.items() if name.endswith("input_ids")]
        self._others = {mask: list(self._at_other_lengths(batch, mask)) for mask in self._masks}

    def _run(self, batch: Batch, visit: Callable[[str, Tensor], object]) -> None:
        """Run the model; each time a layer runs, call `visit` with the layer's name and its input."""

        def hook(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            visit(name, args[0])
            subclass = is_linear(module) and type(module) not in (nn.Linear, Conv1D) and "weight" in module._parameters
            if subclass and not _computes_linear(module, args, output):
                self._not_linear[name] = f"is a {type(module).__name__}, which does not compute x Wᵀ + b"

        with hooked([module.register_forward_hook(partial(hook, name)) for name, module in self._layers.items()]):
            self._model(**batch)

    def _compare(self, batch: Batch, same: Callable[[Tensor, Tensor], bool]) -> dict[str, _Reads]:
        """Run the model on `batch`, a variant of the probe's batch, and compare each layer's inputs for both batches.

        Args:
            same: function that compares the input for `batch` with the input for the probe's batch.
        """
        reads: dict[str, _Reads] = {}

        def visit(name: str, x: Tensor) -> None:
            layer, calls = reads.setdefault(name, _Reads()), self._inputs.get(name, [])
            call = len(layer.counts)
            layer.same = layer.same and call < len(calls) and same(x, calls[call])
            layer.counts.append(self._count(name, x))

        self._run(batch, visit)
        return reads

    def _at_other_lengths(self, batch: Batch, mask: str) -> Iterator[_OtherLength]:
        """Run the model with one token of `mask` less or more, and with half of them; yield what the model accepts."""
        for group in _other_lengths(batch, mask):
            for more, other in group:
                try:
                    reads = self._compare(other, torch.equal)
                except Exception:  # the model needs this token, or a fixed number of tokens; error types differ
                    continue
                yield more, reads
                break

    def _count(self, name: str, x: Tensor) -> int:
        """Return how many input vectors (tokens of all examples) a layer's input holds."""
        return x.numel() // (1 if is_embedding(self._layers[name]) else x.size(-1))

    def reads(self, name: str) -> tuple[int, ...]:
        """Return the Python ids of the tensors that the layer read; they are unique as long as the probe exists."""
        return tuple(map(id, self._inputs[name]))

    def calls(self, name: str) -> int:
        """Return how often the layer ran for the batch."""
        return len(self._counts[name])

    def repeated(self, name: str) -> bool:
        """Return whether the layer ran several times in any forward pass, such as a recurrent cell once per token."""
        others = [reads[name].counts for runs in self._others.values() for _, reads in runs if name in reads]
        return any(len(counts) > 1 for counts in (self._counts[name], *others))

    def mask(self, name: str) -> str | None:
        """Return the name of the mask that belongs to the tokens that the layer reads; None if there is none."""
        return next((mask for mask in self._masks if self._relation(name, mask) == "tokens"), None)

    def unusable(self, name: str) -> str | None:
        """Return why the layer cannot be a target, even without statistics; None if it can."""
        if not self._counts.get(name):
            return NEVER_RAN
        if any(x.is_nested for x in self._inputs[name]):
            return "it reads a nested tensor, to which no mask of the batch fits"
        if is_embedding(self._layers[name]) and not any(map(self._holds_words, self._inputs[name])):
            return NO_WORDS
        return self._not_linear.get(name)

    def _holds_words(self, ids: Tensor) -> bool:
        return any(torch.equal(ids.flatten(), words.to(ids)) for words in self._words)

    def mixes_examples(self, name: str) -> str | None:
        """Return why the layer's input vectors cannot be assigned to examples and tokens; None if they can."""
        doubled, first = self._doubled.get(name, _Reads()), self._first.get(name, _Reads())
        if not self._again.get(name, _Reads(same=False)).same:
            return "its inputs are drawn at random"
        if doubled.counts != [2 * count for count in self._counts[name]]:
            return "not all of its inputs belong to examples of the batch"
        if not (doubled.same and first.same) or [self._examples * n for n in first.counts] != self._counts[name]:
            return "its inputs are not in the order of the examples"
        if "experts" in name.split(".")[:-1] and self.mask(name) is None:
            return "its inputs are chosen by a router"
        relations = [self._relation(name, mask) for mask in self._masks]
        one_mask = relations.count("tokens") == 1 and set(relations) <= {"tokens", "as many", "none"}
        if one_mask or set(relations) <= {"none"}:
            return None
        if fixed := [mask for mask, others in self._others.items() if not others]:
            return f"the model takes no other number of tokens, so none of its inputs can be matched to {fixed[0]}"
        return f"its inputs are not the tokens of {' or '.join(self._masks)}"

    def _relation(self, name: str, mask: str) -> Literal["tokens", "as many", "none"] | None:
        """Return how the layer's input vectors are related to the tokens of `mask`, or None if this is unclear.

        tokens: there is one input vector for each token; a recurrent cell gets them in one call for each token.
        as many: the number of input vectors does not depend on the number of tokens, but their values do.
        none: the mask does not concern the layer: it gets one input vector for each sequence, or its input vectors do
            not depend on the tokens.
        """
        counts, sequences = self._counts[name], math.prod(self._masks[mask].shape[:-1])
        tokens = self._masks[mask].shape[-1]
        others = [(reads.get(name, _Reads()), more) for more, reads in self._others[mask]]
        changed = [(other.counts, more) for other, more in others if other.counts != counts]
        if others and not changed:
            one_each = set(counts) <= {self._examples, sequences}
            return "none" if one_each or all(other.same for other, _ in others) else "as many"
        whole = any(set(other) == {sequences * (tokens + more)} for other, more in changed)
        if whole and set(counts) == {sequences * tokens}:
            return "tokens"
        cell = any(len(other) == len(counts) + more and {*counts} == {*other} == {sequences} for other, more in changed)
        return "tokens" if cell else None


def _computes_linear(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> bool:
    """Return whether a subclass of Linear or Conv1D computed x Wᵀ + b and has no other parameters."""
    weight, bias, x = module.get_parameter("weight"), getattr(module, "bias", None), args[0]
    more = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    if more or not (isinstance(output, Tensor) and weight.is_floating_point() and weight.dim() == 2):
        return False
    expected = linear(x, weight if isinstance(module, nn.Linear) else weight.T, bias)
    return expected.shape == output.shape and _close(output, expected, 8 * torch.finfo(weight.dtype).eps)


def _close(a: Tensor, b: Tensor, tolerance: float = 0.05) -> bool:
    """Return whether two tensors are equal up to rounding; the default tolerance suits a whole model in bfloat16."""
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.float().nan_to_num(), b.float().nan_to_num()
    return float((a - b).norm()) <= tolerance * float(b.norm())


def _is_first_half(doubled: Tensor, x: Tensor) -> bool:
    """Return whether the first half of a layer's input for the doubled batch equals its input `x` for the batch."""
    if x.dim() == 0 or x.is_nested:
        return not x.is_nested
    return len(doubled) == 2 * len(x) and _close(doubled[: len(x)], x)


def _is_beginning(first: Tensor, x: Tensor) -> bool:
    """Return whether a layer's input for the first example alone equals the beginning of its input `x` for all."""
    return x.dim() == 0 or _close(first, x[: len(first)])


def _other_lengths(batch: Batch, mask: str) -> Iterator[Sequence[tuple[int, dict[str, Tensor]]]]:
    """Yield groups of variants of `batch`: how many tokens are added (negative: removed), and the batch with them.

    Of each group, only the first batch that the model accepts is needed. Shorter batches come first, because a model
    may accept no longer ones. The batch without the first token comes before the batch without the last token, because
    a model may need a special token at the end.
    """
    tokens = batch[mask].shape[-1]
    places, longer = torch.arange(tokens), torch.tensor([0, *range(tokens)])
    shorter = [(-1, places[1:]), (-1, places[:-1])] if tokens > 1 else []
    yield [(more, columns(batch, mask, chosen)) for more, chosen in [*shorter, (1, longer)]]
    if tokens > 3:
        half = tokens // 2
        yield [
            (half - tokens, columns(batch, mask, places[-half:])),
            (half - tokens, columns(batch, mask, places[:half])),
        ]


def float_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model's output."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    parts: Sequence[Any] = tuple(output.values()) if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, tuple | list) else ():
        yield from float_tensors(part)
