"""Tiny models of every family, with all weights and biases drawn at random, and batches for them.

`FAMILIES` has three classifiers. `ARCHITECTURES` has one model of each family, with the number of targets that probing
must find in it. `UNUSUAL` has models that read other inputs than ids and a mask, whose labels are not one class for
each example, or whose layers are unusual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eckart.calibration.losses import Objective, mean_loss_times_batch, token_loss
from eckart.calibration.predictions import logits_of
from eckart.factorization.factorize import rest
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm, Weighting
from eckart.model.batches import without_labels
from eckart.model.layers import LowRankLinear, factorize_target, narrowed_like, set_weight
from eckart.model.lstm import LSTMConfig, LSTMForCausalLM
from eckart.model.mamba import MambaConfig, MambaForSequenceClassification
from eckart.model.probing import NO_WORDS
from eckart.model.targets import Target, find_targets, weight_of
from eckart.ranks.search_problem import SearchProblem

Sample = tuple[Tensor, int]
"""Token ids `(tokens,)` and a label."""
Batch = dict[str, Tensor]
VOCABULARY, LABELS, PAD = 30, 3, 0
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LENGTH = {"max_position_embeddings": 32}
GROUPED = {**LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, **LENGTH}


def drawn(family: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model with random parameters, the same in every call.

    No parameter is exactly zero or one, as biases and norms of a new model are, so that tests notice a forgotten bias.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = family(config)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def build(family: str, **options: Any) -> PreTrainedModel:
    """Return a model of the transformers class `family`, whose config has these options."""
    model: type[PreTrainedModel] = getattr(transformers, family)
    return drawn(model, model.config_class(**options))


def of(family: str, **options: Any) -> Callable[[], PreTrainedModel]:
    """Return a function that builds a model of the transformers class `family` for examples as `samples` draws them."""
    everywhere = {"vocab_size": VOCABULARY, "num_labels": LABELS, "pad_token_id": PAD}
    return lambda: build(family, **{**everywhere, **options})


bert = of("BertForSequenceClassification", **{**LAYERS, "intermediate_size": 40}, **LENGTH)
"""BERT: separate linear layers for query, key and value. Dropout is on, as by default."""
gpt2 = of("GPT2ForSequenceClassification", n_positions=32, n_embd=16, n_layer=2, n_head=2)
"""GPT-2: all linear layers are Conv1D, and query, key and value are one layer."""
llama = of("LlamaForSequenceClassification", **GROUPED, tie_word_embeddings=True)
"""LLaMA: two key-value heads for four query heads, no biases."""
causal_llama = of("LlamaForCausalLM", **GROUPED, tie_word_embeddings=True)
"""LLaMA as a language model, whose head is tied to the embedding."""
albert = of("AlbertForSequenceClassification", **{**LAYERS, "num_hidden_layers": 3}, embedding_size=8, **LENGTH)
"""ALBERT: one layer that runs three times."""
phi3 = of("Phi3ForCausalLM", **GROUPED)
"""Phi-3 as a language model: gate and up are one layer, the first and the second half of its outputs."""
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
t5 = of("T5EncoderModel", **T5)
"""T5's encoder, whose blocks read the dtype of their last linear layer's weight before they call this layer."""
FAMILIES = {"bert": bert, "gpt2": gpt2, "llama": llama}


# --- texts and classes -----------------------------------------------------------------------------------------------


def words(**options: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one word for each token id of the tiny models, and with these options.

    It returns ids and a mask but no token types, as tokenizers of decoders do.
    """
    vocabulary = {"<pad>": PAD, "<unk>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", model_input_names=names, **options
    )


def samples(count: int, shortest: int = 2, longest: int = 7, seed: int = 0) -> list[Sample]:
    """Draw random examples of `shortest` to `longest` tokens, none of which is the padding token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(shortest, longest + 1, count).tolist()
    return [(draw(PAD + 1, VOCABULARY, length), int(draw(0, LABELS))) for length in lengths]


def collate(texts: Sequence[Sample], length: int = 0, side: str = "right") -> Batch:
    """Return a batch that is padded on `side` to the longest example, or to `length` if that is longer.

    Positions count from the first token that is not padding.
    """
    length = max(length, *(len(ids) for ids, _ in texts))
    ids = torch.full((len(texts), length), PAD)
    mask = torch.zeros_like(ids)
    for row, (sample, _) in enumerate(texts):
        where = slice(0, len(sample)) if side == "right" else slice(length - len(sample), length)
        ids[row, where], mask[row, where] = sample, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = torch.tensor([label for _, label in texts])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def batches(texts: Sequence[Sample], size: int, length: int = 0, side: str = "right") -> list[Batch]:
    """Return the examples in padded batches of `size` examples."""
    return [collate(texts[start : start + size], length, side) for start in range(0, len(texts), size)]


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("nothing is to be trained or measured")


def search_problem(
    model: Any, targets: Sequence[Target], weighting: Weighting, calibration: Sequence[Batch], keep: float, **more: Any
) -> SearchProblem:
    """Return the input of a rank search that trains nothing and takes all batches of `calibration`."""
    given: dict[str, Any] = {"statistics": {}, "train": refuse, "calibration": lambda *_: calibration}
    objective = Objective(mean_loss_times_batch, mean_loss_times_batch, None, logits_of, classes=True)
    return SearchProblem(model, tuple(targets), keep, 0, objective, weighting, **given | more)


def assert_same(model: PreTrainedModel, other: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Assert that the weights of two models are equal bit for bit, and their outputs for a batch up to rounding.

    The order in which a product is summed depends on the memory addresses of its operands, so outputs of a model that
    was loaded from a file may differ in rounding.
    """
    weights, others = model.state_dict(), other.state_dict()
    assert set(weights) == set(others)
    for name, tensor in weights.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
    with torch.no_grad():
        actual, expected = other.eval()(**batch), model.eval()(**batch)
    for name in [name for name, value in expected.items() if isinstance(value, Tensor)]:
        torch.testing.assert_close(actual[name], expected[name])


def logits(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's logits for a batch in eval mode. Labels in the batch are left out."""
    with torch.no_grad():
        return model.eval()(**without_labels(batch)).logits


def factorize(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    rank: Callable[[int], int],
    residual: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Factorize all targets of `model` in place, and return it.

    Args:
        rank: number of a target (0, 1, …) → its rank.
        residual: whether each layer also has a residual, so that factors and residual together are the old weight.
        options: of `find_targets`.
    """
    for number, target in enumerate(find_targets(model, batch, **options).targets):
        factorize_layer(model, target.name, rank(number), slice(None) if residual else None)
    return model


def factorize_layer(model: PreTrainedModel, name: str, rank: int, rows: slice | None = None) -> LowRankLinear:
    """Factorize one layer of `model` in place at this rank, and return the new layer.

    Args:
        rows: rows of the residual (weight − product of the factors) that the layer also has; None: no residual.
    """
    weight = weight_of(model.get_submodule(name)).clone()
    left, right = decompose(weight, ErrorNorm()).truncate(rank)
    layer = factorize_target(model, name, left, right, rest(weight, left, right) if rows else None)
    if rows:
        layer.keep_rows(rows)
    return layer


def narrow(model: PreTrainedModel, widths: Sequence[int]) -> PreTrainedModel:
    """Leave only the first neurons, with their weights, in the MLP of each layer of a GPT-2, LLaMA or Phi-3.

    Args:
        widths: number of neurons for each layer; 0: all.
    """
    place = "transformer.h.{}.mlp.{}" if model.config.model_type == "gpt2" else "model.layers.{}.mlp.{}"
    families = {"gpt2": ("c_fc", "c_proj"), "phi3": ("gate_up_proj", "down_proj")}
    children = families.get(model.config.model_type, ("gate_proj", "up_proj", "down_proj"))
    for number, width in enumerate(widths):
        for child in children if width else ():
            down, name = child in ("c_proj", "down_proj"), place.format(number, child)
            layer = model.get_submodule(name)
            halves = weight_of(layer).chunk(2 if child == "gate_up_proj" else 1)
            weight = weight_of(layer)[:, :width] if down else torch.cat([half[:width] for half in halves])
            narrowed = narrowed_like(layer, *weight.shape)
            set_weight(narrowed, weight)
            if narrowed.bias is not None:
                narrowed.bias.data.copy_(layer.get_parameter("bias").detach()[: len(narrowed.bias)])
            model.set_submodule(name, narrowed)
    return model.eval()


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class LinearLayers(nn.Module):
    """A module whose children a, b, … are random linear layers of the given shapes `(out, in)`."""

    def __init__(self, *shapes: tuple[int, int], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, (rows, columns) in zip("abcdefgh", shapes, strict=False):
                self.add_module(name, nn.Linear(columns, rows))

    def targets(self) -> list[Target]:
        return [
            Target(name=name, out_features=layer.out_features, in_features=layer.in_features, input_of=name)
            for name, layer in self.named_children()
        ]


# --- every family ----------------------------------------------------------------------------------------------------

Kind = Literal["classification", "causal", "seq2seq", "images"]
AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "causal": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "images": transformers.AutoModelForImageClassification,
}
HEAD = "is a head"
NOT_OF_EXAMPLES = "not all of its inputs belong to examples of the batch"


@dataclass(frozen=True)
class Architecture:
    """A tiny model, and the number of targets that probing must find in it."""

    kind: Kind
    build: Callable[[], PreTrainedModel]
    targets: int
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of linear layers that are not targets for this reason."""
    more: int = 0
    """Number of additional targets if heads and embeddings are included; the latter only of words, and not tied."""
    everything: bool = False
    """Whether heads and embeddings are included in all tests."""
    rounding: float = 1e-8
    """Relative rounding error of the model's results in float64; larger if its code computes parts in float32."""


def mobilebert() -> PreTrainedModel:
    """Return a MobileBERT, which reads each token's embedding together with those of its neighbors.

    Beyond the ends of a text it reads zeros, so the embedding of the padding token must be zero, too.
    """
    sizes = {"embedding_size": 12, "intra_bottleneck_size": 8, "num_feedforward_networks": 2}
    model = of("MobileBertForSequenceClassification", **LAYERS, **LENGTH, **sizes, classifier_activation=False)()
    with torch.no_grad():
        model.mobilebert.embeddings.word_embeddings.weight[PAD] = 0
    return model


RELATIVE = {"relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
RELATIVE |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "pooler_hidden_size": 16}
BART = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
BART |= {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
LSTM = {"vocab_size": VOCABULARY, "embedding_size": 12, "hidden_size": 16, "pad_token_id": PAD}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3}
MAMBA |= {"num_labels": LABELS, "pad_token_id": PAD}
ARCHITECTURES = {
    # 6 in each layer, and the pooler
    "bert": Architecture("classification", bert, 13, {HEAD: 1}, 2),
    # also the head and the embeddings of words; those of positions and token types are not
    "bert-everything": Architecture("classification", bert, 15, {NO_WORDS: 2}, everything=True),
    # 11 in each layer (3 of bottlenecks, 4 of attention, 2 of each of two feed-forward networks), 1 of the embeddings
    "mobilebert": Architecture("classification", mobilebert, 23, {HEAD: 1}, 2),
    # 6 in each layer; the head is two linear layers
    "roberta": Architecture(
        "classification", of("RobertaForSequenceClassification", **LAYERS, **LENGTH), 12, {HEAD: 2}, 3
    ),
    # query and key also read the embeddings of relative positions, which belong to no example: 4 are left in each layer
    "deberta-v3": Architecture(
        "classification",
        of("DebertaV2ForSequenceClassification", **LAYERS, **LENGTH, **RELATIVE),
        8,
        {HEAD: 2, NOT_OF_EXAMPLES: 4},
        3,
    ),
    # 6 in the one layer that runs 3 times, the linear layer before it, and the pooler
    "albert": Architecture("classification", albert, 8, {HEAD: 1}, 2),
    # 4 in each layer: query, key and value are one Conv1D
    "gpt2": Architecture("classification", gpt2, 8, {HEAD: 1}, 2),
    # 7 in each layer; the head is tied to the embedding
    "llama": Architecture("causal", causal_llama, 14, {HEAD: 1}),
    # 4 in each layer: query, key and value are one Linear
    "pythia": Architecture("causal", of("GPTNeoXForCausalLM", **LAYERS, **LENGTH), 8, {HEAD: 1}, 2),
    # 6 in each layer, and 2 between the width of the embedding and that of the layers
    "opt": Architecture(
        "causal",
        of("OPTForCausalLM", **LAYERS, ffn_dim=24, word_embed_proj_dim=12, **LENGTH),
        14,
        {HEAD: 1},
    ),
    "qwen3": Architecture("causal", of("Qwen3ForCausalLM", **GROUPED, head_dim=8), 14, {HEAD: 1}, 2),
    # 3 in each layer; the weight of dt_proj is used without calling dt_proj
    "mamba": Architecture(
        "classification",
        lambda: drawn(MambaForSequenceClassification, MambaConfig(**MAMBA)),
        6,
        {HEAD: 1, "its forward did not run for the batch": 2},
        2,
        rounding=1e-5,
    ),
    # 2 in each layer, one of which is called once for each token
    "lstm": Architecture("causal", lambda: drawn(LSTMForCausalLM, LSTMConfig(**LSTM)), 4, {HEAD: 1}, 2),
    # 6 in each layer of the encoder, 10 in each of the decoder
    "bart": Architecture("seq2seq", of("BartForConditionalGeneration", **BART, **LENGTH), 32, {HEAD: 1}),
    # 7 in each layer of the encoder, 11 in each of the decoder: 3 are of the gated feed-forward network
    "t5": Architecture(
        "seq2seq",
        of("T5ForConditionalGeneration", **T5, feed_forward_proj="gated-gelu", decoder_start_token_id=PAD),
        36,
        {HEAD: 1},
    ),
    # 6 in each layer; a convolution embeds the patches
    "vit": Architecture(
        "images", of("ViTForImageClassification", **LAYERS, image_size=8, patch_size=4), 12, {HEAD: 1}, 1
    ),
}
PECULIAR = ("deberta-v3", "albert", "gpt2", "lstm", "t5", "vit")
"""One architecture for each peculiarity.

In this order: layers whose inputs belong to no example; a layer that runs several times; Conv1D; LSTM cells; an encoder
with a decoder; pictures.
"""


def unpadded(kind: Kind) -> list[Batch]:
    """Return six examples of different lengths, each as a batch's tensors without padding and batch dimension."""
    read, written = samples(6), samples(6, seed=1)
    generator = torch.Generator().manual_seed(0)
    result: list[Batch] = []
    for (ids, label), (target, _) in zip(read, written, strict=True):
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind == "images":
            example = {"pixel_values": torch.randn(3, 8, 8, generator=generator)}
        if kind == "causal":
            example["labels"] = ids
        elif kind == "seq2seq":
            shifted = torch.cat([torch.tensor([PAD]), target[:-1]])
            example |= {"decoder_input_ids": shifted, "decoder_attention_mask": torch.ones_like(target)}
            example["labels"] = target
        else:
            example["labels"] = torch.tensor(label)
        result.append(example)
    return result


def padded(examples: Sequence[Mapping[str, Tensor]], more: int = 0) -> Batch:
    """Return a batch of `unpadded` examples, padded on the right.

    It is `more` tokens longer than the longest text, and for a decoder's text twice as many.
    """

    def column(name: str) -> Tensor:
        values = [example[name] for example in examples]
        if values[0].dim() != 1:
            return torch.stack(values)
        decoder = "decoder_input_ids" in examples[0] and (name.startswith("decoder_") or name == "labels")
        length = max(map(len, values)) + more * (2 if decoder else 1)
        filling = -100 if name == "labels" else PAD
        return torch.stack([nn.functional.pad(value, (0, length - len(value)), value=filling) for value in values])

    return {name: column(name) for name in examples[0]}


def loss(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the examples' losses: for one label its loss, for labeled tokens the mean of their losses."""
    labels = batch["labels"]
    if labels.dim() == 1:
        return mean_loss_times_batch(model, batch)
    if "decoder_input_ids" in batch:
        return token_loss(model, batch)
    losses = nn.functional.cross_entropy(model(**batch).logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).sum()


# --- unusual inputs and heads: every batch has examples of several lengths -------------------------------------------

Case = tuple[PreTrainedModel, Batch]
ROWS, TOKENS, CLASSES = 4, 10, 3
WORDS = {"vocab_size": 64, "pad_token_id": 1}
PICTURE = {**LAYERS, "image_size": 8, "patch_size": 4, "projection_dim": 16}
UNUSUAL: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    UNUSUAL[make.__name__] = make
    return make


def text(rows: int = ROWS, tokens: int = TOKENS) -> Batch:
    """Return a batch of texts: the first has `tokens` tokens, each further one 2 fewer, and after 4 again `tokens`."""
    ids = torch.randint(5, 64, (rows, tokens), generator=torch.Generator().manual_seed(0))
    lengths = tokens - 2 * torch.arange(rows) % (tokens - 2)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def classes() -> Batch:
    return {"labels": torch.arange(ROWS) % CLASSES}


def following(rows: Batch) -> Batch:
    """Return a batch of texts with their own tokens as labels."""
    return rows | {"labels": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def boxes() -> Tensor:
    return torch.tensor([0, 0, 5, 5]).expand(ROWS, TOKENS, 4).clone()


def masked_words() -> Tensor:
    """Return the labels of four texts, in which 5, 1, 2 and 1 tokens have a label."""
    batch = text()
    kept = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for row, places in enumerate((range(1, 6), [2], [1, 2], [1])):
        kept[row, list(places)] = True
    return batch["input_ids"].masked_fill(~kept, -100)


@case
def layoutlm() -> Case:
    """A bounding box for each token."""
    model = build("LayoutLMForSequenceClassification", **WORDS, **LAYERS, num_labels=CLASSES)
    return model, text() | {"bbox": boxes()} | classes()


@case
def layoutlmv3() -> Case:
    """Bounding boxes, and a picture whose patches follow the tokens of the text."""
    sizes = {"input_size": 16, "patch_size": 8, "coordinate_size": 3, "shape_size": 2, "max_2d_position_embeddings": 32}
    model = build("LayoutLMv3ForSequenceClassification", **WORDS, **LAYERS, **sizes, num_labels=CLASSES)
    return model, text() | {"bbox": boxes(), "pixel_values": noise(ROWS, 3, 16, 16)} | classes()


@case
def embedded() -> Case:
    """Embedding vectors in place of token ids."""
    model = build("BertForSequenceClassification", **WORDS, **LAYERS, num_labels=CLASSES)
    mask = {"attention_mask": text()["attention_mask"]}
    return model, {"inputs_embeds": noise(ROWS, TOKENS, 16)} | mask | classes()


@case
def choices() -> Case:
    """Two texts in each example."""
    batch = {name: values.view(ROWS, 2, TOKENS) for name, values in text(2 * ROWS).items()}
    return build("BertForMultipleChoice", **WORDS, **LAYERS), batch | {"labels": torch.arange(ROWS) % 2}


def inkling() -> Case:
    """Inkling 2, which has other names for some of its weights in its folders."""
    heads = {"num_key_value_heads": 2, "head_dim": 8, "swa_head_dim": 8, "d_rel": 4}
    swa = {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "layer_types": ["hybrid_sliding", "hybrid"]}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "unpadded_vocab_size": 64}
    model = build("Inkling2ForCausalLM", **LAYERS, **heads, **swa, **experts, vocab_size=64).eval()
    return model, {"input_ids": torch.arange(3, 15)[None]}


@case
def llava() -> Case:
    """First the tokens of a picture, none of which may be cut off, then text."""
    model = build(
        "LlavaForConditionalGeneration",
        vision_config=transformers.CLIPVisionConfig(**PICTURE),
        text_config=transformers.LlamaConfig(**LAYERS, **WORDS, max_position_embeddings=64),
        image_token_index=3,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    batch = following(text())
    image = torch.full((ROWS, 4), 3)
    return model, {
        "input_ids": torch.cat([image, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(image), batch["attention_mask"]], 1),
        "pixel_values": noise(ROWS, 3, 8, 8),
        "labels": torch.cat([torch.full_like(image, -100), batch["labels"]], 1),
    }


@case
def qwen2_vl() -> Case:
    """A single example: the patches of its picture are rows of a tensor of their own."""
    picture = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    model = build(
        "Qwen2VLForConditionalGeneration",
        vision_config={**picture, "spatial_merge_size": 2, "temporal_patch_size": 1},
        text_config={**LAYERS, **WORDS, "num_key_value_heads": 2, "rope_parameters": rope},
        **{"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 2},
    )
    batch = following(text(1))
    image = torch.full((1, 4), 3)
    ids = torch.cat([image, batch["input_ids"]], 1)
    return model, {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 3).long(),
        "pixel_values": noise(16, 48),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "labels": torch.cat([torch.full_like(image, -100), batch["labels"]], 1),
    }


@case
def kosmos2() -> Case:
    """Tokens that stand for a picture, and an entry that marks them."""
    sizes = {"embed_dim": 16, "layers": 1, "ffn_dim": 24, "attention_heads": 2, "vocab_size": 64}
    model = build("Kosmos2ForConditionalGeneration", text_config=sizes, vision_config=PICTURE, latent_query_num=4)
    _, batch = llava()
    return model, batch | {"image_embeds_position_mask": (batch["input_ids"] == 3).long()}


@case
def florence2() -> Case:
    """An encoder of pictures and texts, and a decoder whose first token the config of the text names."""
    stages = {name: [value] * 2 for name, value in {"depths": 1, "num_heads": 2, "num_groups": 2}.items()}
    patches = {"patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "patch_prenorm": [False, True]}
    sizes = {"embed_dim": [8, 16], "window_size": 2, "projection_dim": 16, "max_temporal_embeddings": 4}
    model = build(
        "Florence2ForConditionalGeneration",
        vision_config={**stages, **patches, **sizes, "max_position_embeddings": 8},
        text_config={"model_type": "bart", **WORDS, **BART, "max_position_embeddings": 64, "decoder_start_token_id": 2},
        image_token_id=3,
    )
    _, batch = llava()
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    image = ids[:, :1]  # the mean of the patches is a token, too
    return model, {
        "input_ids": torch.cat([image, ids], 1),
        "attention_mask": torch.cat([mask[:, :1], mask], 1),
        "pixel_values": batch["pixel_values"],
        "labels": labels[:, 4:].contiguous(),
    }


@case
def whisper() -> Case:
    """Sounds of the same length, and texts that are padded."""
    ends = {"decoder_start_token_id": 2, "bos_token_id": 2, "eos_token_id": 2}
    sizes = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
    model = build("WhisperForConditionalGeneration", **WORDS, **BART, **sizes, **ends)
    return model, {"input_features": noise(ROWS, 8, 20), "labels": following(text())["labels"]}


@case
def swin() -> Case:
    """Pictures that the model cuts into windows, several for each example."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2]}
    model = build("SwinForImageClassification", **sizes, window_size=4, num_labels=CLASSES)
    return model, {"pixel_values": noise(ROWS, 3, 16, 16)} | classes()


@case
def patchtst() -> Case:
    """Time series of three channels, which the model reads one by one; the labels are named `target_values`."""
    sizes = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16, "ffn_dim": 24}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "num_targets": CLASSES, "use_cls_token": True}
    model = build("PatchTSTForClassification", num_input_channels=3, **sizes, **heads)
    return model, {"past_values": noise(ROWS, 16, 3), "target_values": classes()["labels"]}


@case
def canine() -> Case:
    """A first layer that reads all characters, then layers that read one vector for every four characters."""
    hashes = {"num_hash_buckets": 32, "num_hash_functions": 4}
    strides = {"local_transformer_stride": 16, "downsampling_rate": 4, "upsampling_kernel_size": 4}
    model = build("CanineForSequenceClassification", **LAYERS, **hashes, **strides, num_labels=CLASSES)
    return model, text(tokens=32) | classes()


@case
def switch() -> Case:
    """Experts made of linear layers, each of which reads the tokens that a router sends to it."""
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    model = build(
        "SwitchTransformersForConditionalGeneration",
        **WORDS,
        **T5,
        **experts,
        num_decoder_layers=2,
        decoder_start_token_id=0,
    )
    return model, following(text())


@case
def falcon() -> Case:
    """Linear layers of a class that Falcon's own code defines."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return build("FalconForCausalLM", **WORDS, **sizes), following(text())


@case
def masked_language_model() -> Case:
    return build("BertForMaskedLM", **WORDS, **LAYERS), text() | {"labels": masked_words()}


def heard(family: str, **options: Any) -> Case:
    """Return a model that reads sound waves, 8 samples in a frame, and a batch. Its labels have 5, 3, 2, 5 letters."""
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    model = build(family, **LAYERS, **convolutions, **positions, vocab_size=20, pad_token_id=0, **options)
    labels = torch.randint(3, 20, (ROWS, 5), generator=torch.Generator().manual_seed(2))
    labels[1, 3:] = labels[2, 2:] = -100
    return model, {"input_values": noise(ROWS, 160), "labels": labels}


@case
def speech() -> Case:
    """A model whose loss is the sum over examples, and whose code reads `in_features` to initialize weights."""
    return heard("Wav2Vec2ForCTC", feat_extract_norm="layer", do_stable_layer_norm=True)


@case
def wavlm() -> Case:
    """Attention that uses the weights of linear layers without calling these layers."""
    return heard("WavLMForCTC")


def two_heads() -> Case:
    """A model with two losses: a mean over all tokens, and a mean over examples."""
    model = build("GPT2DoubleHeadsModel", vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    batch = {name: values.view(ROWS, 2, TOKENS) for name, values in text(2 * ROWS).items()}
    ends = batch["attention_mask"].sum(-1) - 1
    return model, following(batch) | {"mc_token_ids": ends, "mc_labels": torch.arange(ROWS) % 2}


def patches_with_a_mask() -> Case:
    """Pictures of 16, 12, 8 and 4 patches."""
    vision = {**LAYERS, "num_patches": 16, "patch_size": 2, "num_channels": 3}
    text_config = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 16}
    model = build("Siglip2ForImageClassification", vision_config=vision, text_config=text_config, num_labels=CLASSES)
    mask = (torch.arange(16) < torch.tensor([16, 12, 8, 4])[:, None]).long()
    shapes = torch.tensor([[4, 4], [3, 4], [2, 4], [2, 2]])
    pictures = {"pixel_values": noise(ROWS, 16, 12), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    return model, pictures | classes()


def picture_classes() -> Case:
    """A model whose layers and head are in the same parent module."""
    model = build("CLIPForImageClassification", vision_config=PICTURE, num_labels=CLASSES)
    return model, {"pixel_values": noise(ROWS, 3, 8, 8)} | classes()


def pixels() -> Case:
    """A class for each pixel."""
    blocks = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    patches = {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    model = build("SegformerForSemanticSegmentation", **blocks, **patches, decoder_hidden_size=16, num_labels=CLASSES)
    labels = torch.randint(0, CLASSES, (3, 16, 16), generator=torch.Generator().manual_seed(0))
    return model, {"pixel_values": noise(3, 3, 16, 16), "labels": labels}


def mixtral() -> Case:
    """Four experts, two of which read each token; the weights of all experts are one tensor."""
    options = {**LAYERS, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    return build("MixtralForCausalLM", **WORDS, **options), following(text())
