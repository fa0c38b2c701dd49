"""Targets: the linear maps of a model that can be factorized, found by probing the model with a real batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, Literal

import torch
from accelerate.utils import align_module_device
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.modes import eval_mode

MASKS = ("attention_mask", "decoder_attention_mask")
"""Entries of a batch, each `(batch, tokens)`, that are 0 where a token is padding."""

Storage = Literal["factors", "pivoted"]
"""How a map of rank r is stored: as two factors, r (out + in) parameters, or as r of its rows and what the others are
of these, r (out + in − r) (eckart/pivots.py)."""


class Target(BaseModel):
    """A linear map y = x Wᵀ + b that is to be factorized; W is always `(out, in)`.

    An embedding is one too: x are one-hot rows of the vocabulary, which is `in`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    out_features: int
    in_features: int
    input_of: str
    """The first target that reads the same tensors (query for key and value); itself if it is the first."""
    repeated: bool = False
    """Whether its forward may run several times for a batch (a layer that is shared, a cell that runs for each token);
    its tokens are those of all its calls."""
    mask: str | None = MASKS[0]
    """The entry of a batch that masks its tokens; None where none does (a pooler, a model of images)."""
    sampled: bool = True
    """Whether its rows can be told apart by sample and token; there is no evidence of one that is not."""
    looks_up: bool = False
    """Whether it is an embedding alone, whose columns are looked up: they take bytes, and hardly any time."""
    of_vocabulary: bool = False
    """Whether its outputs are as many as a vocabulary, so that of their gradients the squares alone are evidence."""
    storage: Storage = Field(default="factors", exclude=True)
    """How a recipe stores it at a rank, which no probe finds: `stored` of eckart/budget.py tells it."""

    @property
    def parameters(self) -> int:
        """Weights of the dense map; the bias stays as it is and is not counted."""
        return self.out_features * self.in_features

    @property
    def step(self) -> int:
        """Parameters that one more rank costs as factors: a column of `left` and a row of `right`."""
        return self.out_features + self.in_features

    @property
    def maps(self) -> tuple[Target, ...]:
        """The linear maps that are this target: itself alone, but for a Product."""
        return (self,)


class Product(Target):
    """Two maps whose outputs meet, head by head, in inner products and in nothing else: query and key of attention.

    What stands here of a target is the first map's. Its rank is that of each head's product: so many outputs of a head
    are left of either map.
    """

    heads: int
    other: Target
    """The second map, of as many outputs."""

    @property
    def parameters(self) -> int:
        return self.out_features * (self.in_features + self.other.in_features)

    @property
    def step(self) -> int:
        return self.heads * (self.in_features + self.other.in_features)

    @property
    def maps(self) -> tuple[Target, ...]:
        return (self, self.other)


class Tied(Target):
    """An embedding and the head that has its weight. What stands here of a target is the embedding's."""

    other: Target
    """The head, `(vocabulary, in)`."""

    @property
    def maps(self) -> tuple[Target, ...]:
        return (self, self.other)


class Targets(BaseModel):
    """What probing found: the targets in order of execution, and why each other linear map is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: tuple[Product | Tied | Target, ...]
    excluded: dict[str, str]


def is_linear(module: nn.Module) -> bool:
    """Exact types only: a subclass may use its weight in a way of its own."""
    return type(module) in (nn.Linear, Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """Exact type only, and none whose lookups change its weight."""
    return type(module) is nn.Embedding and module.max_norm is None


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear map as `(out, in)`. A GPT-2 Conv1D and an embedding store the transpose.

    One that a device map left on the CPU or the disk is brought to where its module runs.
    """
    with align_module_device(module):
        weight = module.get_parameter("weight").detach()
    return weight.T if isinstance(module, Conv1D | nn.Embedding) else weight


def find_targets(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    heads: bool = False,
    embeddings: bool = False,
    unsampled: bool = False,
    tied: bool = False,
) -> Targets:
    """Find the targets of `model`.

    A linear map is a target if its forward runs for `batch` on what belongs to its samples, nothing but its forward
    uses its weight, its weight belongs to it alone, its name matches a pattern of `include` and none of `exclude`, and
    it is no head (a module outside `model.base_model`), unless `heads`.

    Args:
        batch: model inputs, each `(batch, …)`; an encoder-decoder's with `decoder_input_ids` and
            `decoder_attention_mask`, unless its decoder reads the encoder's tokens.
        include, exclude: shell patterns over module names, such as `*.attention.*`.
        embeddings: whether embeddings may be targets.
        unsampled: whether maps may be that read what belongs to no sample of the batch, and so have no evidence.
        tied: whether an embedding and the head that has its weight may be, as one target.

    Raises:
        ValueError: no linear map is a target (the message gives the reason for each), the batch does not say which
            tokens of a decoder are padding, or there is no head with an embedding's weight and there must be.
    """
    _check(model, batch)
    pair = _tied_pair(model) if tied else ()
    maps = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or ((embeddings or name in pair) and is_embedding(module))
    }
    with eval_mode(model), torch.no_grad():
        probe = _Probe(model, maps, batch)
        reasons = _unseen_reasons(model, maps, include, exclude, heads, pair)
        reasons |= {name: reason for name in maps if name not in reasons and (reason := probe.unusable(name))}
        mixed = {name: reason for name in maps if name not in reasons and (reason := probe.reason(name))}
        reasons |= {} if unsampled else mixed
        wanted = [name for name in probe.order if name not in reasons]
        reasons |= _used_outside(model, batch, {name: probe.calls(name) for name in wanted})

    targets = _described(model, {name: maps[name] for name in wanted if name not in reasons}, probe, mixed)
    targets = _with_pair(targets, pair, reasons)
    excluded = {name: reasons[name] for name in [*probe.order, *maps] if name in reasons}
    if not targets:
        raise ValueError(f"the model has no targets: {_grouped(excluded) or 'it has no linear map'}")
    return Targets(targets=tuple(targets), excluded=excluded)


def _described(
    model: PreTrainedModel, maps: Mapping[str, nn.Module], probe: _Probe, mixed: Collection[str]
) -> list[Target]:
    """What the probe knows of `maps`, in order of execution; of those in `mixed` no rows can be told apart."""
    first_reader: dict[tuple[int, tuple[int, ...]], str] = {}
    targets: list[Target] = []
    for name, module in maps.items():
        rows, columns = weight_of(module).shape
        targets.append(
            Target(
                name=name,
                out_features=rows,
                in_features=columns,
                input_of=first_reader.setdefault((columns, probe.reads(name)), name),
                repeated=probe.repeated(name),
                mask=probe.mask(name),
                sampled=name not in mixed,
                looks_up=is_embedding(module),
                of_vocabulary=module is model.get_output_embeddings(),
            )
        )
    return targets


def _grouped(excluded: Mapping[str, str]) -> str:
    """Each reason once, with the maps that it holds of: how many, and the first."""
    names: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(
        f"{some[0]} {reason}" if len(some) == 1 else f"{some[0]} and {len(some) - 1} more: {reason}"
        for reason, some in names.items()
    )


def _check(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """A decoder that reads tokens of its own, given or made from labels, needs a mask of its own."""
    labels = batch.get("labels")
    tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
    has_decoder = "decoder_input_ids" in signature(model.forward).parameters
    if has_decoder and (tokens or "decoder_input_ids" in batch):
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            if name not in batch:
                raise ValueError(
                    f"the batch has no {name}, so a decoder's padding cannot be told from data: add decoder_input_ids "
                    "(the labels, shifted to the right) and decoder_attention_mask (0 where these are padding)"
                )


# --- an embedding and its head ---------------------------------------------------------------------------------------


def _tied_pair(model: PreTrainedModel) -> tuple[str, str]:
    """Names of the embedding and of the head that has its weight.

    Raises:
        ValueError: there are none, or others have that weight, too.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    names = [next((name for name, module in model.named_modules() if module is end), "") for end in ends]
    if all(names) and is_embedding(ends[0]) and is_linear(ends[1]):
        owners = _weight_owners(model)[f"{names[0]}.weight"]
        if sorted(owners) == sorted(names):
            return names[0], names[1]
    raise ValueError(
        "the model has no plain embedding whose weight is a plain head's and no one else's: leave out tied "
        "(targets.tied of params.yaml)"
    )


def _with_pair(targets: list[Target], pair: Sequence[str], reasons: dict[str, str]) -> list[Target]:
    """`targets` with those of `pair` as one, or without either, which then is said in `reasons`."""
    both = {target.name: target for target in targets if target.name in pair}
    if len(both) < len(pair):
        reasons |= {name: f"shares its weight with what is no target, of {' and '.join(pair)}" for name in both}
        return [target for target in targets if target.name not in both]
    if not both:
        return targets
    embedding, head = pair
    one = Tied(**both[embedding].model_dump(exclude={"looks_up"}), other=both[head])
    return [one if target.name == embedding else target for target in targets if target.name != head]


# --- reasons that a name or a weight gives ---------------------------------------------------------------------------


def _unseen_reasons(
    model: PreTrainedModel,
    maps: Mapping[str, nn.Module],
    include: Sequence[str],
    exclude: Sequence[str],
    heads: bool,
    pair: Sequence[str],
) -> dict[str, str]:
    """Why maps are no targets, whatever they do when the model runs; those of `pair` share a weight and may."""
    owners = _weight_owners(model)
    every = {
        name: _unwanted(name, include, exclude)
        or _patched(module)
        or (None if name in pair else _head(model, name, heads) or _tied(name, owners.get(f"{name}.weight")))
        for name, module in maps.items()
    }
    return {name: reason for name, reason in every.items() if reason}


def _unwanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    if not any(fnmatchcase(name, pattern) for pattern in include):
        return "matches no include pattern"
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return "matches an exclude pattern"
    return None


def _head(model: PreTrainedModel, name: str, heads: bool) -> str | None:
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    is_head = not name.startswith(base) or model.get_submodule(name) is model.get_output_embeddings()
    return "is a head" if is_head and not heads else None


def _patched(module: nn.Module) -> str | None:
    """A hook of ours is on no module now, and accelerate's leave what a module does."""
    changed = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    hooked = changed or module._forward_hooks or module._forward_pre_hooks
    return "a hook or a forward of its own may change what it does" if hooked else None


def _tied(name: str, owners: Sequence[str] | None) -> str | None:
    if owners is None:
        return "its weight is no parameter"
    others = [owner for owner in owners if owner != name]
    return f"shares its weight with {', '.join(others)}" if others else None


def _weight_owners(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter's modules by its names, tied ones (an embedding and its head) included.

    By name, as parameters that a device map left on the disk are others after each forward.
    """
    owners: dict[int, list[str]] = {}
    every = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in every:
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name: owners[id(parameter)] for name, parameter in every}


# --- reasons that running the model gives ----------------------------------------------------------------------------


class _Probe:
    """What some maps read when the model runs: for the batch, for every sample twice, and for other lengths."""

    def __init__(self, model: nn.Module, maps: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> None:
        self.samples = _samples(batch)
        self._inputs = _inputs(model, maps, batch)
        self.order = list(self._inputs)
        self._rows = _rows(maps, self._inputs)
        doubled = _inputs(model, maps, {name: torch.cat([x, x]) for name, x in batch.items()})
        self._doubled = _rows(maps, doubled)
        self._by_sample = {name for name in doubled if self._starts_with_samples(name, doubled[name])}
        self._changed = {
            mask: _rows(maps, _inputs(model, maps, _other_length(batch, mask))) for mask in MASKS if mask in batch
        }

    def reads(self, name: str) -> tuple[int, ...]:
        """What tells the tensors that it reads from others, as long as this probe lives and holds them."""
        return tuple(map(id, self._inputs[name]))

    def calls(self, name: str) -> int:
        """How often it runs for the batch."""
        return len(self._rows[name])

    def repeated(self, name: str) -> bool:
        """A cell runs once where the batch has a single token, and twice where it has another."""
        return any(len(rows.get(name, ())) > 1 for rows in (self._rows, *self._changed.values()))

    def mask(self, name: str) -> str | None:
        """The mask whose tokens it sees."""
        return next((mask for mask in self._changed if self._change(name, mask)), None)

    def unusable(self, name: str) -> str | None:
        """Why it cannot be a target whatever is asked of it, if so."""
        if not self._rows.get(name):
            return "its forward ran 0 times for one batch"
        if any(x.is_nested for x in self._inputs[name]):
            return "it reads a nested tensor, whose rows no mask of the batch describes"
        return None

    def reason(self, name: str) -> str | None:
        """Why its rows cannot be told apart by sample and token, if so."""
        rows = self._rows[name]
        if self._doubled.get(name) != [2 * count for count in rows]:
            return "not all that it reads belongs to the samples of a batch"
        if name not in self._by_sample:
            return "its rows are not in order of samples"
        changes = [self._change(name, mask) for mask in self._changed]
        if None in changes or sum(map(bool, changes)) > 1:
            return "its tokens are not those of a mask"
        if changes and not any(changes) and set(rows) != {self.samples}:  # one row a sample, or what the model makes up
            return "its tokens are not those of a mask"
        return None

    def _starts_with_samples(self, name: str, doubled: Sequence[Tensor]) -> bool:
        """Whether the first half of what it reads of every sample twice is what it reads of every sample once."""
        pairs = zip(self._inputs[name], doubled, strict=False)
        return all(not x.is_nested and len(y) == 2 * len(x) and _alike(y[: len(x)], x) for x, y in pairs if x.dim() > 0)

    def _change(self, name: str, mask: str) -> bool | None:
        """Whether it reads one token of each sample less, or more, where there is one less or more; None: neither."""
        rows, others = self._rows[name], self._changed[mask].get(name, [])
        if rows == others:
            return False
        if len(rows) == len(others):
            each = {abs(count - other) for count, other in zip(rows, others, strict=True)}
            return True if each == {self.samples} else None
        cell = abs(len(rows) - len(others)) == 1 and {*rows, *others} == {self.samples}  # a call for each token
        return True if cell else None


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal but for rounding, that of bfloat16 included."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.float().nan_to_num(), other.float().nan_to_num()
    return float((one - other).norm()) <= 0.05 * float(other.norm())


def _inputs(model: nn.Module, maps: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """What each map reads in each of its calls, in order of first execution."""
    inputs: dict[str, list[Tensor]] = {}  # holds the tensors, so that no two share an id
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, []).append(args[0]))
        for name, module in maps.items()
    ]
    try:
        model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _rows(maps: Mapping[str, nn.Module], inputs: Mapping[str, Sequence[Tensor]]) -> dict[str, list[int]]:
    """How many rows each map sees in each of its calls: tokens of all samples."""
    return {
        name: [x.numel() // (1 if is_embedding(maps[name]) else x.size(-1)) for x in calls]
        for name, calls in inputs.items()
    }


def _other_length(batch: Mapping[str, Tensor], mask: str) -> dict[str, Tensor]:
    """The batch without its first column of what `mask` masks, or with it twice where it is the only one; no labels.

    Less, not more: a model may take no longer batch. The first, not the last: a model may look for a token at the end.
    """
    shape = batch[mask].shape
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    side = mask.startswith("decoder_")
    for name, values in inputs.items():
        if values.shape == shape and name.startswith("decoder_") == side:
            inputs[name] = values[:, 1:] if shape[1] > 1 else values.repeat(1, 2)
    return inputs


class _StandIn(nn.Module):
    """Does what a module does, as a low-rank layer will; who else uses its weight gets what is not a number."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.bias = getattr(module, "bias", None)
        self.read = False
        self.calls = 0

    @property
    def weight(self) -> Tensor:
        self.read = True
        return torch.full_like(self.module.get_parameter("weight"), math.nan)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.module(x)


def _used_outside(model: nn.Module, batch: Mapping[str, Tensor], calls: Mapping[str, int]) -> dict[str, str]:
    """Which of these modules, each with the number of its calls, cannot be replaced and why: more than that is used.

    A look at the weight's type or device is no use of it (T5).
    """
    expected = _not_numbers(model(**batch))
    names = list(calls)
    failed, read = _replaced(model, batch, calls, expected)
    if failed is None:
        return {}
    alone = {name: _replaced(model, batch, {name: calls[name]}, expected)[0] for name in read or names}
    return {name: reason for name, reason in alone.items() if reason} or dict.fromkeys(names, failed)


def _replaced(
    model: nn.Module, batch: Mapping[str, Tensor], calls: Mapping[str, int], expected: Sequence[bool]
) -> tuple[str | None, list[str]]:
    """What goes wrong where stand-ins take the place of these, and whose weights were read if the model ran."""
    modules = {name: model.get_submodule(name) for name in calls}
    others = {name: _StandIn(module).eval() for name, module in modules.items()}
    try:
        for name, other in others.items():
            model.set_submodule(name, other)
        found = _not_numbers(model(**batch))
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        return f"cannot be replaced: {error}", []
    finally:
        for name, module in modules.items():
            model.set_submodule(name, module)
    bypassed = [name for name, other in others.items() if other.calls != calls[name]]
    if bypassed:
        return "is called by another reference than its name", bypassed
    read = [name for name, other in others.items() if other.read]
    return (None if found == expected else "its weight is used outside its forward"), read


def _not_numbers(output: Any) -> list[bool]:
    """Of each tensor of a model's output, whether it has any entry that is not a number."""
    if isinstance(output, Tensor):
        return [bool(output.isnan().any())]
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return [found for part in output for found in _not_numbers(part)] if isinstance(output, tuple | list) else []


def _samples(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]
