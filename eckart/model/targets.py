"""Targets: the linear layers of a model that can be factorized; the model is run on a real batch to find them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, Literal

import torch
from accelerate.utils import align_module_device
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.model.batches import ATTENTION, PICTURES, Batch, labels_are_tokens
from eckart.model.census import Census, census, other_matrices
from eckart.model.experts import routed_layers
from eckart.model.layers import LowRankLayer, by_outputs, parts_of_layers
from eckart.model.module_context import eval_mode
from eckart.model.probing import Probe, is_embedding, is_linear, shortened
from eckart.model.stand_ins import used_outside

Storage = Literal["factors", "pivoted"]
"""Storage of a layer of rank r. factors: two factors, r (out + in) parameters. pivoted: r rows of the matrix, and the
coefficients that give its other rows, r (out + in − r) parameters (eckart/factorization/pivoted_storage.py)."""
_SELECTORS = {"indexer", "patcher"}
_HEADS = {
    *("lm_head", "lm_heads", "codec_head"),
    *("class_embed", "bbox_embed", "enc_score_head", "enc_bbox_head", "pre_bbox_head"),
}
"""Names of heads that some models have elsewhere than beside their backbone (Bark, MusicGen, RT-DETR)."""
_CLAMPED = "altup"
"""Name of the modules in which Gemma 3n clamps weights in place, in training mode only."""


class Target(BaseModel):
    """Description of a linear layer y = x Wᵀ + b that is to be factorized; W is always `(out, in)`.

    An embedding can be a target, too. Then the rows of x are one-hot, and `in` is the vocabulary size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    out_features: int
    in_features: int
    input_of: str
    """Name of the first target with the same input tensors (for key and value, the query); may be the target itself."""
    repeated: bool = False
    """Whether the layer may run several times for a batch (a shared layer, a recurrent cell that runs for each token).
    The tokens of all calls then count as its tokens."""
    mask: str | None = ATTENTION
    """Name of the batch entry that masks the layer's tokens; None if there is none (a pooler, a model of images)."""
    sampled: bool = True
    """Whether each input vector of the layer belongs to one example and token; if not, the layer has no statistics."""
    routed_by: str | None = None
    """Name of the module of experts (eckart/model/experts.py) to which the layer belongs. The layer then reads only the
    tokens that a router sends to its expert; `mask` and `repeated` describe the module. None: it is not an expert's."""
    looks_up: bool = False
    """Whether the target is an embedding without a tied head, which takes memory but hardly any time."""
    of_vocabulary: bool = False
    """Whether the layer has an output for each word of the vocabulary; then only the diagonal of C_out is gathered."""
    storage: Storage = Field(default="factors", exclude=True)
    """Storage that the recipe chooses for the layer; `stored` of eckart/ranks/budget.py sets it, not probing."""

    @property
    def parameters(self) -> int:
        """Number of weights of the dense layer, without the bias, which stays as it is."""
        return self.out_features * self.in_features

    @property
    def step(self) -> int:
        """Parameters that one more rank costs in two factors: a column of `left` and a row of `right`."""
        return self.out_features + self.in_features

    @property
    def layers(self) -> tuple[Target, ...]:
        """The target's linear layers: two for a Product or Tied, otherwise the target itself."""
        return (self,)


class Product(Target):
    """Description of the query and the key layer of an attention as one target.

    Their outputs only meet in inner products, separately for each head. The inherited fields describe the first layer.
    A rank is the rank of each head's product: both layers keep `rank` outputs of every head.
    """

    heads: int
    other: Target
    """The second layer; it has the same number of outputs."""

    @property
    def parameters(self) -> int:
        return self.out_features * (self.in_features + self.other.in_features)

    @property
    def step(self) -> int:
        return self.heads * (self.in_features + self.other.in_features)

    @property
    def layers(self) -> tuple[Target, ...]:
        return (self, self.other)


class Tied(Target):
    """Description of an embedding and the head that shares its weight; inherited fields describe the embedding."""

    other: Target
    """The head; its weight is `(vocabulary, in)`."""

    @property
    def layers(self) -> tuple[Target, ...]:
        return (self, self.other)


class Targets(BaseModel):
    """The targets of a model in order of execution, and the reason why each other linear layer is not a target.

    Attributes:
        excluded: name of each other linear layer, or of a matrix outside of linear layers (such as a tensor that holds
            several experts) → why it is not a target.
        warnings: what is misleading about the data with which the targets were calibrated, if they were.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: tuple[Product | Tied | Target, ...]
    excluded: dict[str, str]
    census: Census
    warnings: tuple[str, ...] = ()


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer as `(out, in)`.

    A weight that a device map has offloaded to the CPU or the disk is copied to the device on which its module runs.
    """
    with align_module_device(module):
        weight = module.get_parameter("weight").detach()
    return by_outputs(module, weight)


def find_targets(
    model: PreTrainedModel,
    batch: Batch,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    heads: bool = False,
    embeddings: bool = False,
    unsampled: bool = False,
    tied: bool = False,
) -> Targets:
    """Find the targets of `model`: the linear layers that can be factorized.

    A linear layer is a target if

    - the layer runs for `batch`, and its input vectors belong to single examples,
    - only its own `forward` uses its weight, and no other layer shares the weight,
    - the layer belongs to no router, which chooses experts: a small change would send tokens to other experts,
    - its name matches a pattern of `include` and none of `exclude`,
    - the layer is not a head (a module outside `model.base_model`), unless `heads` is true,
    - the layer computes x Wᵀ + b, if it is a subclass of Linear.

    An embedding must look up the words of the batch, too. A text may need positions that no calibration text has.

    Experts whose weights share one tensor are not linear layers: `unfuse` of eckart/model/experts.py takes them apart.

    Args:
        batch: model inputs, each `(batch, …)`. For an encoder-decoder, these include `decoder_input_ids` and
            `decoder_attention_mask`, unless its decoder reads the encoder's tokens.
        include, exclude: shell patterns for module names, such as `*.attention.*`.
        heads: whether heads may be targets.
        embeddings: whether embeddings of words may be targets.
        unsampled: whether a layer may be a target if its input vectors belong to no example. Such a layer has no
            statistics.
        tied: whether an embedding and the head that shares its weight may be a target, together.

    Raises:
        ValueError: there is no target (the message gives the reason for each layer), the model cannot be called with
            the batch, the batch does not say which tokens are padding, or `tied` is asked for and the model has no
            such pair.
    """
    _check_batch(model, batch)
    pair = _tied_pair(model) if tied else ()
    factors = parts_of_layers(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if name not in factors and (is_linear(module) or ((embeddings or name in pair) and is_embedding(module)))
    }
    routed = routed_layers(model)
    read = {name: routed.get(name, name) for name in layers}  # whose inputs tell to which examples tokens belong
    static = _static_reasons(model, layers, include, exclude, heads, pair)
    with eval_mode(model), torch.no_grad():
        for texts in (shortened(model, batch), batch):
            probe = Probe(model, {name: model.get_submodule(name) for name in read.values()}, texts)
            unusable = {name: reason for name in layers if (reason := probe.unusable(read[name]))}
            reasons = {**unusable, **static}
            mixed = {
                name: reason for name in layers if name not in reasons and (reason := probe.mixes_examples(read[name]))
            }
            if texts is batch or not mixed:  # else attention in windows, say, needs longer texts
                break
        place = {ran: number for number, ran in enumerate(probe.order)}
        order = sorted((name for name in layers if read[name] in place), key=lambda name: place[read[name]])
        reasons |= {} if unsampled else mixed
        candidates = [name for name in order if name not in reasons]
        reasons |= used_outside(model, texts, {name: probe.calls(name) for name in candidates if name not in routed})

    found = {name: layers[name] for name in candidates if name not in reasons}
    targets = _join_pair(_described(model, found, probe, mixed, routed), pair, reasons)
    excluded = {name: reasons[name] for name in [*order, *layers] if name in reasons} | other_matrices(model)
    if not targets:
        raise ValueError(f"the model has no targets: {_grouped(excluded) or 'it has no linear layer'}")
    names = [layer.name for target in targets for layer in target.layers]
    return Targets(targets=tuple(targets), excluded=excluded, census=census(model, names, excluded))


def unmatched_warning(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    """Return a warning if a pattern matches the name of no layer: it has a typo, say, or names a module of layers."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if module._parameters or isinstance(module, LowRankLayer)  # its parameters are its factors'
    }
    unmatched = [pattern for pattern in (*include, *exclude) if not any(fnmatchcase(name, pattern) for name in layers)]
    if not unmatched:
        return None
    example = next((name for name, module in layers.items() if is_linear(module)), "encoder.layer.0.output.dense")
    return f"include and exclude: {' and '.join(unmatched)} match no layer, whose whole names are such as {example}"


def leave_out(found: Targets, names: Collection[str], reason: str) -> Targets:
    """Return `found` without the targets `names`, each one linear layer, which stay dense for this `reason`."""
    left = tuple(target for target in found.targets if target.name not in names)
    lost = sum(target.parameters for target in found.targets if target.name in names)
    counts = {"targets": found.census.targets - lost, "linear": {**found.census.linear, reason: lost}}
    excluded = {**found.excluded, **dict.fromkeys(names, reason)}
    return found.model_copy(
        update={"targets": left, "excluded": excluded, "census": found.census.model_copy(update=counts)}
    )


def _described(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    probe: Probe,
    mixed: Collection[str],
    routed: Mapping[str, str],
) -> list[Target]:
    """Return `layers` as targets, in the same order.

    Args:
        mixed: names of the layers that have no statistics.
        routed: name of an expert's layer → name of its module of experts.
    """
    first_reader: dict[tuple[int, tuple[int, ...]], str] = {}
    targets: list[Target] = []
    for name, module in layers.items():
        read = routed.get(name, name)
        rows, columns = weight_of(module).shape
        targets.append(
            Target(
                name=name,
                out_features=rows,
                in_features=columns,
                input_of=name if name in routed else first_reader.setdefault((columns, probe.reads(read)), name),
                repeated=probe.repeated(read),
                mask=probe.mask(read),
                sampled=name not in mixed,
                routed_by=routed.get(name),
                looks_up=is_embedding(module),
                of_vocabulary=module is model.get_output_embeddings(),
            )
        )
    return targets


def _grouped(excluded: Mapping[str, str]) -> str:
    """Return `excluded` as text: each reason once, with the first layer that it excludes and the number of others."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(
        f"{names[0]} {reason}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more: {reason}"
        for reason, names in by_reason.items()
    )


def _check_batch(model: PreTrainedModel, batch: Batch) -> None:
    """Check that the batch's masks show which tokens are padding, in the decoder as well.

    Raises:
        ValueError: a mask is missing, has the wrong shape, or hides parts of pictures.
    """
    if PICTURES in batch and not bool(batch[PICTURES].all()):
        raise ValueError(
            f"{PICTURES} hides parts of pictures, but no layer's inputs can be matched to pixels: give pictures of the "
            "same size"
        )
    for name in (ATTENTION, f"decoder_{ATTENTION}"):
        mask, ids = batch.get(name), batch.get("input_ids")
        if mask is not None and mask.dim() != 2 and (ids is None or mask.shape != ids.shape):
            raise ValueError(
                f"{name} is {tuple(mask.shape)}, which does not show the padding: give it as (batch, tokens), 0 where "
                "a token is padding"
            )
    decodes = model.config.is_encoder_decoder or model.config.get_text_config().is_encoder_decoder
    has_decoder = "decoder_input_ids" in signature(model.forward).parameters
    if has_decoder and decodes and (labels_are_tokens(batch) or "decoder_input_ids" in batch):
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            if name not in batch:
                raise ValueError(
                    f"the batch has no {name}, so the decoder's padding is unknown: add decoder_input_ids (the labels, "
                    "shifted to the right) and decoder_attention_mask (0 where these are padding)"
                )


# --- an embedding and its head ---------------------------------------------------------------------------------------


def _tied_pair(model: PreTrainedModel) -> tuple[str, str]:
    """Return the names of the input embedding and of the head that shares its weight.

    Raises:
        ValueError: there is no such head, or a third module shares the weight.
    """
    ends: tuple[Any, Any] = None, None
    with suppress(AttributeError, NotImplementedError):  # a model with none or several, as CLIP
        ends = model.get_input_embeddings(), model.get_output_embeddings()
    names = [next((name for name, module in model.named_modules() if module is end), "") for end in ends]
    if all(names) and is_embedding(ends[0]) and is_linear(ends[1]):
        owners = _weight_owners(model)[f"{names[0]}.weight"]
        if sorted(owners) == sorted(names):
            return names[0], names[1]
    raise ValueError(
        "the model has no embedding that shares its weight with a linear head and with nothing else, and that only "
        "looks up rows (Gemma's also scales them): leave out tied (targets.tied in params.yaml)"
    )


def _join_pair(targets: list[Target], pair: Sequence[str], reasons: dict[str, str]) -> list[Target]:
    """Return `targets` with the embedding and the head that `pair` names joined into one target.

    If only one of the two is a target, it is left out, and the reason is added to `reasons`. `pair` may be empty.
    """
    both = {target.name: target for target in targets if target.name in pair}
    if len(both) < len(pair):
        why = f"shares its weight with a layer that is not a target, of {' and '.join(pair)}"
        reasons |= dict.fromkeys(both, why)
        return [target for target in targets if target.name not in both]
    if not both:
        return targets
    embedding, head = pair
    tied = Tied(**both[embedding].model_dump(exclude={"looks_up"}), other=both[head])
    return [tied if target.name == embedding else target for target in targets if target.name != head]


# --- reasons that need no forward pass: names, weights, hooks --------------------------------------------------------


def _static_reasons(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    include: Sequence[str],
    exclude: Sequence[str],
    heads: bool,
    pair: Sequence[str],
) -> dict[str, str]:
    """Return why layers are not targets, as far as this is known without a forward pass: name of layer → reason.

    The layers of `pair` are not excluded for being a head or for sharing their weight.
    """
    owners, modules = _weight_owners(model), {name for name, _ in model.named_modules()}
    reasons = {
        name: _unwanted(name, include, exclude)
        or ("selects experts, tokens or patches" if in_selector(name, modules) else None)
        or ("is clamped while the model trains" if _CLAMPED in name.split(".") else None)
        or _patched(module)
        or (None if name in pair else _head(model, name, heads) or _tied(name, owners.get(f"{name}.weight")))
        for name, module in layers.items()
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _unwanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> str | None:
    if not any(fnmatchcase(name, pattern) for pattern in include):
        return "matches no include pattern"
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return "matches an exclude pattern"
    return None


def in_selector(name: str, modules: Collection[str]) -> bool:
    """Whether a layer or parameter belongs to a part that selects what others read, as its name says.

    That is a router (or a gate beside experts), the indexer of an attention to few tokens (DeepSeek-V3.2), or the
    patcher that cuts a text (BLT). A small error in its scores selects other experts, tokens or patches. It may have no
    gradient, so that no method sees the error, and its weights are few.

    Args:
        modules: names of all modules.
    """
    parts = name.split(".")
    beside = (".".join([*parts[:place], "experts"]) for place, part in enumerate(parts) if part == "gate")
    return any("router" in part or part in _SELECTORS for part in parts) or any(each in modules for each in beside)


def _head(model: PreTrainedModel, name: str, heads: bool) -> str | None:
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    is_head = not name.startswith(base) or model.get_submodule(name) is model.get_output_embeddings()
    is_head |= not _HEADS.isdisjoint(name.split("."))
    # A model for a task may not have its backbone in one module. If it writes text, layers join its parts (BLIP-2).
    if not base and "For" in type(model).__name__ and not model.can_generate():
        is_head |= "." not in name
    return "is a head" if is_head and not heads else None


def has_other_forward(module: nn.Module) -> bool:
    """Whether the module's `forward` is not its class's. The one that accelerate patches to move weights is fine."""
    own = vars(module).get("forward")
    replaced = own is not None and getattr(own, "__func__", own) is not type(module).forward
    return replaced and not hasattr(module, "_hf_hook")


def _patched(module: nn.Module) -> str | None:
    """Return why a module with hooks or a patched `forward` is not a target; None if the module has neither.

    It is asked before the probe adds hooks of its own.
    """
    hooked = has_other_forward(module) or module._forward_hooks or module._forward_pre_hooks
    return "a hook or a patched forward may change what it computes" if hooked else None


def _tied(name: str, owners: Sequence[str] | None) -> str | None:
    if owners is None:
        return "its weight is not a parameter"
    others = [owner for owner in owners if owner != name]
    return f"shares its weight with {', '.join(others)}" if others else None


def _weight_owners(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the modules that own each parameter: name of the parameter → names of the modules.

    A tied parameter has several owners. Keys are names and not parameters, because with a device map, accelerate
    replaces offloaded parameters after each forward pass.
    """
    owners: dict[int, list[str]] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name: owners[id(parameter)] for name, parameter in parameters}
