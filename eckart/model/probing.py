"""A probe of linear maps: what they read when the model runs, and whose rows these are.

Statistics needs each row of an input to belong to one sample and, where samples are padded, to one token of a mask. The
probe runs the model for a batch, for every sample twice and for other numbers of tokens, and compares what the maps
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

ATTENTION = "attention_mask"
"""The entry of a batch that is 0 where a token of its text is padding; those of a decoder's, of pictures' patches and
of other entries beside the text end so: `decoder_attention_mask`."""
PICTURES = "pixel_mask"
"""The entry that is 0 where a picture is padding, pixel by pixel: no row of a model can be told to be such."""
_NO_PADDING = "global_attention_mask"
_BESIDE = ("pixel", "visual", "image")
"""What is in the names of entries that are no tokens of a text."""

NEVER_RAN = "its forward ran 0 times for one batch"


def masks_of(batch: Mapping[str, Tensor]) -> list[str]:
    """Entries that are 0 where something is padding, each `(batch, tokens)`, or `(batch, choices, tokens)` as ids."""
    ids = batch.get("input_ids")
    shapes = [] if ids is None else [ids.shape]
    some = [name for name in batch if name.endswith(ATTENTION) and name != _NO_PADDING]
    return sorted(name for name in some if batch[name].dim() == 2 or batch[name].shape in shapes)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear map, or a subclass of one, which may compute something else (`Probe.unusable`)."""
    return isinstance(module, nn.Linear | Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """Exact type only, and none whose lookups change its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


@dataclass
class _Seen:
    """What a map read in a forward of another batch than the probe's, in the order of its calls.

    rows: how many rows each call had.
    same: whether each call read what it reads of the batch; of every sample twice, its first half.
    """

    rows: list[int] = field(default_factory=list)
    same: bool = True


_Other = tuple[int, Mapping[str, _Seen]]
"""A forward with another number of tokens: how many these are more in each sequence, and what each map read."""


class Probe:
    """What some maps read when the model runs: for the batch, for every sample twice, and for other lengths.

    Raises:
        ValueError: the model cannot be called with the batch.
    """

    def __init__(self, model: nn.Module, maps: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> None:
        self._model = model
        self._maps = maps
        self._samples = next(iter(batch.values())).shape[0]
        self._special: dict[str, str] = {}
        self._inputs: dict[str, list[Tensor]] = {}  # holds the tensors, so that no two share an id
        try:
            self._run(batch, lambda name, x: self._inputs.setdefault(name, []).append(x))
            self._again = self._compared(batch, _alike)
            self._doubled = self._compared({name: torch.cat([x, x]) for name, x in batch.items()}, _twice)
            self._first = self._compared({name: x[:1] for name, x in batch.items()}, _begins)
        except Exception as error:  # a model says in its own way what it misses
            raise ValueError(
                f"{type(model).__name__} cannot be called with a batch of {', '.join(batch)}: {error}"
            ) from error
        self.order = list(self._inputs)
        self._rows = {name: [self._count(name, x) for x in calls] for name, calls in self._inputs.items()}
        self._masks = {mask: batch[mask] for mask in masks_of(batch)}
        self._others = {mask: list(self._at_other_lengths(batch, mask)) for mask in self._masks}

    def _run(self, batch: Mapping[str, Tensor], see: Callable[[str, Tensor], object]) -> None:
        """Show `see` what each map reads in each of its calls, in order of execution."""

        def hooked(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            see(name, args[0])
            special = is_linear(module) and type(module) not in (nn.Linear, Conv1D) and "weight" in module._parameters
            if special and not _is_product(module, args, output):
                self._special[name] = f"is a {type(module).__name__}, which computes no x Wᵀ + b"

        hooks = [module.register_forward_hook(partial(hooked, name)) for name, module in self._maps.items()]
        try:
            self._model(**batch)
        finally:
            for hook in hooks:
                hook.remove()

    def _compared(self, batch: Mapping[str, Tensor], same: Callable[[Tensor, Tensor], bool]) -> dict[str, _Seen]:
        """What the maps read of another batch, beside what they read of the probe's; none of it is held."""
        found: dict[str, _Seen] = {}

        def see(name: str, x: Tensor) -> None:
            one, calls = found.setdefault(name, _Seen()), self._inputs.get(name, [])
            place = len(one.rows)
            one.same = one.same and place < len(calls) and same(x, calls[place])
            one.rows.append(self._count(name, x))

        self._run(batch, see)
        return found

    def _at_other_lengths(self, batch: Mapping[str, Tensor], mask: str) -> Iterator[_Other]:
        """With about one token less or more, and with half of them, as far as the model takes it."""
        for group in _other_lengths(batch, mask):
            for more, other in group:
                try:
                    found = self._compared(other, torch.equal)
                except Exception:  # a token that must stay, a number of tokens that must be; each model's own error
                    continue
                yield more, found
                break

    def _count(self, name: str, x: Tensor) -> int:
        """Its rows: tokens of all samples."""
        return x.numel() // (1 if is_embedding(self._maps[name]) else x.size(-1))

    def reads(self, name: str) -> tuple[int, ...]:
        """What tells the tensors that it reads from others, as long as this probe lives and holds them."""
        return tuple(map(id, self._inputs[name]))

    def calls(self, name: str) -> int:
        """How often it runs for the batch."""
        return len(self._rows[name])

    def repeated(self, name: str) -> bool:
        """A cell runs once where the batch has a single token, and twice where it has another."""
        others = [seen[name].rows for every in self._others.values() for _, seen in every if name in seen]
        return any(len(rows) > 1 for rows in (self._rows[name], *others))

    def mask(self, name: str) -> str | None:
        """The mask whose tokens it sees."""
        return next((mask for mask in self._masks if self._sees(name, mask) == "tokens"), None)

    def unusable(self, name: str) -> str | None:
        """Why it cannot be a target whatever is asked of it, if so."""
        if not self._rows.get(name):
            return NEVER_RAN
        if any(x.is_nested for x in self._inputs[name]):
            return "it reads a nested tensor, whose rows no mask of the batch describes"
        return self._special.get(name)

    def reason(self, name: str) -> str | None:
        """Why its rows cannot be told apart by sample and token, if so."""
        twice, first = self._doubled.get(name, _Seen()), self._first.get(name, _Seen())
        if not self._again.get(name, _Seen(same=False)).same:
            return "what it reads is drawn at random"
        if twice.rows != [2 * count for count in self._rows[name]]:
            return "not all that it reads belongs to the samples of a batch"
        if not (twice.same and first.same) or [self._samples * count for count in first.rows] != self._rows[name]:
            return "its rows are not in order of samples"
        if "experts" in name.split(".") and self.mask(name) is None:
            return "its rows are what a router sends"
        masks = [self._sees(name, mask) for mask in self._masks]
        alone = masks.count("tokens") == 1 and set(masks) <= {"tokens", "as many", "nothing"}
        return None if alone or set(masks) <= {"nothing"} else self._unattributed(name)

    def _unattributed(self, name: str) -> str:
        fixed = [mask for mask, others in self._others.items() if not others]
        if fixed:
            return f"the model takes no other number of tokens, so none can be told to be those of {fixed[0]}"
        return f"its rows are not the tokens of {' or '.join(self._masks)}"

    def _sees(self, name: str, mask: str) -> Literal["tokens", "as many", "nothing"] | None:
        """What its rows are: the tokens of `mask`; as many, whatever the tokens; nothing that the mask could mask.

        The last are the same whatever the tokens, or one of each sequence. A cell has a call for each token.
        """
        rows, sequences = self._rows[name], math.prod(self._masks[mask].shape[:-1])
        tokens = self._masks[mask].shape[-1]
        others = [(seen.get(name, _Seen()), more) for more, seen in self._others[mask]]
        changed = [(other.rows, more) for other, more in others if other.rows != rows]
        if others and not changed:
            one_each = set(rows) <= {self._samples, sequences}
            return "nothing" if one_each or all(other.same for other, _ in others) else "as many"
        whole = any(set(found) == {sequences * (tokens + more)} for found, more in changed)
        if whole and set(rows) == {sequences * tokens}:
            return "tokens"
        cell = any(len(found) == len(rows) + more and {*rows} == {*found} == {sequences} for found, more in changed)
        return "tokens" if cell else None


def _is_product(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> bool:
    """Whether a subclass of Linear computed x Wᵀ + b of parameters that are all of its own."""
    weight, bias, x = module.get_parameter("weight"), getattr(module, "bias", None), args[0]
    more = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
    if more or not (isinstance(output, Tensor) and weight.is_floating_point() and weight.dim() == 2):
        return False
    wanted = linear(x, weight if isinstance(module, nn.Linear) else weight.T, bias)
    return wanted.shape == output.shape and _alike(output, wanted, 8 * torch.finfo(weight.dtype).eps)


def _alike(one: Tensor, other: Tensor, tolerated: float = 0.05) -> bool:
    """Whether they are equal but for rounding; by default that of a whole model in bfloat16 is one."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    return float((one - other).norm()) <= tolerated * float(other.norm())


def _twice(doubled: Tensor, x: Tensor) -> bool:
    """Whether the first half of what is read of every sample twice is what is read of every sample once."""
    if x.dim() == 0 or x.is_nested:
        return not x.is_nested
    return len(doubled) == 2 * len(x) and _alike(doubled[: len(x)], x)


def _begins(first: Tensor, x: Tensor) -> bool:
    """Whether what is read of the first sample alone is the beginning of what is read of all."""
    return x.dim() == 0 or _alike(first, x[: len(first)])


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
    """The batch without labels, and of all that `mask` masks only the tokens at `places`.

    That is what has the mask's shape, and its name's beginning: of the text what has no other mask's.
    """
    shape, beginnings = batch[mask].shape, [name.removesuffix(ATTENTION) for name in masks_of(batch)]
    others = [*filter(None, beginnings), "decoder_", *_BESIDE]
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
