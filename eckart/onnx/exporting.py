"""Export of a model to ONNX, with a check that onnxruntime gives the same outputs as torch. Needs the extra `onnx`.

A low-rank layer stays two matrix products, so the file is as small as the factors or pivots are.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eckart.calibration.embeddings import Pooling, embeddings
from eckart.model.batches import LABELS, Batch
from eckart.model.experts import unfused
from eckart.model.round_trip import without_constants
from eckart.onnx.running import (
    KEPT,
    OUTPUTS,
    PAST,
    PRESENT,
    ExportError,
    cache_of,
    explained,
    quiet,
    runner,
    weights_of,
)

TOLERANCE = 1e-4
"""Largest allowed difference between logits of torch and onnxruntime, ÷ the largest logit of the batch if above 1."""

_TIES = 1e-3
"""Share of predictions whose class may differ: among thousands of tokens, some have two equally likely classes."""
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LOOPING = ("mamba", "mamba2", "eckart_lstm")  # types of models
_LONGEST = 64  # tokens of a random text
_SPECIAL_ATTENTION = ("softcap", "s_aux", "position_bias")  # arguments that only a model's own attention handles
_DECODER_OPSET = 23  # has one node for a rotary embedding or an RMS norm; earlier opsets need seven


@dataclass(frozen=True)
class Exported:
    """Result of an export: the size of the file, and the difference between its outputs and torch's.

    Attributes:
        parameters: number of floating-point numbers in the file.
        bytes: size of the file, including separate weights.
        examples: number of examples on which the outputs were compared.
        difference: largest difference between two logits.
    """

    parameters: int
    bytes: int
    examples: int
    difference: float


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path | str,
    batches: Iterable[Batch] = (),
    int8: bool = False,
    calibration: Iterable[Batch] = (),
) -> Exported:
    """Export `model` to ONNX, for any batch size and length. The inputs are the tokenizer's outputs, `(batch, tokens)`.

    The outputs are `logits`: `(batch, classes)`, or `(batch, tokens, classes)` for token classification and causal
    language models. For question answering they are `start_logits` and `end_logits`, `(batch, tokens)`. A model without
    a head has `last_hidden_state` `(batch, tokens, width)` and, after `return_embeddings`, `sentence_embedding`
    `(batch, width)`. CLIP's text model with its projection also has `text_embeds` `(batch, width)`.

    The graph of a causal language model also has its cache as inputs `past_key_values.N.key` and `.value`, `(batch,
    heads, past, size)`, and as outputs `present.N.key` and `.value`, `(batch, heads, past + tokens, size)`. past is 0
    before the first token, and counts all tokens, also in layers that attend to a sliding window. Its `attention_mask`
    is `(batch, past + tokens)`; examples may be padded on either side. The optional input `num_logits_to_keep` is the
    number of last tokens to compute logits for; 0: all tokens. A cache of another kind (a recurrent state) is not
    exported, and then this input does not exist either.

    The model is put into eval mode. `file` is written or replaced only at the end, after a check: for random texts of
    several lengths and for `batches`, onnxruntime must give the same outputs as torch, except on padding. Weights above
    2 GB are written to `FILE.data` beside it.

    Args:
        model: in float32, with a head that returns logits.
        batches: further inputs for the comparison, each `(batch, tokens)`. The graph reads no token types if these or
            `calibration` have none. Entries that the graph does not read must not change the outputs; positions of a
            language model are never read.
        int8: whether to quantize the weights with `quantize`; the outputs may then differ from torch's.
        calibration: typical inputs for the quantization; if empty, random texts.

    Raises:
        ExportError: a package is missing, the model cannot be exported, or the outputs differ.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as folder:
        exact, rounded = (Path(folder) / weights / file.name for weights in ("float32", "int8"))
        files = (exact, rounded) if int8 else (exact,)
        exported = export_files(model, tokenizer, files, batches, calibration)[-1]
        _move(files[-1], file)
    return exported


def export_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[Path],
    batches: Iterable[Batch] = (),
    calibration: Iterable[Batch] = (),
) -> list[Exported]:
    """Export `model` as `export` does, but to new files that remain if an error occurs.

    Args:
        files: file with float32 weights; if there is a second one, it gets the same graph with int8 weights.
    """
    _check(model)
    model = unfused(model)  # onnx has no product for experts that share one tensor
    if tokenizer.pad_token is None:
        raise ExportError("the tokenizer has no padding token: set tokenizer.pad_token = tokenizer.eos_token")
    model.eval()
    batches, calibration = list(batches), list(calibration)
    typeless = any("token_type_ids" not in batch for batch in (*batches, *calibration))
    try:
        texts = list(_random_texts(model, tokenizer, {"token_type_ids"} if typeless else set()))
        sample = _with_cache(model, texts[0])
        with torch.no_grad():
            outputs = list(_outputs(model, sample))
    except Exception as error:  # the type of the error depends on the model
        raise ExportError(f"a {type(model).__name__} does not run on texts (batch, tokens) alone: {error}") from error
    if not outputs:
        raise ExportError(
            f"a {type(model).__name__} returns no logits: load it with the head of a task, or without any"
        )
    compared = [*texts, *batches]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    exact, *others = files
    parameters = _write(model, sample, outputs, exact)
    differences = [_compare(model, exact, sample, compared)]
    for rounded in others:
        from eckart.onnx.int8 import quantize  # needs the extra

        quantize(exact, rounded, calibration or texts)
        differences.append(_compare(model, rounded, sample, compared, same=False))
    sizes = [sum(part.stat().st_size for part in (file, weights_of(file)) if part.exists()) for file in files]
    return [Exported(parameters, *found) for found in zip(sizes, *zip(*differences, strict=True), strict=True)]


def _check(model: PreTrainedModel) -> None:
    """Raise ExportError if `model` cannot be exported here."""
    if model.config.is_encoder_decoder and model.can_generate():
        raise ExportError(
            f"a {type(model).__name__} generates with an encoder, a decoder and a cache, which need several graphs: "
            "load it here and give it to optimum.exporters.onnx.onnx_export_from_model"
        )
    if model.config.model_type in _LOOPING:  # torch would first trace every token of a sample, for minutes
        raise ExportError(
            f"a {type(model).__name__} computes its states in a loop over tokens or chunks of them, and torch exports "
            "such a loop for one length of text only: run it in torch itself"
        )
    if any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules()):
        raise ExportError(
            f"a {type(model).__name__} with sparse attention computes short texts with full attention, and a graph has "
            "one of them: load it with attention_type='original_full'"
        )
    if missing := [name for name in _PACKAGES if not find_spec(name)]:
        raise ExportError(f"{', '.join(missing)} not installed: pip install 'eckart[onnx]'")
    if model.dtype != torch.float32:
        raise ExportError(f"the model is in {model.dtype}: load it with dtype=torch.float32")


def return_embeddings(model: PreTrainedModel, pooling: Pooling) -> None:
    """Make a model without a head return embeddings, too: `sentence_embedding` `(batch, width)`, each of length 1."""
    embed = embeddings(pooling)

    def add(module: nn.Module, _: Any, inputs: dict[str, Tensor], outputs: ModelOutput) -> ModelOutput:
        return ModelOutput({**outputs, "sentence_embedding": embed(outputs, inputs)})

    model.register_forward_hook(add, with_kwargs=True)


class _Positional(nn.Module):
    """Model that takes its inputs as positional tensors in a fixed order, as torch.onnx needs them."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(_outputs(self.model, dict(zip(self.names, values, strict=True))).values())


def _outputs(model: PreTrainedModel, inputs: Batch) -> dict[str, Tensor]:
    """Return the model's outputs that are named in OUTPUTS and, if the inputs contain a cache, the new cache."""
    past = [values for name, values in inputs.items() if name.startswith(PAST)]
    given: dict[str, Any] = {name: values for name, values in inputs.items() if not name.startswith(PAST)}
    accepted = inspect.signature(model.forward).parameters
    # positions count from the first real token of each text, as in `generate`
    if model.can_generate() and "attention_mask" in given and "position_ids" in accepted:
        positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0) + _first_position(model)
        given["position_ids"] = positions[:, past[0].shape[2] if past else 0 :]
    cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True))) if past else None
    outputs = model(**given, **({_name_of_cache(model): cache, "use_cache": True} if cache else {}))
    logits = {name: outputs[name] for name in OUTPUTS if name in outputs}
    return logits | (_cached(cache, PRESENT) if cache else {})


def _first_position(model: PreTrainedModel) -> int:
    """Return the position of a text's first token: 0, or that after padding's in models that count as RoBERTa does.

    `generate` gives 0 to all models, but these were trained with positions that their own `forward` makes.
    """
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(module.padding_idx, int):
            return module.padding_idx + 1
    return 0


def _cached(cache: DynamicCache, name: str) -> dict[str, Tensor]:
    """Return the keys and values of each layer, `(batch, heads, tokens, size)`, under names that begin with `name`.

    The cache of BART's decoder alone is as long as its config's encoder, so some of its layers may be empty.
    """
    return {
        f"{name}{number}.{part}": values
        for number, layer in enumerate(cache.layers)
        for part in ("key", "value")
        if (values := getattr(layer, f"{part}s")) is not None
    }


def _with_cache(model: PreTrainedModel, inputs: Batch) -> dict[str, Tensor]:
    """Return the inputs, with a cache of some earlier tokens if the model keeps keys and values."""
    name = _name_of_cache(model)
    if not (model.can_generate() and name and "attention_mask" in inputs):
        return dict(inputs)
    if not (cache := _cache_after(model, inputs, name)):
        return dict(inputs)
    past = {name: values[:, :, : values.shape[2] // 3] for name, values in _cached(cache, PAST).items()}
    mask = inputs["attention_mask"]
    seen = mask.new_ones(len(mask), next(iter(past.values())).shape[2])
    return {**inputs, "attention_mask": torch.cat([seen, mask], 1), **past}


def _name_of_cache(model: PreTrainedModel) -> str:
    """Return the name that the argument and the output with the cache have, since transformers 5.24 `cache`; or ""."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in accepted), "")


@torch.no_grad()
def _cache_after(model: PreTrainedModel, inputs: Batch, name: str) -> DynamicCache | None:
    """Return the keys and values of all tokens of `inputs`; None if the model keeps something else."""
    # use_cache is explicit, because training turns it off in the config
    cache = getattr(model(**inputs, use_cache=True), name)
    kinds = {type(layer) for layer in cache.layers} if isinstance(cache, DynamicCache) else {None}
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return None
    if DynamicSlidingWindowLayer in kinds:  # it drops tokens, so that layers would have caches of several lengths
        cache = DynamicCache()
        model(**inputs, **{name: cache}, use_cache=True)
    return cache


def _random_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, without: set[str]
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of random texts: a padded one, a single text, a text of one word, and a larger padded one.

    Args:
        without: outputs of the tokenizer that are left out.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2 * _LONGEST
    longest = min(_LONGEST, positions // 2)  # half, because some models do not count positions from 0
    accepted = {*inspect.signature(model.forward).parameters} - without
    special = {*tokenizer.all_special_ids}  # which the tokenizer gathers anew each time
    words = [token for token in range(len(tokenizer)) if token not in special]
    generator = torch.Generator().manual_seed(0)
    for lengths in ((longest, longest // 2), (longest // 3,), (1,), (longest // 4, 2, longest, 1, 5)):
        draws = [torch.randint(len(words), (length,), generator=generator).tolist() for length in lengths]
        texts = [tokenizer.decode([words[draw] for draw in row]) for row in draws]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        yield {name: values.to(model.device) for name, values in inputs.items() if name in accepted}


def _write(model: PreTrainedModel, sample: Batch, outputs: Sequence[str], file: Path) -> int:
    """Write the graph that `model` runs for `sample`, and return the number of floating-point numbers in it."""
    from eckart.onnx import graph_edits  # needs the extra

    with quiet(), _eager_attention(model) as eager, torch.no_grad():  # tracing is slower with gradients
        try:
            program = torch.onnx.export(
                _Positional(model, list(sample)).eval(),
                tuple(sample.values()),
                dynamo=True,
                input_names=list(sample),
                output_names=outputs,
                # some models always use torch's own attention; opset 23 exports it only for as many keys as queries
                opset_version=_DECODER_OPSET if _has_cache(sample) and eager else None,
                dynamic_shapes=(tuple(_dynamic_axes(name, sample) for name in sample),),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause = error.__cause__ or error
            lines = str(cause).strip().splitlines() or [type(cause).__name__]
            reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
            raise ExportError(
                f"torch cannot export a {type(model).__name__}, so only torch itself can run it: {reason}"
            ) from error
    assert program
    graph_edits.strip(program.model)
    if _has_cache(sample):
        graph_edits.add_kept_logits(program.model)
    program.save(file)
    initializers = [value.const_value for value in program.model.graph.initializers.values()]
    return sum(value.size for value in initializers if value is not None and value.dtype.is_floating_point())


def _has_cache(inputs: Batch) -> bool:
    return any(name.startswith(PAST) for name in inputs)


def _dynamic_axes(name: str, sample: Batch) -> dict[int, str]:
    """Return the axes of an input that may have any size, with their names."""
    if name.startswith(PAST):
        return {0: "batch_size", 2: "past_sequence_length"}
    whole = _has_cache(sample) and name == "attention_mask"
    return {0: "batch_size", 1: "total_sequence_length" if whole else "sequence_length"}


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Run attention as matrix products and a softmax while the context is open; yield whether the model supports this.

    Torch's own attention adds nodes for rows without tokens, and these cost time.
    """
    before = model.config._attn_implementation
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", heads) != heads
    try:
        if shared:
            ALL_ATTENTION_FUNCTIONS["eager"] = _grouped_attention
        model.set_attn_implementation("eager")
        yield model.config._attn_implementation == "eager"
    finally:
        model.set_attn_implementation(before)
        if shared:
            del ALL_ATTENTION_FUNCTIONS["eager"]


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute eager attention without copying each key and value for all query heads that share it.

    The queries `(batch, heads, tokens, size)` of heads that share a key are treated as further tokens of one head.
    """
    if scaling is None or any(others.get(name) is not None for name in _SPECIAL_ATTENTION):
        eager: Callable[..., tuple[Tensor, Tensor | None]] = sys.modules[
            type(module).__module__
        ].eager_attention_forward
        return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others)
    rows, heads, tokens, _ = query.shape
    as_rows = (rows, key.shape[1], heads // key.shape[1] * tokens, -1)
    scores = ((query.reshape(as_rows) @ key.mT) * scaling).reshape(rows, heads, tokens, -1)
    shares = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    mixed = (shares.reshape(as_rows) @ value).reshape(rows, heads, tokens, -1)
    return mixed.transpose(1, 2).contiguous(), None


def _compare(
    model: PreTrainedModel, file: Path, sample: Batch, batches: Iterable[Batch], same: bool = True
) -> tuple[int, float]:
    """Compare the outputs of `file` with torch's. Return the number of examples and the largest difference of logits.

    Raises:
        ExportError: onnxruntime cannot run the file, its logits are not finite, or, if they should be the `same`, they
            differ by more than the tolerance and twice torch's own rounding, or predict other classes.
    """
    names = [name for name in sample if not name.startswith(PAST)]
    answer = runner(file, torch.get_num_threads())
    examples, largest = 0, 0.0
    for batch in batches:
        inputs = {name: batch[name].to(model.device) for name in names}
        with torch.no_grad():
            expected = _outputs(model, inputs)
        _check_unread(model, batch, inputs, expected)
        with explained():
            actual = _in_parts(answer, inputs) if _has_cache(sample) else answer(inputs)
        for name, values in expected.items():
            both = _compared(name, values.cpu(), actual[name], inputs)
            wanted, given = without_constants(*both)
            if not given.isfinite().all():
                raise ExportError(f"onnxruntime's outputs are not finite: {file.name} was not written")
            difference = float((wanted - given).abs().max())
            if name != "last_hidden_state" or len(expected) == 1:  # of embeddings, only they are reported
                largest = max(largest, difference)
            if not same:
                continue
            allowed = TOLERANCE * max(1.0, float(wanted.abs().max()))
            # on inputs that the model never saw, onnxruntime may round as badly as torch does
            if not difference <= allowed and not difference <= 2 * _rounding(model, inputs, name):
                raise ExportError(
                    f"onnxruntime's outputs differ from torch's by {difference:.2g}: {file.name} was not written"
                )
            classes = name.endswith("logits")
            of_torch, of_file = (outputs.argmax(-1) for outputs in both)
            if classes and int((of_torch != of_file).sum()) > _TIES * len(wanted):
                raise ExportError(f"onnxruntime predicts other classes than torch: {file.name} was not written")
        examples += len(values)
    return examples, largest


def _check_unread(model: PreTrainedModel, batch: Batch, inputs: Batch, expected: Batch) -> None:
    """Raise ExportError if entries of `batch` that are not among `inputs` change their outputs `expected`."""
    read = inspect.signature(model.forward).parameters.keys() - inputs.keys() - LABELS
    unread = {name: batch[name].to(model.device) for name in batch if name in read}
    if not unread:
        return
    try:
        with torch.no_grad():
            outputs = _outputs(model, {**inputs, **unread})
    except Exception as error:  # the type of the error depends on the model
        raise ExportError(f"a {type(model).__name__} does not run with {', '.join(unread)}: {error}") from error
    for name, values in expected.items():
        given, wanted = without_constants(*_compared(name, outputs[name].cpu(), values.cpu(), inputs))
        if not float((given - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max())):
            raise ExportError(
                f"{', '.join(unread)} would change the outputs, but the graph reads only what the tokenizer returns "
                f"({', '.join(inputs)}): run the model in torch itself"
            )


def _in_parts(answer: Callable[[Batch], dict[str, Tensor]], inputs: Batch) -> dict[str, Tensor]:
    """Run a graph with a cache on half of the tokens, then on the other half with the cache of the first.

    The logits of the last token are computed in a separate run with KEPT, so that the comparison covers this input,
    too.
    """
    half, keep_one = inputs["input_ids"].shape[1] // 2, {KEPT: torch.tensor(1)}
    if not half:
        return {"logits": answer({**inputs, **keep_one})["logits"]}
    first = answer({name: values[:, :half] for name, values in inputs.items()})
    rest = {name: values if name == "attention_mask" else values[:, half:] for name, values in inputs.items()}
    rest |= cache_of(first)
    second, last = answer(rest)["logits"], answer({**rest, **keep_one})["logits"]
    return {"logits": torch.cat([first["logits"], second[:, :-1], last[:, -1:]], 1)}


def _compared(name: str, expected: Tensor, actual: Tensor, inputs: Batch) -> tuple[Tensor, Tensor]:
    """Return the outputs of torch and onnxruntime called `name` as `(predictions, classes)`, without those on padding.

    On padding a model may return anything.
    """
    real = inputs["attention_mask"].cpu() == 1 if "attention_mask" in inputs else None
    if expected.dim() == 3:  # one prediction for each token
        return (expected.flatten(0, 1), actual.flatten(0, 1)) if real is None else (expected[real], actual[real])
    if name.endswith("_logits") and real is not None:  # one prediction for each text, whose classes are its tokens
        return expected.where(real, expected.min()), actual.where(real, expected.min())
    return expected, actual


def _rounding(model: PreTrainedModel, inputs: Batch, name: str) -> float:
    """Return the largest difference between the model's logits and its logits in float64."""
    on_cpu, copy = {key: values.cpu() for key, values in inputs.items()}, deepcopy(model).cpu()
    with torch.no_grad():
        own = _outputs(copy, on_cpu)[name]
        exact = _outputs(copy.double(), on_cpu)[name]
    wanted, given = without_constants(*_compared(name, exact, own.double(), on_cpu))
    return float((wanted - given).abs().max())


def _move(written: Path, file: Path) -> None:
    """Move `written` to `file`, together with its weights if they are in a separate file.

    Two files cannot be replaced at once. Until both are replaced, `file` does not exist, so that it is never read with
    the weights of another graph.
    """
    weights, old = weights_of(written), weights_of(file)
    if weights.exists() or old.exists():
        file.unlink(missing_ok=True)
        old.unlink(missing_ok=True)
    if weights.exists():
        weights.replace(old)
    written.replace(file)
