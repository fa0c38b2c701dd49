"""Export a model as ONNX, once onnxruntime gives the outputs that torch gives. Needs the extra `onnx`.

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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eckart.calibration.losses import Batch
from eckart.onnx.int8 import quantize
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
"""Largest difference of two logits, ÷ the largest logit of the batch where that is above 1."""

_TIES = 1e-3  # share of predictions that may be another class: of thousands of tokens, some have two as likely
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LONGEST = 64  # tokens of a random text
_SPECIAL_ATTENTION = ("softcap", "s_aux", "position_bias")  # arguments of attention that only a model's own code knows
_DECODER_OPSET = 23  # has nodes for rotary embeddings and RMS norms, which are seven nodes each before it


@dataclass(frozen=True)
class Exported:
    """The file that was written, and how near its outputs are to torch's.

    Attributes:
        parameters: floating-point numbers in the file.
        rows: examples on which both were compared.
        difference: the largest difference of two logits.
    """

    parameters: int
    bytes: int
    rows: int
    difference: float


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path | str,
    batches: Iterable[Batch] = (),
    int8: bool = False,
    calibration: Iterable[Batch] = (),
) -> Exported:
    """Write `model` as ONNX, with the tokenizer's outputs as inputs, `(batch, tokens)`, for any batch size and length.

    The outputs are `logits`: `(batch, classes)`, or `(batch, tokens, classes)` for token classification and causal
    language models; or for question answering `start_logits` and `end_logits`, `(batch, tokens)`.

    The graph of a causal language model has the cache as inputs `past_key_values.N.key` and `.value`, `(batch, heads,
    past, size)`, where past is 0 before the first token, and as outputs `present.N.key` and `.value`, `(batch, heads,
    past + tokens, size)`. Its `attention_mask` is `(batch, past + tokens)`; examples may be padded on either side. The
    optional input `num_logits_to_keep` asks for the logits of so many last tokens; 0: of all. Caches of another kind
    (Mamba's states) are left out, and with them this input.

    The model is put into eval mode. `file` is written as a whole, and only after onnxruntime has given torch's outputs
    for texts of several lengths and for `batches`, padding aside. Above 2 GB the weights are in `FILE.data` beside it.

    Args:
        model: in float32, with a head that gives logits.
        batches: more inputs to compare on, each `(batch, tokens)`; names that are no input are ignored.
        int8: quantize the weights by `quantize`; the outputs may then differ.
        calibration: typical inputs to quantize by; none: random texts.

    Raises:
        ExportError: a package is missing, the model cannot be exported, or the outputs differ.
    """
    if model.config.is_encoder_decoder and model.can_generate():
        raise ExportError(
            f"a {type(model).__name__} writes with an encoder, a decoder and its cache, which are more than one graph: "
            "load it here and give it to optimum.exporters.onnx.onnx_export_from_model"
        )
    if missing := [name for name in _PACKAGES if not find_spec(name)]:
        raise ExportError(f"{', '.join(missing)} not installed: pip install 'eckart[onnx]'")
    if model.dtype != torch.float32:
        raise ExportError(f"the model is in {model.dtype}, which few runtimes know: load it with dtype=torch.float32")
    file = Path(file)
    model.eval()
    texts = list(_random_texts(model, tokenizer))
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent) as folder:
        written = Path(folder) / file.name
        sample = _with_cache(model, texts[0])
        parameters = _write(model, sample, written)
        compared = [*texts, *batches]
        rows, difference = _compare(model, written, sample, compared)
        if int8:
            exact, written = written, Path(folder) / "int8" / file.name
            written.parent.mkdir()
            quantize(exact, written, list(calibration) or texts)
            rows, difference = _compare(model, written, sample, compared, same=False)
        size = sum(part.stat().st_size for part in written.parent.iterdir())
        _move(written, file)
    return Exported(parameters, size, rows, difference)


class _Logits(nn.Module):
    """Runs a model on tensors in a fixed order."""

    def __init__(self, model: PreTrainedModel, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(_outputs(self.model, dict(zip(self.names, values, strict=True))).values())


def _outputs(model: PreTrainedModel, inputs: Batch) -> dict[str, Tensor]:
    """Return those of OUTPUTS that the model has and, where the inputs hold a cache, the new cache."""
    past = [values for name, values in inputs.items() if name.startswith(PAST)]
    given: dict[str, Any] = {name: values for name, values in inputs.items() if not name.startswith(PAST)}
    accepted = inspect.signature(model.forward).parameters
    if (
        model.can_generate() and "attention_mask" in given and "position_ids" in accepted
    ):  # counted from where each text begins, as `generate` does
        positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        given["position_ids"] = positions[:, past[0].shape[2] if past else 0 :]
    cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True))) if past else None
    outputs = model(**given, **({"past_key_values": cache, "use_cache": True} if cache else {}))
    logits = {name: outputs[name] for name in OUTPUTS if name in outputs}
    return logits | (_cached(cache, PRESENT) if cache else {})


def _cached(cache: DynamicCache, name: str) -> dict[str, Tensor]:
    """Return the keys and values of each layer, `(batch, heads, tokens, size)`."""
    layers = enumerate(cache.layers)
    return {
        f"{name}{number}.{part}": getattr(layer, f"{part}s") for number, layer in layers for part in ("key", "value")
    }


def _with_cache(model: PreTrainedModel, inputs: Batch) -> dict[str, Tensor]:
    """Return the inputs with a cache of some earlier tokens, if the model keeps keys and values."""
    accepted = inspect.signature(model.forward).parameters
    if not (model.can_generate() and "past_key_values" in accepted and "attention_mask" in inputs):
        return dict(inputs)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values  # training leaves it off in the config
    if not isinstance(cache, DynamicCache) or not all(type(layer) is DynamicLayer for layer in cache.layers):
        return dict(inputs)
    past = {name: values[:, :, : values.shape[2] // 3] for name, values in _cached(cache, PAST).items()}
    mask = inputs["attention_mask"]
    seen = mask.new_ones(len(mask), next(iter(past.values())).shape[2])
    return {**inputs, "attention_mask": torch.cat([seen, mask], 1), **past}


def _random_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Tensor]]:
    """Yield batches of random texts: a padded one, single texts down to one word, and a larger padded one."""
    positions = getattr(model.config, "max_position_embeddings", None) or 2 * _LONGEST
    longest = min(_LONGEST, positions // 2)  # half, as some models do not count positions from 0
    accepted = inspect.signature(model.forward).parameters
    words = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    generator = torch.Generator().manual_seed(0)
    for lengths in ((longest, longest // 2), (longest // 3,), (1,), (longest // 4, 2, longest, 1, 5)):
        draws = [torch.randint(len(words), (length,), generator=generator).tolist() for length in lengths]
        texts = [tokenizer.decode([words[draw] for draw in row]) for row in draws]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        yield {name: values.to(model.device) for name, values in inputs.items() if name in accepted}


def _write(model: PreTrainedModel, sample: Batch, file: Path) -> int:
    """Write the graph that `model` runs for `sample`; return how many floating-point numbers it holds."""
    with torch.no_grad():
        outputs = list(_outputs(model, sample))
    if not outputs:
        raise ExportError(f"a {type(model).__name__} gives no logits: load it with the head of a task")
    with quiet(), _eager_attention(model) as eager, torch.no_grad():  # to follow a backward pass takes longer
        try:
            program = torch.onnx.export(
                _Logits(model, list(sample)).eval(),
                tuple(sample.values()),
                dynamo=True,
                input_names=list(sample),
                output_names=outputs,
                # some models have torch's own attention alone, which opset 23 has for as many keys as queries
                opset_version=_DECODER_OPSET if _has_cache(sample) and eager else None,
                dynamic_shapes=(tuple(_dynamic_axes(name, sample) for name in sample),),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ExportError(
                f"torch cannot export a {type(model).__name__}, which only torch itself can run: {reason}"
            ) from error
    assert program
    _store_tables_by_rows(program.model.graph)
    _strip(program.model)
    if _has_cache(sample):
        _add_kept_logits(program.model)
    program.save(file)
    initializers = [value.const_value for value in program.model.graph.initializers.values()]
    return sum(value.size for value in initializers if value is not None and value.dtype.is_floating_point())


def _has_cache(inputs: Batch) -> bool:
    return any(name.startswith(PAST) for name in inputs)


def _add_kept_logits(model: Any) -> None:
    """Add the optional input KEPT: for how many last tokens to compute logits; 0: for all.

    The head is half of a small language model's work on a prompt, of which generation needs the last token's logits
    alone. A graph whose logits are a sum of products stays as it is.
    """
    import onnx_ir as ir

    (logits,) = (value for value in model.graph.outputs if value.name == "logits")
    product = logits.producer()
    while product.op_type != "MatMul":  # nodes that bound or scale logits
        makers = [value.producer() for value in product.inputs if value is not None]
        computed = [maker for maker in makers if maker is not None and maker.op_type != "Constant"]
        if len(computed) != 1:
            return
        (product,) = computed
    count = ir.Value(name=KEPT, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    count.const_value = ir.tensor(0, dtype=ir.DataType.INT64, name=KEPT)  # an initializer is an input's default
    one, end = (
        ir.Value(name=f"{KEPT}.{name}", const_value=ir.tensor([number], name=f"{KEPT}.{name}"))
        for name, number in (("one", 1), ("end", torch.iinfo(torch.int64).max))
    )
    negative = ir.node("Neg", [count])
    start = ir.node("Reshape", [negative.outputs[0], one])
    last = ir.node("Slice", [product.inputs[0], start.outputs[0], end, one])
    model.graph.insert_before(product, [negative, start, last])
    product.replace_input_with(0, last.outputs[0])
    model.graph.inputs.append(count)
    for value in (count, one, end):
        model.graph.register_initializer(value)
    rows, _, classes = logits.shape
    logits.shape = ir.Shape([rows, "kept", classes])


def _store_tables_by_rows(graph: Any) -> None:
    """Transpose each stored weight that embeddings are looked up in, so that a lookup needs no transposed copy of it.

    Products with the same weight transpose it back.
    """
    import onnx_ir as ir

    for value in list(graph.initializers.values()):
        transposes = [node for node in value.consumers() if node.op_type == "Transpose"]
        lookups = [use for node in transposes for use in node.outputs[0].uses()]
        others = [(user, place) for user, place in value.uses() if user not in transposes]
        if not lookups or any(user.op_type != "Gather" or place for user, place in lookups):
            continue
        if len(value.const_value.shape) != 2 or any(node.outputs[0].is_graph_output() for node in transposes):
            continue
        rows = value.const_value.numpy().T.copy()
        table = ir.Value(name=f"{value.name}.rows", const_value=ir.tensor(rows, name=f"{value.name}.rows"))
        graph.register_initializer(table)
        for node in transposes:
            node.outputs[0].replace_all_uses_with(table)
            graph.remove(node, safe=True)
        for user, place in others:
            back = ir.node("Transpose", [table], {"perm": [1, 0]})
            graph.insert_before(user, back)
            user.replace_input_with(place, back.outputs[0])
        del graph.initializers[value.name]


def _dynamic_axes(name: str, sample: Batch) -> dict[int, str]:
    """Return the axes of an input that may have any size, and their names."""
    if name.startswith(PAST):
        return {0: "batch", 2: "past"}
    return {0: "batch", 1: "past_and_tokens" if _has_cache(sample) and name == "attention_mask" else "tokens"}


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Run attention as products and a softmax; yield whether the model can.

    Torch's own attention adds nodes for rows without tokens, which cost time.
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
    """Compute eager attention without repeating keys and values for each query head that shares them.

    Queries `(batch, heads, tokens, size)` of the heads that share a key are handled as more tokens of one head.
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


def _strip(model: Any) -> None:
    """Remove the exporter's notes: stack traces with paths of this machine, which are larger than the graph.

    Also remove the shapes of all but inputs and outputs: onnx infers them, and a tool that transposes a weight would
    refuse the file for the shape that is noted.
    """
    nodes = list(model.graph.all_nodes())
    values = [value for node in nodes for value in node.outputs]
    for value in (*values, *model.graph.initializers.values()):
        if not value.is_graph_output():
            value.shape = value.type = None
    for part in (model, model.graph, *nodes, *values, *model.graph.inputs, *model.graph.initializers.values()):
        part.metadata_props.clear()


def _compare(
    model: PreTrainedModel, file: Path, sample: Batch, batches: Iterable[Batch], same: bool = True
) -> tuple[int, float]:
    """Return the number of examples and the largest difference of logits; fail unless outputs are the `same`."""
    names = [name for name in sample if not name.startswith(PAST)]
    answer = runner(file, torch.get_num_threads())
    rows, largest = 0, 0.0
    for batch in batches:
        inputs = {name: batch[name].to(model.device) for name in names}
        with torch.no_grad():
            expected = _outputs(model, inputs)
        with explained():
            actual = _in_parts(answer, inputs) if _has_cache(sample) else answer(inputs)
        for name, values in expected.items():
            pair = _compared(name, values.cpu(), actual[name], inputs)
            if not pair[1].isfinite().all():
                raise ExportError(f"onnxruntime's logits are not finite: {file.name} was not written")
            if same:
                difference = _difference(*pair, file.name, partial(_rounding, model, inputs, name))
            else:
                difference = _farthest(*pair)
            largest = max(largest, difference)
        rows += len(values)
    return rows, largest


def _in_parts(answer: Callable[[Batch], dict[str, Tensor]], inputs: Batch) -> dict[str, Tensor]:
    """Run a graph with a cache on half of the tokens, then on the others with the cache of the first half.

    The last token's logits are computed apart, by KEPT, so that this input is compared, too.
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
    """Return two outputs of that name as `(predictions, classes)`, without padding, where a model may give anything."""
    real = inputs["attention_mask"].cpu() == 1 if "attention_mask" in inputs else None
    if expected.dim() == 3:  # a label for each token
        return (expected.flatten(0, 1), actual.flatten(0, 1)) if real is None else (expected[real], actual[real])
    if name != "logits" and real is not None:  # a token is chosen among all
        return expected.where(real, expected.min()), actual.where(real, expected.min())
    return expected, actual


def _farthest(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max())


def _difference(expected: Tensor, actual: Tensor, name: str, rounding: Callable[[], float]) -> float:
    """Return the largest difference of logits `(predictions, classes)`.

    Args:
        rounding: returns how far torch's own logits are from exact ones. It is called where the difference is above the
            tolerance: onnxruntime may round as far as torch does on inputs that the model never saw.

    Raises:
        ExportError: the logits differ by more than that, or predict other classes.
    """
    difference = _farthest(expected, actual)
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    if not difference <= allowed and not difference <= 2 * rounding():  # also where it is nan
        raise ExportError(f"onnxruntime's logits differ from torch's by {difference:.2g}: {name} was not written")
    changed = int((expected.argmax(-1) != actual.argmax(-1)).sum())
    if changed > _TIES * len(expected):
        raise ExportError(f"onnxruntime gives other labels than torch: {name} was not written")
    return difference


def _rounding(model: PreTrainedModel, inputs: Batch, name: str) -> float:
    """Return how far the model's logits are from its logits in float64."""
    on_cpu, copy = {key: values.cpu() for key, values in inputs.items()}, deepcopy(model).cpu()
    with torch.no_grad():
        own = _outputs(copy, on_cpu)[name]
        exact = _outputs(copy.double(), on_cpu)[name]
    return _farthest(*_compared(name, exact, own.double(), on_cpu))


def _move(written: Path, file: Path) -> None:
    """Move a file to `file`, with its weights if they are apart.

    Two files cannot be replaced at once: in between there is none, rather than one with another's weights.
    """
    weights, old = weights_of(written), weights_of(file)
    if weights.exists() or old.exists():
        file.unlink(missing_ok=True)
        old.unlink(missing_ok=True)
    if weights.exists():
        weights.replace(old)
    written.replace(file)
