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

from eckart.model.census import Census, census, other_matrices
from eckart.model.layers import shape_of
from eckart.model.module_context import eval_mode
from eckart.model.probing import ATTENTION, PICTURES, Probe, is_embedding, is_linear

Storage = Literal["factors", "pivoted"]
"""How a map of rank r is stored: as two factors, r (out + in) parameters, or as r of its rows and what the others are
of these, r (out + in − r) (eckart/factorization/pivoted_storage.py)."""


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
    mask: str | None = ATTENTION
    """The entry of a batch that masks its tokens; None where none does (a pooler, a model of images)."""
    sampled: bool = True
    """Whether its rows can be told apart by sample and token; there is no statistics of one that is not."""
    looks_up: bool = False
    """Whether it is an embedding alone, whose columns are looked up: they take bytes, and hardly any time."""
    of_vocabulary: bool = False
    """Whether its outputs are as many as a vocabulary, so that of their gradients the squares alone are statistics."""
    storage: Storage = Field(default="factors", exclude=True)
    """How a recipe stores it at a rank, which no probe finds: `stored` of eckart/ranks/budget.py tells it."""

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
    """What probing found: the targets in order of execution, and why each other linear map is none.

    `excluded` also names what multiplies by a matrix and is no linear layer, such as experts that share one tensor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: tuple[Product | Tied | Target, ...]
    excluded: dict[str, str]
    census: Census


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
    it is no head (a module outside `model.base_model`), unless `heads`. A subclass of Linear is one if what it computes
    is x Wᵀ + b.

    Args:
        batch: model inputs, each `(batch, …)`; an encoder-decoder's with `decoder_input_ids` and
            `decoder_attention_mask`, unless its decoder reads the encoder's tokens.
        include, exclude: shell patterns over module names, such as `*.attention.*`.
        embeddings: whether embeddings may be targets.
        unsampled: whether maps may be that read what belongs to no sample of the batch, and so have no statistics.
        tied: whether an embedding and the head that has its weight may be, as one target.

    Raises:
        ValueError: no linear map is a target (the message gives the reason for each), the model cannot be called with
            the batch, the batch does not say which tokens are padding, or there is no head with an embedding's weight
            and there must be.
    """
    _check(model, batch)
    pair = _tied_pair(model) if tied else ()
    maps = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or ((embeddings or name in pair) and is_embedding(module))
    }
    with eval_mode(model), torch.no_grad():
        probe = Probe(model, maps, batch)
        reasons = _unseen_reasons(model, maps, include, exclude, heads, pair)
        reasons |= {name: reason for name in maps if name not in reasons and (reason := probe.unusable(name))}
        mixed = {name: reason for name in maps if name not in reasons and (reason := probe.reason(name))}
        reasons |= {} if unsampled else mixed
        wanted = [name for name in probe.order if name not in reasons]
        reasons |= _used_outside(model, batch, {name: probe.calls(name) for name in wanted})

    targets = _described(model, {name: maps[name] for name in wanted if name not in reasons}, probe, mixed)
    targets = _with_pair(targets, pair, reasons)
    excluded = {name: reasons[name] for name in [*probe.order, *maps] if name in reasons} | other_matrices(model)
    if not targets:
        raise ValueError(f"the model has no targets: {_grouped(excluded) or 'it has no linear map'}")
    names = [each.name for target in targets for each in target.maps]
    return Targets(targets=tuple(targets), excluded=excluded, census=census(model, names, excluded))


def _described(
    model: PreTrainedModel, maps: Mapping[str, nn.Module], probe: Probe, mixed: Collection[str]
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
    """Masks are of tokens; a decoder that reads tokens of its own, given or made from labels, needs one of its own."""
    if PICTURES in batch and not bool(batch[PICTURES].all()):
        raise ValueError(
            f"{PICTURES} hides parts of pictures, and no rows can be told to be these: give pictures of one size"
        )
    for name in (ATTENTION, f"decoder_{ATTENTION}"):
        mask, ids = batch.get(name), batch.get("input_ids")
        if mask is not None and mask.dim() != 2 and (ids is None or mask.shape != ids.shape):
            raise ValueError(
                f"{name} is {tuple(mask.shape)}, from which padding cannot be told: give it as (batch, tokens), 0 "
                "where a token is padding"
            )
    labels = batch.get("labels")
    tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
    decodes = model.config.is_encoder_decoder or model.config.get_text_config().is_encoder_decoder
    has_decoder = "decoder_input_ids" in signature(model.forward).parameters
    if has_decoder and decodes and (tokens or "decoder_input_ids" in batch):
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
    if not base and "For" in type(model).__name__:  # a model for a task whose backbone is no module of its own
        is_head |= "." not in name
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


# --- reasons that putting others in their place gives ----------------------------------------------------------------


class _StandIn(nn.Module):
    """Does what a module does, as a low-rank layer will; who else uses its weight gets what is not a number."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.bias = getattr(module, "bias", None)
        self.out_features, self.in_features = shape_of(module)
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
