"""Saving and loading of compressed models as ordinary Hugging Face models.

`config.json` has a quantization config `{"quant_method": "eckart", "ranks": {…}, …}`, the arguments of `EckartConfig`.
transformers therefore lets the quantizer of this file replace the modules before it loads the weights. So after
`import eckart`::

    AutoModelForSequenceClassification.from_pretrained(folder)

loads the saved model, for every architecture, from safetensors, without remote code. Weights are the same bit for bit.
Outputs may differ in the last digits, because on some processors the order of a sum depends on memory alignment.

Without this package, transformers would skip the unknown quantizer and fill the layers with random weights. To prevent
this, `config.json` names a weights file that does not exist, and the file's name says what to do (`NEEDED`).
transformers fails and quotes the name; with this package imported, the name is ignored. `save_pretrained` of a
compressed model always writes the name, also when the Trainer or `push_to_hub` calls `save_pretrained`.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
)
from transformers.quantizers import (
    AutoHfQuantizer,
    AutoQuantizationConfig,
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from eckart.model.experts import unfuse_like, unfused_experts
from eckart.model.layers import (
    LowRankEmbedding,
    LowRankLayer,
    factorized,
    head_counts,
    head_rows_like,
    keep_values,
    low_rank_like,
    narrowed_like,
    narrowed_shapes,
    pivoted,
    pivoted_like,
    residual_rows,
    tie_head,
    tied_heads,
)
from eckart.model.quantized_or_adapted import check_saved_weights, check_unadapted, forget_gguf

NEEDED = "factorized: install or update the Python package eckart, and `import eckart` before you load this model"
"""Name of a weights file that does not exist; transformers quotes it as an error message if this package is missing."""
_NEEDED_1 = "factorized: install the Python package eckart, and `import eckart` before you load this model"
"""The same of format 1. A version that knows no other name fails on format 2, whose weights it would not find."""
FORMAT = 2
"""Format of the folders that are saved: in the first one, factors were parameters of their layer."""

_OF_FORMAT = ("quantization_config", "transformers_weights")
"""Entries of config.json that tell how a compressed model is stored."""
_UPLOAD = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "commit_description", "tags")
"""Options of `save_pretrained` that are those of `push_to_hub`."""


@register_quantization_config("eckart")
class EckartConfig(QuantizationConfigMixin):
    """Storage of a compressed model's layers, as written to config.json; layers without a rank are dense.

    Attributes:
        ranks: name of a layer → rank; for a layer of an attention product, the rank of each head.
        rows: name of a layer → number of rows of its residual.
        heads: name of a layer of an attention product → number of heads.
        pivoted: names of the layers in pivoted storage.
        tied: name of a head → name of the embedding with the factors that the head uses.
        narrowed: name of a layer of a narrowed MLP → its shape `[out, in]`; if it also has a rank, it is factorized.
        experts: names of the modules of experts that are taken apart (eckart/model/experts.py).
        format: FORMAT, or 1 in folders from before factors were linear layers: `left` for `left.weight` and so on.
        quantization: config of another method that has quantized the linear layers, factors among them.
    """

    experts: Sequence[str] = ()  # of the class, so that config.json of a model without experts does not have it
    quantization: QuantizationConfigMixin | None = None
    quantizes = False
    """Whether that method quantizes the model now, as it is loaded; if not, the folder is quantized."""

    def __init__(
        self,
        ranks: dict[str, int] | None = None,
        rows: dict[str, int] | None = None,
        heads: dict[str, int] | None = None,
        pivoted: list[str] | None = None,
        tied: dict[str, str] | None = None,
        narrowed: dict[str, list[int]] | None = None,
        experts: list[str] | None = None,
        format: int = 1,
        quantization: dict[str, Any] | QuantizationConfigMixin | None = None,
        **_: Any,
    ) -> None:
        """
        Raises:
            ValueError: a later version of this package has saved the model.
        """
        if format > FORMAT:
            raise ValueError(f"the model is saved in format {format} of eckart: upgrade the Python package eckart")
        self.quant_method = "eckart"  # type: ignore[assignment]
        self.ranks = ranks or {}
        self.rows = rows or {}
        self.heads = heads or {}
        self.pivoted = pivoted or []
        self.tied = tied or {}
        self.narrowed = narrowed or {}
        if experts:
            self.experts = experts
        self.format = format
        if quantization is not None:
            self.quantization = _config_of(quantization)

    def to_dict(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "quantizes"}
        if self.quantization is not None:
            content["quantization"] = self.quantization.to_dict()
        return copy.deepcopy(content)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting as a dict does: transformers asks so, also where a model's own config is given to load."""
        return getattr(self, name, default)

    def layer(self, name: str, module: nn.Module) -> nn.Module:
        """Return an uninitialized low-rank layer to replace the dense `module`."""
        rank = self.ranks[name]
        if name in self.heads:
            return head_rows_like(module, self.heads[name], rank)
        if name in self.pivoted:
            return pivoted_like(module, rank)
        return low_rank_like(module, rank, self.rows.get(name, 0))


def _config_of(stored: dict[str, Any] | QuantizationConfigMixin) -> QuantizationConfigMixin:
    """Return a quantization config, which is a dict if it comes from a file."""
    read: Any = AutoQuantizationConfig.from_dict
    config: QuantizationConfigMixin = read(stored) if isinstance(stored, dict) else stored
    return config


class _NoOther(HfQuantizer):
    """Stands for the other method's quantizer if there is none."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


@register_quantizer("eckart")
class EckartQuantizer(HfQuantizer):
    """Puts low-rank layers in place of the layers that the config names, before the weights are loaded.

    If another method quantizes the model, too, its quantizer then sees a model whose factors are linear layers, and
    decides all else.
    """

    quantization_config: EckartConfig
    requires_calibration = True  # only weights saved in this format can be loaded; loading does not compress dense ones

    def __init__(self, quantization_config: EckartConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        config = quantization_config.quantization
        self.other: HfQuantizer = _NoOther(quantization_config)
        if config is not None:
            self.other = AutoHfQuantizer.from_config(config, pre_quantized=not quantization_config.quantizes)
        self.pre_quantized = self.other.pre_quantized
        self._own_names: list[WeightTransform] = []

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **options: Any) -> None:
        names = dict(model.named_modules(remove_duplicate=False))
        for name in self.quantization_config.experts:
            if (place := _name_here(model, name, names)) is not None:
                unfuse_like(model, place)
                # else transformers draws the fused weights, which are gone, as in Qwen3-Omni
                model.get_submodule(place.rpartition(".")[0])._is_hf_initialized = True  # type: ignore[assignment]
        names = dict(model.named_modules(remove_duplicate=False))
        for name, (rows, columns) in self.quantization_config.narrowed.items():
            if (place := _name_here(model, name, names)) is not None:
                model.set_submodule(place, narrowed_like(model.get_submodule(place), rows, columns))
        for name in self.quantization_config.ranks:
            if (place := _name_here(model, name, names)) is not None:
                layer = self.quantization_config.layer(name, model.get_submodule(place))
                keep_values(layer)  # else transformers draws what a layer of this name needs, as an xLSTM's gate
                model.set_submodule(place, layer)
        for head, embedding in self.quantization_config.tied.items():
            if head in names:
                tie_head(model, head, _name_here(model, embedding, names) or embedding)
        _tie_new_heads(model)
        if self.quantization_config.format < FORMAT:
            self._own_names = [*_old_names(model, self.quantization_config.ranks, names)]
        if self.quantization_config.quantization is not None:
            model.quantization_method = self.other.quantization_config.quant_method  # type: ignore[assignment]
        self.other._process_model_before_weight_loading(model, **options)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        used = getattr(model, "_weight_conversions", None) or []  # save_pretrained would undo them
        kept = [rule for rule in used if rule not in self._own_names]
        model._weight_conversions = kept  # type: ignore[assignment]
        if self.quantization_config.quantization is None:  # another method makes tensors of its own
            _check_loaded(model)
        _complete_biases(model)
        describe(model)  # the layers that this model has, which are others than the folder's if it has another head
        self.quantization_config = getattr(model.config, "quantization_config", self.quantization_config)
        # else transformers would refuse half(), float() and training without adapters, which factors allow
        model.is_quantized = self.quantization_config.quantization is not None  # type: ignore[assignment]
        self.other._process_model_after_weight_loading(model, **options)
        return model

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Remove NEEDED from the config.

        This hook is used because it is the only one that gets the config before transformers looks for the weights.
        """
        forget_needed(config)
        return self.other.update_attn_implementation(config)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Add the names of the factors to those that transformers gives to what a folder holds."""
        self._own_names += _names_back(model, self.quantization_config.ranks, weight_conversions)
        return self.other.update_weight_conversions([*weight_conversions, *self._own_names], model)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Undo what the other method has done; the factors stay."""
        model = self.other.dequantize(model, dtype)
        describe(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return bool(self.other.is_serializable())

    @property
    def is_trainable(self) -> bool:
        return bool(self.other.is_trainable)

    def __getattribute__(self, name: str) -> Any:
        """Return what the other method's quantizer has for `name`, if this class does not say otherwise."""
        if name in _OF_OTHER:
            return getattr(object.__getattribute__(self, "other"), name)
        return super().__getattribute__(name)


_merged_by_transformers: Any = AutoHfQuantizer.merge_quantization_configs


def _merge_configs(
    _: type[AutoHfQuantizer],
    stored: dict[str, Any] | QuantizationConfigMixin,
    given: dict[str, Any] | QuantizationConfigMixin | None,
) -> QuantizationConfigMixin:
    """Combine the config of a folder with the argument `quantization_config` of `from_pretrained`.

    transformers would refuse a second method: to it, a model has one. Here the method that the argument names quantizes
    the factors and the dense linear layers of a compressed model.
    """
    config = copy.copy(_config_of(stored))
    if not isinstance(config, EckartConfig) or given is None or isinstance(given, EckartConfig):
        merged: QuantizationConfigMixin = _merged_by_transformers(stored, given)
        return merged
    config.quantizes = config.quantization is None
    if config.quantization is not None:
        given = _merged_by_transformers(config.quantization, given)
    config.quantization = _config_of(given)
    return config


AutoHfQuantizer.merge_quantization_configs = classmethod(_merge_configs)  # type: ignore[assignment]

_OF_OTHER = {name for name in vars(HfQuantizer) if not name.startswith("_") and name not in vars(EckartQuantizer)} - {
    "preprocess_model",
    "postprocess_model",
    "remove_quantization_config",
}
"""Names that EckartQuantizer takes from the other method's quantizer."""


def _old_names(model: PreTrainedModel, layers: Iterable[str], names: Collection[str]) -> Iterator[WeightTransform]:
    """Yield what gives the tensors of a folder of format 1 their present names, and an embedding's their orientation.

    Args:
        layers: names of low-rank layers in the folder.
        names: names of all modules of `model`.
    """
    for name in layers:
        place = _name_here(model, name, names)
        layer = None if place is None else model.get_submodule(place)
        if not isinstance(layer, LowRankLayer):
            continue
        for old, new in layer.renamed().items():
            if layer.is_transposed(old):
                # transformers finds this pattern in the full name, which may lack the name of the base model
                within = name.removeprefix(f"{model.base_model_prefix}.")
                yield WeightConverter(f"{re.escape(within)}\\.{old}$", f"{within}.{new}", [Transpose()])
            else:
                yield WeightRenaming(f"^{re.escape(name)}\\.{old}$", f"{name}.{new}")


def _names_back(model: PreTrainedModel, layers: Iterable[str], conversions: Sequence[Any]) -> Iterator[WeightTransform]:
    """Yield what gives the parts of the low-rank `layers` of a folder their names back, if `conversions` change these.

    Inkling 2 has a pattern that gives `sconv.weight_proj` the name `sconv.weight_proj.weight`. It also gives
    `sconv.weight_proj.right.weight` the name `sconv.weight_proj.weight.right.weight`.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    for name in layers:
        place = _name_here(model, name, names) or ""
        layer = names.get(place)
        for part in layer.state_dict() if isinstance(layer, LowRankLayer) else ():
            changed = _renamed(f"{name}.{part}", conversions)
            if not f".{changed}".endswith(tuple(f".{known.rpartition('.')[2]}.{part}" for known in (name, place))):
                stem, _, tensor = part.rpartition(".")
                if stem and changed.endswith(f".{tensor}"):  # a quantized weight is saved as several tensors
                    yield WeightRenaming(f"^{re.escape(changed.removesuffix(tensor))}", f"{name}.{stem}.")
                else:
                    yield WeightRenaming(f"^{re.escape(changed)}$", f"{name}.{part}")


def _name_here(model: PreTrainedModel, name: str, names: Collection[str]) -> str | None:
    """Return the name in `model` of the saved model's layer `name`, or None if `model` has no such layer.

    The names differ if a model was saved with its head and is loaded without it (`AutoModel`), or the other way round,
    or if only a part is loaded, such as CLIP's text model, and transformers renames its weights.
    With another head, or fewer layers, a layer may be missing: transformers reports its weights as unexpected.
    """
    prefix = f"{model.base_model_prefix}."
    for place in (name, name.removeprefix(prefix), prefix + name):
        if place in names:
            return place
    renamed = _renamed(f"{name}.weight", get_model_conversion_mapping(model)).removesuffix(".weight")
    return renamed if renamed in names else None


def _renamed(tensor: str, conversions: Iterable[Any]) -> str:
    """Return the name that transformers gives to a tensor of a folder by those of `conversions` that rename."""
    return apply_renamings(tensor, [rule for rule in conversions if isinstance(rule, WeightRenaming)])


def _tie_new_heads(model: PreTrainedModel) -> None:
    """Let each head that is tied to a factorized embedding use its factors, as other heads use an embedding's weight.

    The saved model had no such head: its config still ties weights.
    """
    for tied, source in list(model.all_tied_weights_keys.items()):
        head, embedding = tied.rpartition(".")[0], source.rpartition(".")[0]
        layer = model.get_submodule(embedding)
        if not isinstance(layer, LowRankLayer):
            continue
        del model.all_tied_weights_keys[tied]
        if isinstance(layer, LowRankEmbedding):
            tie_head(model, head, embedding)


def _complete_biases(model: PreTrainedModel) -> None:
    """Give each tied head a bias of its own, which is zero if it is new.

    BERT's shares one with the module around it, and only that one would be saved. transformers draws values only for
    modules that it knows.
    """
    for name in tied_heads(model):
        head = model.get_submodule(name)
        if head.bias is None:
            continue
        if model.all_tied_weights_keys.pop(f"{name}.bias", None):
            head.bias = nn.Parameter(head.get_parameter("bias").detach().clone())
        elif not getattr(head.bias, "_is_hf_initialized", False):
            nn.init.zeros_(head.get_parameter("bias"))


def _check_loaded(model: PreTrainedModel) -> None:
    """Check that the folder had all weights of the factorized layers; transformers would only log what is missing.

    Raises:
        ValueError: a weight was not loaded.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LowRankLayer):
            continue
        for part, weight in layer.named_parameters():
            if not (weight.is_meta or getattr(weight, "_is_hf_initialized", False)):
                raise ValueError(
                    f"the folder has no {name}.{part}, although its config says that {name} is factorized: save the "
                    "model again with eckart.save"
                )


def describe(model: PreTrainedModel) -> None:
    """Write ranks and storage of all layers into the model's config, for `save_pretrained` and `push_to_hub`."""
    forget_gguf(model)
    if (storage := _storage(model)) is not None:
        model.config.quantization_config = storage
    elif isinstance(getattr(model.config, "quantization_config", None), EckartConfig):
        del model.config.quantization_config  # every factorized layer has been merged since it was loaded


def _storage(model: PreTrainedModel) -> EckartConfig | None:
    """Return what a config says of the model's layers; None if no layer is factorized, narrowed or an expert's."""
    ranks, narrowed, experts = factorized(model), narrowed_shapes(model), unfused_experts(model)
    if not (ranks or narrowed or experts):
        return None
    present = getattr(model.config, "quantization_config", None)
    return EckartConfig(
        ranks,
        residual_rows(model),
        head_counts(model),
        pivoted(model),
        tied_heads(model),
        narrowed,
        experts,
        FORMAT,
        getattr(present, "quantization", None),
    )


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save `model`, factorized or dense, to a folder that `from_pretrained` can load.

    Raises:
        NotADirectoryError: `folder` is a file; transformers would write nothing, and say so in its log only.
        ValueError: `model` is not of transformers; or a layer has an adapter, or a factor is quantized in place, or
            computed from other tensors, such as a mask, so the folder could not be loaded.
    """
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file: name a folder")
    # not in save_pretrained, which also writes the checkpoints of a training with such layers
    model = cast("PreTrainedModel", getattr(model, "_orig_mod", model))  # else the wrapper would be part of all names
    if isinstance(model, nn.Module):
        check_unadapted(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}, not a model of transformers: give the one in it, or call its own "
            "save_pretrained"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, LowRankLayer) and (computed := computed_weights(layer)):
            raise ValueError(f"{name}.{computed[0]} {COMPUTED}")
    describe(model)
    model.save_pretrained(folder)


_saved_by_transformers: Any = PreTrainedModel.save_pretrained


@wraps(_saved_by_transformers)
def _save_pretrained(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **options: Any
) -> None:
    """Save a model. If it is compressed, also write NEEDED into config.json.

    transformers never writes the name of a weights file into a config, so the name is added afterwards.

    Raises:
        ValueError: a tool has quantized weights of a compressed model in place.
    """
    if not _has_format(model):
        _saved_by_transformers(model, save_directory, *args, **options)
        return
    check_saved_weights(model)
    given = signature(_saved_by_transformers).bind(model, save_directory, *args, **options).arguments
    model, save_directory, options = given.pop("self"), given.pop("save_directory"), given.pop("kwargs", {}) | given
    push_to_hub = options.pop("push_to_hub", False)
    hub = {name: options.pop(name) for name in _UPLOAD if name in options} if push_to_hub else {}
    with _described(model) as compressed, _each_layer_by_itself(model):
        _saved_by_transformers(model, save_directory, **options)
    file = Path(save_directory) / "config.json"
    if compressed and options.get("is_main_process", True) and file.exists():
        content = {**json.loads(file.read_text()), "transformers_weights": NEEDED}
        parts = _parts_of_config(model.config).keys() & content.keys()
        for part in parts:  # a class that loads only this part reads nothing else
            content[part] |= {name: content[name] for name in _OF_FORMAT if name in content}
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    if push_to_hub:  # push_to_hub calls this function once more to save the files
        upload: Any = model.push_to_hub
        upload(hub.pop("repo_id", None) or Path(save_directory).name, **hub)


# of the class, since a model that was compressed may become part of another one
PreTrainedModel.save_pretrained = _save_pretrained  # type: ignore[method-assign, assignment]


def _has_format(model: PreTrainedModel) -> bool:
    """Whether a layer of `model` is compressed, or was when its config was written."""
    stored = getattr(model.config, "quantization_config", None)  # a dict in what AutoConfig reads
    was = isinstance(stored, EckartConfig) or (isinstance(stored, dict) and stored.get("quant_method") == "eckart")
    return was or _storage(model) is not None


@contextmanager
def _described(model: PreTrainedModel) -> Iterator[bool]:
    """Let the config describe the layers that `model` has now while the context lasts; yield whether any is compressed.

    Layers may have been merged since the config was written. Models inside of this one share its config.
    """
    config, storage = model.config, _storage(model)
    before = config.__dict__.pop("quantization_config", None)
    if storage is None:
        forget_needed(config)
    else:
        config.quantization_config = storage
    try:
        yield storage is not None
    finally:
        config.__dict__.pop("quantization_config", None)
        if before is not None:
            config.quantization_config = before


@contextmanager
def _each_layer_by_itself(model: PreTrainedModel) -> Iterator[None]:
    """Let `save_pretrained` join no layers while the context lasts.

    Folders of some families hold several layers as one tensor, such as query, key and value of NomicBERT, which
    transformers takes apart as it loads them. But factors of other ranks cannot be joined, nor factors and a dense
    weight: one that misses the others would be written as if it were all of them.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [rule for rule in conversions if not isinstance(rule, PrefixChange)]  # as transformers does
    joining = [rule for rule in conversions if isinstance(rule, WeightConverter) and len(rule.target_patterns) > 1]
    with converted(model, [rule for rule in conversions if rule not in joining]):
        yield


@contextmanager
def converted(model: PreTrainedModel, conversions: Sequence[Any]) -> Iterator[None]:
    """Let `save_pretrained` convert the model's tensors by `conversions` only, none if it is empty."""
    changed: Any = model
    own, changed._weight_conversions = getattr(model, "_weight_conversions", None), [*conversions]
    try:
        yield
    finally:
        changed._weight_conversions = own


COMPUTED = "computes its weight from other tensors; undo it by prune.remove or remove_parametrizations"
"""The words of a message about a module that `computed_weights` returns."""


def computed_weights(model: nn.Module) -> list[str]:
    """Return the names of the modules whose weight is computed from other tensors, such as a mask."""
    modules = model.named_modules()
    return [name for name, part in modules if is_parametrized(part) or hasattr(part, "weight_orig")]


def plain_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of the model's config that says nothing of factors, for tools that read no weights."""
    config = copy.deepcopy(model.config)
    forget_needed(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def forget_needed(config: PreTrainedConfig) -> None:
    """Remove the name of the weights file from `config` if it is NEEDED, and what the configs of its parts repeat."""
    if getattr(config, "transformers_weights", None) in (NEEDED, _NEEDED_1):
        del config.transformers_weights
        for part in _parts_of_config(config).values():
            for name in _OF_FORMAT:
                if hasattr(part, name):
                    delattr(part, name)


def _parts_of_config(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return the configs of a model's parts by name, such as `text_config`."""
    return {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
