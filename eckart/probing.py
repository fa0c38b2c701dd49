"""A probe of linear maps: what they read when the model runs, and whose rows these are.

Evidence needs each row of an input to belong to one sample and, where samples are padded, to one token of a mask. The
probe runs the model for a batch, for every sample twice and for other numbers of tokens, and compares what the maps
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

MASKS = ("attention_mask", "decoder_attention_mask")
"""Entries of a batch, each `(batch, tokens)` or `(batch, choices, tokens)`, that are 0 where a token is padding."""
_OF_PICTURES = ("pixel", "visual", "image")
"""What is in the names of a batch's entries that are no tokens of a text."""

NEVER_RAN = "its forward ran 0 times for one batch"


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear map, or a subclass of one, which may compute something else (`Probe.unusable`)."""
    return isinstance(module, nn.Linear | Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """Exact type only, and none whose lookups change its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


@dataclass(frozen=True)
class _Other:
    """What the maps read where a mask has another number of tokens."""

    inputs: Mapping[str, Sequence[Tensor]]
    rows: Mapping[str, Sequence[int]]
    more: int
    """Tokens of each sequence more than in the batch; negative if fewer."""


class Probe:
    """What some maps read when the model runs: for the batch, for every sample twice, and for other lengths.

    Raises:
        ValueError: the model cannot be called with the batch.
    """

    def __init__(self, model: nn.Module, maps: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> None:
        self._samples = next(iter(batch.values())).shape[0]
        self._others_forward: dict[str, str] = {}
        try:
            self._inputs = self._read(model, maps, batch)
            doubled = self._read(model, maps, {name: torch.cat([x, x]) for name, x in batch.items()})
        except Exception as error:  # a model says in its own way what it misses
            raise ValueError(
                f"{type(model).__name__} cannot be called with a batch of {', '.join(batch)}: {error}"
            ) from error
        self.order = list(self._inputs)
        self._rows = _rows(maps, self._inputs)
        self._doubled = _rows(maps, doubled)
        self._by_sample = {name for name in doubled if self._starts_with_samples(name, doubled[name])}
        self._masks = {mask: batch[mask] for mask in MASKS if mask in batch}
        self._others = {mask: self._at_other_lengths(model, maps, batch, mask) for mask in self._masks}

    def _read(
        self, model: nn.Module, maps: Mapping[str, nn.Module], batch: Mapping[str, Tensor]
    ) -> dict[str, list[Tensor]]:
        """What each map reads in each of its calls, in order of first execution."""
        inputs: dict[str, list[Tensor]] = {}  # holds the tensors, so that no two share an id

        def read(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs.setdefault(name, []).append(args[0])
            if is_linear(module) and type(module) not in (nn.Linear, Conv1D) and not _is_product(module, args, output):
                self._others_forward[name] = f"is a {type(module).__name__}, which computes no x Wᵀ + b"

        hooks = [
            module.register_forward_hook(lambda module, args, output, name=name: read(name, module, args, output))
            for name, module in maps.items()
        ]
        try:
            model(**batch)
        finally:
            for hook in hooks:
                hook.remove()
        return inputs

    def _at_other_lengths(
        self, model: nn.Module, maps: Mapping[str, nn.Module], batch: Mapping[str, Tensor], mask: str
    ) -> list[_Other]:
        """With about one token less or more, and with half of them, as far as the model takes it."""
        found: list[_Other] = []
        for group in _other_lengths(batch, mask):
            for more, other in group:
                try:
                    inputs = self._read(model, maps, other)
                except Exception:  # a token that must stay, a number of tokens that must be; each model's own error
                    continue
                found.append(_Other(inputs, _rows(maps, inputs), more))
                break
        return found

    def reads(self, name: str) -> tuple[int, ...]:
        """What tells the tensors that it reads from others, as long as this probe lives and holds them."""
        return tuple(map(id, self._inputs[name]))

    def calls(self, name: str) -> int:
        """How often it runs for the batch."""
        return len(self._rows[name])

    def repeated(self, name: str) -> bool:
        """A cell runs once where the batch has a single token, and twice where it has another."""
        others = [other.rows for every in self._others.values() for other in every]
        return any(len(rows.get(name, ())) > 1 for rows in (self._rows, *others))

    def mask(self, name: str) -> str | None:
        """The mask whose tokens it sees."""
        return next((mask for mask in self._masks if self._sees(name, mask) == "tokens"), None)

    def unusable(self, name: str) -> str | None:
        """Why it cannot be a target whatever is asked of it, if so."""
        if not self._rows.get(name):
            return NEVER_RAN
        if any(x.is_nested for x in self._inputs[name]):
            return "it reads a nested tensor, whose rows no mask of the batch describes"
        return self._others_forward.get(name)

    def reason(self, name: str) -> str | None:
        """Why its rows cannot be told apart by sample and token, if so."""
        if self._doubled.get(name) != [2 * count for count in self._rows[name]]:
            return "not all that it reads belongs to the samples of a batch"
        if name not in self._by_sample:
            return "its rows are not in order of samples"
        masks = [self._sees(name, mask) for mask in self._masks]
        alone = masks.count("tokens") == 1 and set(masks) <= {"tokens", "as many", "nothing"}
        return None if alone or set(masks) <= {"nothing"} else self._unattributed(name)

    def _unattributed(self, name: str) -> str:
        fixed = [mask for mask, others in self._others.items() if not others]
        if fixed:
            return f"the model takes no other number of tokens, so none can be told to be those of {fixed[0]}"
        return f"its rows are not the tokens of {' or '.join(self._masks)}"

    def _starts_with_samples(self, name: str, doubled: Sequence[Tensor]) -> bool:
        """Whether the first half of what it reads of every sample twice is what it reads of every sample once."""
        pairs = zip(self._inputs[name], doubled, strict=False)
        return all(not x.is_nested and len(y) == 2 * len(x) and _alike(y[: len(x)], x) for x, y in pairs if x.dim() > 0)

    def _sees(self, name: str, mask: str) -> Literal["tokens", "as many", "nothing"] | None:
        """What its rows are: the tokens of `mask`; as many, whatever the tokens; nothing that the mask could mask.

        The last are the same whatever the tokens, or one of each sequence. A cell has a call for each token.
        """
        rows, others = self._rows[name], self._others[mask]
        sequences, tokens = math.prod(self._masks[mask].shape[:-1]), self._masks[mask].shape[-1]
        changed = [other for other in others if other.rows.get(name) != rows]
        if others and not changed:
            one_each = set(rows) <= {self._samples, sequences}
            same = all(_same(other.inputs[name], self._inputs[name]) for other in others)
            return "nothing" if one_each or same else "as many"
        calls = [(other.rows.get(name, ()), other.more) for other in changed]
        if set(rows) == {sequences * tokens} and any(
            set(found) == {sequences * (tokens + more)} for found, more in calls
        ):
            return "tokens"
        cell = any(len(found) == len(rows) + more and {*rows, *found} == {sequences} for found, more in calls)
        return "tokens" if cell else None


def _is_product(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> bool:
    """Whether a subclass of Linear computed x Wᵀ + b."""
    weight, bias, x = module.get_parameter("weight"), getattr(module, "bias", None), args[0]
    if not (isinstance(output, Tensor) and weight.is_floating_point() and weight.dim() == 2):
        return False
    wanted = linear(x, weight if isinstance(module, nn.Linear) else weight.T, bias)
    return wanted.shape == output.shape and _alike(output, wanted)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal but for rounding, that of bfloat16 included."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    return float((one - other).norm()) <= 0.05 * float(other.norm())


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _rows(maps: Mapping[str, nn.Module], inputs: Mapping[str, Sequence[Tensor]]) -> dict[str, list[int]]:
    """How many rows each map sees in each of its calls: tokens of all samples."""
    return {
        name: [x.numel() // (1 if is_embedding(maps[name]) else x.size(-1)) for x in calls]
        for name, calls in inputs.items()
    }


def _other_lengths(batch: Mapping[str, Tensor], mask: str) -> Iterator[Sequence[tuple[int, dict[str, Tensor]]]]:
    """Groups of batches with another number of tokens of `mask`, each with how many these are more; no labels.

    Of each group the first that the model takes will do. Less comes before more, as a model may take no longer batch;
    the first token goes before the last, as a model may look for one at the end.
    """
    tokens = batch[mask].shape[-1]
    every, longer = torch.arange(tokens), torch.tensor([0, *range(tokens)])
    some = [(-1, every[1:]), (-1, every[:-1])] if tokens > 1 else []
    yield [(more, columns(batch, mask, places)) for more, places in [*some, (1, longer)]]
    if tokens > 3:
        half = tokens // 2
        yield [
            (half - tokens, columns(batch, mask, every[-half:])),
            (half - tokens, columns(batch, mask, every[:half])),
        ]


def columns(batch: Mapping[str, Tensor], mask: str, places: Tensor) -> dict[str, Tensor]:
    """The batch without labels, and of all that `mask` masks only the tokens at `places`."""
    shape, decoder = batch[mask].shape, mask.startswith("decoder_")
    masked = [
        name
        for name, values in batch.items()
        if values.shape[: len(shape)] == shape
        and name.startswith("decoder_") is decoder
        and not any(part in name for part in _OF_PICTURES)
    ]
    return {
        name: values.index_select(len(shape) - 1, places.to(values.device)) if name in masked else values
        for name, values in batch.items()
        if name != "labels"
    }
