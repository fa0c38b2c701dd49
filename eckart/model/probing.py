"""A probe of linear layers: what they read when the model runs, and whether each input belongs to one example.

Calibration statistics need each input vector of a layer to belong to one example and, if examples are padded, to one
token of a mask. The probe runs the model for a batch, for every example twice and for other numbers of tokens, and
compares what the layers read.
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

ATTENTION = "attention_mask"
"""The entry of a batch that is 0 where a token of the text is padding. Masks of other entries end with this name, as
`decoder_attention_mask` does."""
PICTURES = "pixel_mask"
"""The entry that is 0 where a picture is padding, pixel by pixel; no layer's inputs can be matched to it."""
_NO_PADDING = "global_attention_mask"
_NOT_TEXT = ("pixel", "visual", "image")
"""Beginnings of the names of entries that are not tokens of a text."""

NEVER_RAN = "its forward ran 0 times for one batch"


def masks_of(batch: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the padding masks, each `(batch, tokens)`, or `(batch, choices, tokens)` if the ids are."""
    ids = batch.get("input_ids")
    shapes = [] if ids is None else [ids.shape]
    names = [name for name in batch if name.endswith(ATTENTION) and name != _NO_PADDING]
    return sorted(name for name in names if batch[name].dim() == 2 or batch[name].shape in shapes)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, or a subclass of one, which may compute something else (`Probe.unusable`)."""
    return isinstance(module, nn.Linear | Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """Whether it is an embedding: no subclass, and none whose lookups change its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


@dataclass
class _Reads:
    """The inputs of a layer in a forward of another batch than the probe's.

    Attributes:
        counts: the number of input vectors of each call.
        same: whether each call read what it reads of the probe's batch, as far as the two can be compared.
    """

    counts: list[int] = field(default_factory=list)
    same: bool = True


_OtherLength = tuple[int, Mapping[str, _Reads]]
"""A forward with another number of tokens: how many more each sequence has, and what each layer read."""


class Probe:
    """Records what layers read when the model runs a batch, every example of it twice, and other lengths.

    Raises:
        ValueError: the model cannot be called with the batch.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> None:
        self._model = model
        self._layers = layers
        self._examples = next(iter(batch.values())).shape[0]
        self._not_linear: dict[str, str] = {}
        self._inputs: dict[str, list[Tensor]] = {}  # holds the tensors, so that no two share an id
        try:
            self._run(batch, lambda name, x: self._inputs.setdefault(name, []).append(x))
            self._again = self._compare(batch, _close)
            self._doubled = self._compare({name: torch.cat([x, x]) for name, x in batch.items()}, _is_first_half)
            self._first = self._compare({name: x[:1] for name, x in batch.items()}, _is_beginning)
        except Exception as error:  # each model has errors of its own for what it misses
            raise ValueError(
                f"{type(model).__name__} cannot be called with a batch of {', '.join(batch)}: {error}"
            ) from error
        self.order = list(self._inputs)
        self._counts = {name: [self._count(name, x) for x in calls] for name, calls in self._inputs.items()}
        self._masks = {mask: batch[mask] for mask in masks_of(batch)}
        self._others = {mask: list(self._at_other_lengths(batch, mask)) for mask in self._masks}

    def _run(self, batch: Mapping[str, Tensor], visit: Callable[[str, Tensor], object]) -> None:
        """Run the model and call `visit` with what each layer reads in each of its calls, in order of execution."""

        def hook(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            visit(name, args[0])
            subclass = is_linear(module) and type(module) not in (nn.Linear, Conv1D) and "weight" in module._parameters
            if subclass and not _computes_linear(module, args, output):
                self._not_linear[name] = f"is a {type(module).__name__}, which does not compute x Wᵀ + b"

        hooks = [module.register_forward_hook(partial(hook, name)) for name, module in self._layers.items()]
        try:
            self._model(**batch)
        finally:
            for handle in hooks:
                handle.remove()

    def _compare(self, batch: Mapping[str, Tensor], same: Callable[[Tensor, Tensor], bool]) -> dict[str, _Reads]:
        """Run another batch and compare, by `same`, what the layers read with what they read of the probe's."""
        reads: dict[str, _Reads] = {}

        def visit(name: str, x: Tensor) -> None:
            layer, calls = reads.setdefault(name, _Reads()), self._inputs.get(name, [])
            call = len(layer.counts)
            layer.same = layer.same and call < len(calls) and same(x, calls[call])
            layer.counts.append(self._count(name, x))

        self._run(batch, visit)
        return reads

    def _at_other_lengths(self, batch: Mapping[str, Tensor], mask: str) -> Iterator[_OtherLength]:
        """Run the batch with about one token less or more, and with half of them, as far as the model allows it."""
        for group in _other_lengths(batch, mask):
            for more, other in group:
                try:
                    reads = self._compare(other, torch.equal)
                except Exception:  # a token that must stay, a fixed number of tokens: each model has its own error
                    continue
                yield more, reads
                break

    def _count(self, name: str, x: Tensor) -> int:
        """Return how many input vectors a tensor holds: the tokens of all examples."""
        return x.numel() // (1 if is_embedding(self._layers[name]) else x.size(-1))

    def reads(self, name: str) -> tuple[int, ...]:
        """Return the ids of the tensors that the layer reads, which are unique as long as the probe lives."""
        return tuple(map(id, self._inputs[name]))

    def calls(self, name: str) -> int:
        """Return how often the layer runs for the batch."""
        return len(self._counts[name])

    def repeated(self, name: str) -> bool:
        """Return whether the layer may run several times: a recurrent cell does if a batch has several tokens."""
        others = [reads[name].counts for runs in self._others.values() for _, reads in runs if name in reads]
        return any(len(counts) > 1 for counts in (self._counts[name], *others))

    def mask(self, name: str) -> str | None:
        """Return the mask whose tokens the layer reads, if any."""
        return next((mask for mask in self._masks if self._relation(name, mask) == "tokens"), None)

    def unusable(self, name: str) -> str | None:
        """Return why the layer cannot be a target, statistics or not; None if it can."""
        if not self._counts.get(name):
            return NEVER_RAN
        if any(x.is_nested for x in self._inputs[name]):
            return "it reads a nested tensor, which no mask of the batch describes"
        return self._not_linear.get(name)

    def mixes_examples(self, name: str) -> str | None:
        """Return why the layer's inputs cannot be attributed to examples and tokens; None if they can."""
        doubled, first = self._doubled.get(name, _Reads()), self._first.get(name, _Reads())
        if not self._again.get(name, _Reads(same=False)).same:
            return "its inputs are drawn at random"
        if doubled.counts != [2 * count for count in self._counts[name]]:
            return "not all of its inputs belong to examples of the batch"
        if not (doubled.same and first.same) or [self._examples * n for n in first.counts] != self._counts[name]:
            return "its inputs are not in the order of the examples"
        if "experts" in name.split(".") and self.mask(name) is None:
            return "its inputs are chosen by a router"
        relations = [self._relation(name, mask) for mask in self._masks]
        one_mask = relations.count("tokens") == 1 and set(relations) <= {"tokens", "as many", "none"}
        return None if one_mask or set(relations) <= {"none"} else self._unattributed(name)

    def _unattributed(self, name: str) -> str:
        fixed = [mask for mask, others in self._others.items() if not others]
        if fixed:
            return f"the model takes no other number of tokens, so none of its inputs can be matched to {fixed[0]}"
        return f"its inputs are not the tokens of {' or '.join(self._masks)}"

    def _relation(self, name: str, mask: str) -> Literal["tokens", "as many", "none"] | None:
        """Return what the layer's inputs are to the tokens of `mask`.

        tokens: these tokens; a recurrent cell has a call for each of them.
        as many: their number does not change with the tokens.
        none: nothing that the mask could hide; they are the same whatever the tokens, or one for each sequence.
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
    """Return whether a subclass of Linear computed x Wᵀ + b and has no other parameters."""
    weight, bias, x = module.get_parameter("weight"), getattr(module, "bias", None), args[0]
    more = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    if more or not (isinstance(output, Tensor) and weight.is_floating_point() and weight.dim() == 2):
        return False
    expected = linear(x, weight if isinstance(module, nn.Linear) else weight.T, bias)
    return expected.shape == output.shape and _close(output, expected, 8 * torch.finfo(weight.dtype).eps)


def _close(a: Tensor, b: Tensor, tolerance: float = 0.05) -> bool:
    """Return whether both are equal but for rounding, by default that of a whole model in bfloat16."""
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.float().nan_to_num(), b.float().nan_to_num()
    return float((a - b).norm()) <= tolerance * float(b.norm())


def _is_first_half(doubled: Tensor, x: Tensor) -> bool:
    """Return whether the inputs of every example twice begin with those of every example once."""
    if x.dim() == 0 or x.is_nested:
        return not x.is_nested
    return len(doubled) == 2 * len(x) and _close(doubled[: len(x)], x)


def _is_beginning(first: Tensor, x: Tensor) -> bool:
    """Return whether the inputs of the first example alone are the beginning of those of all."""
    return x.dim() == 0 or _close(first, x[: len(first)])


def _other_lengths(batch: Mapping[str, Tensor], mask: str) -> Iterator[Sequence[tuple[int, dict[str, Tensor]]]]:
    """Yield groups of batches with another number of tokens of `mask`, each with how many these are more; no labels.

    The first batch of a group that the model takes is enough. Less comes before more, as a model may take no longer
    batch; the first token is left out before the last, as a model may look for one at the end.
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


def columns(batch: Mapping[str, Tensor], mask: str, places: Tensor) -> dict[str, Tensor]:
    """Return the batch without labels and, of all that `mask` masks, only the tokens at `places`.

    A mask masks the entries of its shape whose name begins as its own does; the text's masks those that begin as no
    other mask does.
    """
    shape, beginnings = batch[mask].shape, [name.removesuffix(ATTENTION) for name in masks_of(batch)]
    others = [*filter(None, beginnings), "decoder_", *_NOT_TEXT]
    own = mask.removesuffix(ATTENTION)

    def is_masked(name: str) -> bool:
        return name.startswith(own) if own else not name.startswith(tuple(others))

    return {
        name: values.index_select(len(shape) - 1, places.to(values.device))
        if values.shape[: len(shape)] == shape and is_masked(name)
        else values
        for name, values in batch.items()
        if name != "labels"
    }


def float_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model's output."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    parts: Sequence[Any] = tuple(output.values()) if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, tuple | list) else ():
        yield from float_tensors(part)
