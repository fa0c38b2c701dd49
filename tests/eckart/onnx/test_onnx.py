"""Export as ONNX: onnxruntime gives torch's outputs for any shape, from as many numbers as the factors have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForQuestionAnswering,
    BertForTokenClassification,
    Cache,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import ModelOutput
from typer.testing import CliRunner

import eckart.onnx.exporting
from eckart.factorization.pivoted_storage import pivot
from eckart.model.experts import is_fused
from eckart.model.hf_format import save
from eckart.model.layers import LowRankLinear, PivotedLinear, factorize_target, low_rank_layers
from eckart.model.lstm import LSTMConfig, LSTMForCausalLM
from eckart.model.targets import find_targets, weight_of
from eckart.onnx import KEPT, ExportError, answer_by, cache_of, export, return_embeddings, runner
from eckart.onnx.exporting import TOLERANCE, Exported, _eager_attention, _move, export_files
from eckart.onnx.int8 import quantize
from eckart.onnx.smoothing import _activations, _maxima, smooth
from flows.cli import app
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import load_split
from tasks.exporting.onnx import to_onnx, to_onnx_folder
from tasks.models.model_io import load
from tasks.nlp_tasks import kind_of
from tests import tiny
from tests.workspace import REPOSITORY, a_task, bert, reviews, run_stage, tiny_tokenizer, tiny_workspace

SHAPES = [(1, 1), (1, 5), (2, 2), (3, 16), (7, 9)]
MADE_UP = 9  # rows that are compared besides those of the test split


def compress(model: PreTrainedModel, stored: str = "factors") -> PreTrainedModel:
    """Factorize every target but the last, as factors or pivots, or with every third row of what the factors leave."""
    for number, target in enumerate(find_targets(model, batch(8, 7)).targets[:-1]):
        tiny.factorize_layer(model, target.name, 1 + number % 3, slice(None, None, 3) if stored == "rows" else None)
    if stored == "pivoted":
        pivot(model)
    return model.eval()


def numbers(file: Path) -> int:
    """Floating-point numbers that the file holds, but for single constants."""
    held = onnx.load(file).graph.initializer
    return sum(int(np.prod(part.dims)) for part in held if part.data_type == onnx.TensorProto.FLOAT and part.dims)


def batch(count: int, longest: int) -> dict[str, torch.Tensor]:
    """Rows of differing lengths, padded to `longest`."""
    inputs = tiny.collate(tiny.samples(count, 1, longest, seed=longest), length=longest)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


class Case(NamedTuple):
    model: PreTrainedModel
    file: Path
    made: Exported


def exported(model: PreTrainedModel, file: Path) -> Case:
    return Case(model, file, export(model, tiny.words(), file))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A compressed classifier and its file."""
    return exported(compress(shallow(tiny.bert)), tmp_path_factory.mktemp("bert") / "m.onnx")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A compressed language model, which rotates keys by their positions, and its file."""
    return exported(compress(shallow(tiny.causal_llama), "pivoted"), tmp_path_factory.mktemp("llama") / "m.onnx")


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A compressed language model in whose second layer tokens attend to the last three tokens, and its file."""
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    qwen = tiny.of("Qwen2ForCausalLM", **tiny.GROUPED, **window)
    return exported(compress(qwen()), tmp_path_factory.mktemp("qwen") / "m.onnx")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A compressed language model with an embedding of positions, and its file. Some components have large factors."""
    model = with_large_components(compress(gpt2_that_writes(), "rows"))
    return exported(model, tmp_path_factory.mktemp("gpt2") / "m.onnx")


def answers(file: Path, output: str = "logits", **inputs: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    empty = {
        name: (len(inputs["input_ids"]), shape[1], 0, shape[3]) for name, shape in shapes.items() if len(shape) == 4
    }
    inputs |= {name: torch.zeros(shape) for name, shape in empty.items()}
    assert output in [value.name for value in session.get_outputs()]
    (actual,) = session.run([output], {name: values.numpy() for name, values in inputs.items()})
    return torch.from_numpy(actual)


@pytest.mark.parametrize("name", ["gpt2", "decoder"])
def test_a_compressed_model_gives_the_same_logits_from_as_many_numbers(
    name: str, request: pytest.FixtureRequest
) -> None:
    model, file, made = request.getfixturevalue(name)
    for count, longest in SHAPES:
        inputs = batch(count, longest)
        real = inputs["attention_mask"] == 1
        actual, expected = answers(file, **inputs)[real], tiny.logits(model, inputs)[real]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    buffers = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
    identities = sum(layer.rank**2 for layer in model.modules() if isinstance(layer, PivotedLinear))
    tied = model.get_input_embeddings().weight.numel()  # a small one is stored transposed, too
    assert 0 <= numbers(file) - model.num_parameters() - tied <= buffers + identities
    assert 0 <= made.parameters - numbers(file) < 100  # constants of the graph
    assert made.bytes == file.stat().st_size
    assert made.difference < TOLERANCE
    for machine_path in (str(REPOSITORY), "site-packages", sys.prefix, ".py"):  # of the machine that made it
        assert machine_path.encode() not in file.read_bytes(), machine_path


def test_onnxruntime_quantizes_the_plain_export(encoder: Case, tmp_path: Path) -> None:
    """A user's `quantize_dynamic` refuses a file whose shapes contradict those that it infers."""
    quantize_dynamic(encoder[1], tmp_path / "other.onnx", weight_type=QuantType.QInt8)
    for count, longest in SHAPES:
        assert answers(tmp_path / "other.onnx", **batch(count, longest)).shape == (count, tiny.LABELS)


def integer_products(file: Path) -> int:
    """Products in int8 that the file has."""
    return sum(node.op_type == "MatMulInteger" for node in onnx.load(file).graph.node)


def test_layers_of_rows_alone_are_written_in_int8(tmp_path: Path) -> None:
    """As movement pruning leaves them: with no factors, and with rows in some targets only."""
    model, inputs = tiny.bert(), batch(3, 9)
    for number, target in enumerate(find_targets(model, batch(8, 7)).targets):
        weight = weight_of(model.get_submodule(target.name)).clone()
        layer = factorize_target(model, target.name, weight[:, :0], weight[:0], weight)
        assert isinstance(layer, LowRankLinear)
        layer.keep_rows(slice(5 * (number % 2)))
    expected = tiny.logits(model.eval(), inputs)
    plain, int8 = tmp_path / "model.onnx", tmp_path / "int8.onnx"
    export_files(model, tiny.words(), (plain, int8), [inputs])
    for file, limit in ((plain, 1e-5), (int8, 0.05)):
        actual = answers(file, **inputs)
        assert abs(actual - expected).max() < limit * abs(expected).max()


def test_int8_gives_nearly_the_same_logits(tmp_path: Path) -> None:
    model = compress(shallow(tiny.bert))
    made = export(model, tiny.words(), tmp_path / "int8.onnx", [batch(3, 9)], int8=True)
    assert made.examples == MADE_UP + 3
    assert made.bytes == (tmp_path / "int8.onnx").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["int8.onnx"]
    assert integer_products(tmp_path / "int8.onnx") >= len(find_targets(model, batch(8, 7)).targets)
    inputs = batch(4, 16)
    expected, actual = tiny.logits(model, inputs), answers(tmp_path / "int8.onnx", **inputs)
    assert 0 < float((actual - expected).norm()) < 0.05 * float(expected.norm())
    assert made.difference < 0.1 * float(expected.abs().max())


def test_a_channel_unseen_in_calibration_does_not_fill_the_range(tmp_path: Path) -> None:
    """A channel after a Relu was 0 in all examples: divided by almost nothing, it would leave the others no steps."""
    draw = np.random.default_rng(0)
    first, second = np.eye(8, dtype=np.float32), draw.standard_normal((8, 6), dtype=np.float32)
    float32, ids = onnx.TensorProto.FLOAT, "input_ids"  # as a runner asks for
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", [ids, "first"], ["made"]),
            onnx.helper.make_node("Relu", ["made"], ["read"]),
            onnx.helper.make_node("MatMul", ["read", "second"], ["logits"]),
        ],
        "relu",
        [onnx.helper.make_tensor_value_info(ids, float32, ["rows", 8])],
        [onnx.helper.make_tensor_value_info("logits", float32, ["rows", 6])],
        [onnx.numpy_helper.from_array(first, "first"), onnx.numpy_helper.from_array(second, "second")],
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "model.onnx",
    )
    seen, new = (torch.from_numpy(draw.random((50, 8), dtype=np.float32)) for _ in range(2))
    seen[:, 0] *= -1
    quantize(tmp_path / "model.onnx", tmp_path / "int8.onnx", [{ids: seen}])
    expected, actual = (runner(tmp_path / f"{name}.onnx")({ids: new})["logits"] for name in ("model", "int8"))
    assert float((actual - expected).norm()) < 0.05 * float(expected.norm())


def with_large_components(model: PreTrainedModel) -> PreTrainedModel:
    """Scale the factors of each layer so that its first component is a thousand times as large between them."""
    with torch.no_grad():
        for layer in low_rank_layers(model).values():
            layer.right.weight[0] *= 1000
            layer.left.weight[:, 0] /= 1000
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_smoothing_keeps_the_outputs_and_evens_the_channels(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Also where the embedding is factorized, and a norm has no bias."""
    if family == "gpt2":
        model, file, _ = request.getfixturevalue("gpt2")
    else:
        model = compress(shallow(tiny.llama))
        tiny.factorize_layer(model, "model.embed_tokens", 5)
        model, file, _ = exported(with_large_components(model), tmp_path / "model.onnx")
    even, rows = tmp_path / "smooth.onnx", [batch(8, 16)]
    smooth(file, even, rows)
    for count, longest in SHAPES:
        inputs = batch(count, longest)
        torch.testing.assert_close(answers(even, **inputs), answers(file, **inputs), rtol=1e-4, atol=1e-5)
    assert [node.op_type for node in onnx.load(even).graph.node] == [
        node.op_type for node in onnx.load(file).graph.node
    ]
    large, even_ones = (spread(path, rows, tmp_path) for path in (file, even))
    assert len(large) >= len(low_rank_layers(model))
    assert max(even_ones.values()) < 100 < max(large.values())


def spread(file: Path, rows: Sequence[Mapping[str, torch.Tensor]], folder: Path) -> dict[str, float]:
    """Return activation → its largest channel ÷ the median one, for activations that can be smoothed."""
    activations = _activations(onnx_ir.load(file).graph)
    maxima = _maxima(file, folder / "maxima.onnx", activations, rows)
    return {name: float(values.max() / values.median()) for name, values in maxima.items()}


def test_a_model_is_scored_by_onnxruntime(encoder: Case) -> None:
    model, frame = deepcopy(encoder[0]), reviews()
    frame = frame.assign(label=(frame["label"] == "positive").astype(int))
    kind = kind_of(a_task("classification", ["negative", "positive"], "accuracy"))
    own = kind.score(model, tiny_tokenizer(), frame, 7, "test")
    answer_by(model, runner(encoder[1], threads=1))
    model.classifier.weight.data.zero_()  # torch would say something else
    actual = kind.score(model, tiny_tokenizer(), frame, 7, "test")
    assert actual.score.metrics == own.score.metrics
    assert actual.score.loss == pytest.approx(own.score.loss, rel=1e-5)


def shallow(
    like: Callable[[], PreTrainedModel], family: type[PreTrainedModel] | None = None, **changes: object
) -> PreTrainedModel:
    """Return a model with the config of `like` but one layer, as each takes the exporter a second, and `changes`."""
    model = like()
    model.config.update({"num_hidden_layers": 1, **changes})
    return tiny.drawn(family or type(model), model.config)


@pytest.mark.parametrize(
    ("family", "names", "beside"),
    [
        (BertForTokenClassification, ("logits",), True),
        (BertForQuestionAnswering, ("start_logits", "end_logits"), False),
    ],
)
def test_heads_with_outputs_for_each_token_give_the_same_but_at_padding(
    family: type[PreTrainedModel], names: tuple[str, ...], beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the weights are too large for one file, and stand in another beside it."""
    if beside:
        monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    model, file = compress(shallow(tiny.bert, family, num_labels=2)), tmp_path / "new" / "model.onnx"
    made = export(model, tiny.words(), file, [batch(3, 9)])
    assert {path.name for path in file.parent.iterdir()} == {"model.onnx", *(["model.onnx.data"] if beside else [])}
    assert made.bytes == sum(path.stat().st_size for path in file.parent.iterdir())
    assert made.examples == MADE_UP + 3
    assert [value.name for value in onnx.load(file).graph.output] == list(names)
    for count, longest in SHAPES:
        inputs = batch(count, longest)
        real = inputs["attention_mask"] == 1
        with torch.no_grad():
            expected = model(**inputs)
        for name in names:
            actual = answers(file, name, **inputs)
            torch.testing.assert_close(actual[real], expected[name][real], rtol=0, atol=1e-5)


def test_a_model_without_a_head_gives_its_states_and_the_embeddings_pooled_from_them(tmp_path: Path) -> None:
    model, file = shallow(lambda: tiny.bert().base_model).eval(), tmp_path / "model.onnx"
    return_embeddings(model, "mean")
    export(model, tiny.words(), file)
    for count, longest in SHAPES:
        inputs = batch(count, longest)
        real = inputs["attention_mask"] == 1
        with torch.no_grad():
            expected = model(**inputs)
        found = runner(file)(inputs)
        for name, places in (("last_hidden_state", real), ("sentence_embedding", slice(None))):
            torch.testing.assert_close(found[name][places], expected[name][places], rtol=0, atol=1e-5)


def gpt2_that_writes(vocabulary: int = tiny.VOCABULARY) -> PreTrainedModel:
    return shallow(tiny.gpt2, GPT2LMHeadModel, vocab_size=vocabulary, use_cache=False)  # training leaves no cache


def token_by_token(file: Path, inputs: Mapping[str, torch.Tensor], prompt: int) -> tuple[torch.Tensor, int]:
    """Return logits of a prompt and of each later token by the cache, and how many numbers the cache has in the end."""
    answer, past, actual = runner(file, threads=1), dict[str, torch.Tensor](), []
    length = inputs["input_ids"].shape[1]
    for start, end in [(0, prompt), *((place, place + 1) for place in range(prompt, length))]:
        mask = inputs["attention_mask"][:, :end]
        made = answer({"input_ids": inputs["input_ids"][:, start:end], "attention_mask": mask, **past})
        past = cache_of(made)
        actual.append(made["logits"])
    return torch.cat(actual, 1), sum(values.numel() for values in past.values())


def assert_same_without_cache(
    model: PreTrainedModel, file: Path, inputs: Mapping[str, torch.Tensor], prompt: int
) -> int:
    """Assert that token by token, the graph gives the logits that torch gives at once; return what the cache holds."""
    actual, kept = token_by_token(file, inputs, prompt)
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(actual[real], tiny.logits(model, inputs)[real], rtol=0, atol=1e-5)
    return kept


@pytest.mark.parametrize("name", ["decoder", "sliding", "gpt2"])
def test_a_decoder_with_a_cache_gives_torchs_logits_without_one(name: str, request: pytest.FixtureRequest) -> None:
    """For keys that are rotated by their positions, also beyond a sliding window, and for an embedding of positions."""
    model, file, _ = request.getfixturevalue(name)
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    size = model.config.hidden_size // model.config.num_attention_heads
    for side, prompt in product(["left", "right"], [1, 4]):
        inputs = tiny.collate(tiny.samples(3, 2, 8, seed=1), length=9, side=side)
        del inputs["labels"]
        kept = assert_same_without_cache(model, file, inputs, prompt)
        assert kept == 2 * 3 * heads * 9 * size * model.config.num_hidden_layers  # keys and values


@dataclass
class WithCache(ModelOutput):
    logits: torch.Tensor | None = None
    cache: Cache | None = None


class RenamedCache(LlamaForCausalLM):
    """A model of which argument and output are named `cache`, as in all models since transformers 5.24."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> WithCache:
        found = super().forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache, **others)
        return WithCache(found.logits, found.past_key_values)


def test_the_cache_is_found_by_its_new_name(tmp_path: Path) -> None:
    model = RenamedCache(shallow(tiny.causal_llama).config).eval()
    export(model, tiny.words(), tmp_path / "model.onnx")
    assert assert_same_without_cache(model, tmp_path / "model.onnx", batch(3, 9), 4)


def roberta_that_writes() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return tiny.build("RobertaForCausalLM", vocab_size=tiny.VOCABULARY, pad_token_id=tiny.PAD, is_decoder=True, **sizes)


def bart_that_writes() -> PreTrainedModel:
    """Its config still has the layers of an encoder, more than the decoder has."""
    layers = {"encoder_layers": 2, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    return tiny.build("BartForCausalLM", vocab_size=tiny.VOCABULARY, pad_token_id=tiny.PAD, d_model=16, **layers)


@pytest.mark.parametrize("make", [roberta_that_writes, bart_that_writes])
def test_a_decoder_of_an_encoders_family_counts_positions_as_its_own_forward(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = make().eval()
    export(model, tiny.words(), tmp_path / "model.onnx")
    assert_same_without_cache(model, tmp_path / "model.onnx", batch(3, 9), 4)


def test_a_decoder_gives_logits_of_so_many_last_tokens(decoder: Case) -> None:
    answer, inputs = runner(decoder[1]), batch(3, 9)
    whole = answer(inputs)["logits"]
    for asked, given in ((0, 9), (1, 1), (4, 4), (9, 9)):
        torch.testing.assert_close(answer({**inputs, KEPT: torch.tensor(asked)})["logits"], whole[:, 9 - given :])


def test_a_head_that_sums_products_gives_logits_of_all_tokens(tmp_path: Path) -> None:
    """With a residual beside the factors the file gives torch's logits, and has no input for their number.

    The model always runs torch's own attention.
    """
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "multi_query": True, "alibi": False}
    model, file = tiny.of("FalconForCausalLM", **sizes, tie_word_embeddings=False)(), tmp_path / "model.onnx"
    tiny.factorize_layer(model, "lm_head", 2, slice(None, None, 3))
    export(model, tiny.words(), file)
    assert runner(file)({**batch(3, 9), KEPT: torch.tensor(1)})["logits"].shape[1] == 9


def test_a_mixture_whose_experts_share_a_tensor_is_exported(tmp_path: Path) -> None:
    """Other tokens go to other experts; the model itself stays as it is."""
    model, file = tiny.mixtral()[0].eval(), tmp_path / "model.onnx"
    model.config.pad_token_id = None
    export(model, tiny.words(), file)
    assert any(map(is_fused, model.modules()))
    inputs = batch(3, 9)
    given = runner(file)({**inputs, KEPT: torch.tensor(9)})["logits"]
    text = inputs["attention_mask"] != 0
    torch.testing.assert_close(given[text], tiny.logits(model, inputs)[text], rtol=1e-3, atol=1e-4)


def test_attention_with_shared_keys_suits_a_model_that_views_its_outputs() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24, "kv_channels": 4, **tiny.LENGTH}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = tiny.of("JetMoeForCausalLM", **sizes, **experts)().eval()
    assert model.config.num_attention_heads == 4
    expected = tiny.logits(model, batch(3, 9))
    with _eager_attention(model):
        torch.testing.assert_close(tiny.logits(model, batch(3, 9)), expected, rtol=1e-4, atol=1e-5)


def test_shared_keys_are_repeated_only_where_scores_are_bounded(decoder: Case, tmp_path: Path) -> None:
    """Otherwise keys and values of the whole past would be copied for each query head, with each token."""
    model = shallow(tiny.of("Gemma2ForCausalLM", **tiny.GROUPED, head_dim=4))  # bounds its scores
    export(model, tiny.words(), tmp_path / "model.onnx")
    bounded, free = (
        sum(node.op_type == "Expand" for node in onnx.load(file).graph.node)
        for file in (tmp_path / "model.onnx", decoder[1])
    )
    assert bounded > free


def test_an_int8_decoder_with_a_cache_gives_nearly_the_same_logits(decoder: Case, tmp_path: Path) -> None:
    """Nearly, because the rounding of activations depends on what else is in the batch."""
    model, file = decoder[0], tmp_path / "int8.onnx"
    quantize(decoder[1], file, [batch(8, 16)])
    inputs = batch(3, 9)
    real, expected = inputs["attention_mask"] == 1, tiny.logits(model, inputs)
    actual, _ = token_by_token(file, inputs, 4)
    assert 0 < float((actual - expected)[real].norm()) < 0.1 * float(expected[real].norm())


def test_a_tied_weight_is_stored_once_and_multiplied_in_int8(tmp_path: Path) -> None:
    """Otherwise the whole weight would become float32 with each token. Smaller weights are stored transposed, too."""
    model, file = gpt2_that_writes(vocabulary=20_000), tmp_path / "int8.onnx"
    table = model.get_input_embeddings().weight
    assert table is model.get_output_embeddings().weight
    export(model, tiny.words(), file, int8=True)
    graph = onnx.load(file).graph
    of_integers = [list(part.dims) for part in graph.initializer if part.data_type == onnx.TensorProto.INT8]
    assert of_integers.count(list(table.shape)) == 1
    assert list(table.shape)[::-1] not in of_integers
    makers = {name: node for node in graph.node for name in node.output}
    assert not any(node.op_type == "DequantizeLinear" for node in graph.node)
    assert makers["logits"].op_type == "Mul"
    assert numbers(file) < table.numel()


def test_a_model_that_torch_itself_rounds_far_is_exported(tmp_path: Path) -> None:
    """Features behind a layer norm sum to zero: of a weight that is the same for all only rounding is left."""
    model = shallow(tiny.bert, BertForTokenClassification)
    model.bert.encoder.layer[-1].output.LayerNorm.reset_parameters()
    nn.init.constant_(model.classifier.weight, 1e8)
    model.classifier.bias.data = torch.tensor([0.0, 1e4, 0.0])
    assert export(model, tiny_tokenizer(), tmp_path / "model.onnx").difference > TOLERANCE * 1e4


def lstm() -> PreTrainedModel:
    return LSTMForCausalLM(LSTMConfig(vocab_size=tiny.VOCABULARY, embedding_size=8, hidden_size=8, pad_token_id=0))


def t5() -> PreTrainedModel:
    config = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (t5, r"\bT5ForConditionalGeneration .*optimum\.exporters\.onnx\.onnx_export_from_model"),
        (lstm, r"\bLSTMForCausalLM\b"),
        (tiny.ARCHITECTURES["mamba"].build, r"\bMambaForSequenceClassification\b.*in torch"),
        (tiny.of("BertForPreTraining"), r"^a BertForPreTraining "),
        (tiny.of("BigBirdForMaskedLM", **tiny.LAYERS), r"\bBigBirdForMaskedLM\b.*attention_type"),
        (tiny.of("BertForMultipleChoice", **tiny.LAYERS), r"\bBertForMultipleChoice\b.*texts"),
    ],
    ids=[
        "encoder and decoder",
        "loop over tokens",
        "loop that takes minutes to trace",
        "two heads of other names",
        "sparse attention",
        "several texts in an example",
    ],
)
def test_models_that_cannot_be_exported_are_refused(
    make: Callable[[], PreTrainedModel], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExportError, match=said):
        export(make(), tiny.words(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    assert "def forward" not in capfd.readouterr().err  # the graph that the exporter gave up on


def test_inputs_that_the_tokenizer_does_not_return_are_refused_if_they_matter(tmp_path: Path) -> None:
    """LayoutLM also reads where on the page words stand."""
    model, inputs = shallow(tiny.of("LayoutLMForTokenClassification", **tiny.LAYERS, **tiny.LENGTH)), batch(3, 9)
    file, nowhere = tmp_path / "model.onnx", torch.zeros(3, 9, 4, dtype=torch.long)
    export(model, tiny.words(), file, [{**inputs, "bbox": nowhere}])
    with pytest.raises(ExportError, match="bbox"):
        export(model, tiny.words(), file, [{**inputs, "bbox": nowhere + 5}])


def test_the_graph_reads_no_token_types_where_the_batches_have_none(tmp_path: Path) -> None:
    """GPT-2 with BERT's tokenizer: it would add the embedding of word 0 to all tokens."""
    tokenizer = tiny_tokenizer()
    model = gpt2_that_writes(len(tokenizer)).eval()
    inputs = {**tokenizer(["the plot is dull"], return_tensors="pt")}
    del inputs["token_type_ids"]
    export(model, tokenizer, tmp_path / "model.onnx", [inputs])
    expected = model(**inputs).logits
    torch.testing.assert_close(answers(tmp_path / "model.onnx", **inputs), expected, rtol=0, atol=1e-4)


def test_an_embedding_of_a_text_is_an_output(tmp_path: Path) -> None:
    """The projection of CLIP's text model."""
    model = shallow(tiny.of("CLIPTextModelWithProjection", **tiny.LAYERS, projection_dim=8, eos_token_id=1))
    export(model, tiny.words(), tmp_path / "model.onnx")
    inputs = batch(3, 9)
    inputs["input_ids"][range(3), inputs["attention_mask"].sum(1) - 1] = 1  # the token whose state is projected
    expected = model(**inputs).text_embeds
    torch.testing.assert_close(answers(tmp_path / "model.onnx", "text_embeds", **inputs), expected, rtol=0, atol=1e-5)


def test_a_tokenizer_without_padding_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny.words()
    tokenizer.pad_token = None
    with pytest.raises(ExportError, match="pad_token"):
        export(bert(num_hidden_layers=1), tokenizer, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_large_weights_are_moved_with_their_file(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "new" / "model.onnx"
    target.parent.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (target.parent / name).write_text("older")
    source.write_text("without")
    _move(source, target)
    assert [path.name for path in target.parent.iterdir()] == ["model.onnx"]
    assert target.read_text() == "without"


def test_other_labels_are_an_error_and_the_older_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels change where logits hardly do, as after an export that went wrong."""
    file, model = tmp_path / "model.onnx", bert(num_hidden_layers=1)
    file.write_text("older")
    model.classifier.weight.data *= 1e-6
    right = eckart.onnx.exporting._Positional.forward
    monkeypatch.setattr(
        eckart.onnx.exporting._Positional,
        "forward",
        lambda *values: tuple(logits.flip(-1) for logits in right(*values)),
    )
    with pytest.raises(ExportError, match=r"model\.onnx"):
        export(model, tiny_tokenizer(), file)
    assert file.read_text() == "older"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with test examples and one candidate."""
    monkeypatch.chdir(tiny_workspace(tmp_path))
    run_stage("extract")
    model = bert(num_hidden_layers=1)
    inputs = tiny_tokenizer()(["the plot is dull", "the cast"], padding=True, return_tensors="pt")
    save(tiny.factorize(model, inputs, lambda _: 4), Path("models/finetuned/svd-0.5"))
    tiny_tokenizer().save_pretrained("models/finetuned/svd-0.5")
    return tmp_path


def test_the_command_exports_a_candidate_and_reports_it(workspace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["export", "svd-0.5", "served/model.onnx"])
    assert result.exit_code == 0, result.output
    assert result.stderr == capfd.readouterr().err == ""
    model, tokenizer = load(Path("models/finetuned/svd-0.5"), AutoModelForSequenceClassification)
    size = (workspace / "served/model.onnx").stat().st_size / 1e6
    assert result.stdout.startswith(f"served/model.onnx: {numbers(workspace / 'served/model.onnx') // 1000},")
    assert f"{size:.1f} MB" in result.stdout
    assert f"On {12 + MADE_UP} examples" in result.stdout  # all of the test split
    graph = onnx.load(workspace / "served/model.onnx").graph
    shapes = {value.name: [side.dim_param for side in value.type.tensor_type.shape.dim] for value in graph.input}
    assert shapes == {
        name: ["batch_size", "sequence_length"] for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    assert [value.name for value in graph.output] == ["logits"]
    inputs = tokenizer(load_split("test")["text"].tolist(), padding=True, return_tensors="pt")
    torch.testing.assert_close(
        answers(workspace / "served/model.onnx", **inputs), tiny.logits(model, inputs), rtol=0, atol=1e-5
    )


@pytest.mark.usefixtures("workspace")
def test_a_folder_has_what_optimum_and_transformers_js_look_for() -> None:
    folder = Path("served-0.5")
    cutting = AutoTokenizer.from_pretrained("models/finetuned/svd-0.5")
    cutting.backend_tokenizer.enable_truncation(4)
    cutting.backend_tokenizer.enable_padding(length=6)
    cutting.save_pretrained("models/finetuned/svd-0.5")
    result = CliRunner().invoke(app, ["export", "svd-0.5", str(folder)])
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert not {"quantization_config", "transformers_weights"} & {*config}
    model, tokenizer = load(Path("models/finetuned/svd-0.5"), AutoModelForSequenceClassification)
    inputs = tokenizer(load_split("test")["text"].tolist(), padding=True, return_tensors="pt")
    assert dict(AutoTokenizer.from_pretrained(folder)(load_split("test")["text"].tolist(), padding=True)) == {
        name: values.tolist() for name, values in inputs.items()
    }
    alone = json.loads((folder / "tokenizer.json").read_text())  # as the tokenizers library reads it
    assert alone["truncation"] is alone["padding"] is None
    logits = tiny.logits(model, inputs)
    for file, difference in (("model.onnx", 1e-5), ("model_quantized.onnx", 0.05)):
        torch.testing.assert_close(answers(folder / "onnx" / file, **inputs), logits, rtol=0, atol=difference)
    with pytest.raises(StageError, match="exists"):
        to_onnx_folder("svd-0.5", folder)


@pytest.mark.usefixtures("workspace")
def test_wrong_names_are_errors() -> None:
    for name, file, match in (
        ("svd-0.6", "model.onnx", r"^svd-0\.6 .* svd-0\.5"),
        ("svd-0.5", "model.pt", r"^model\.pt: .*\.onnx"),
        ("svd-0.5", "params.yaml/model.onnx", r"^params\.yaml/model\.onnx "),
    ):
        with pytest.raises(StageError, match=match):
            to_onnx(name, Path(file))
