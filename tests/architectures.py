"""A tiny model of every family, the targets that probing must find in it, and batches for its task.

A family joins by an entry in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import eckart.model.lstm  # and teaches transformers the format
from eckart.calibration.losses import Batch, mean_loss_times_batch, token_loss
from tests import tiny

Kind = Literal["classification", "causal", "seq2seq", "images"]
AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "causal": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "images": transformers.AutoModelForImageClassification,
}
COUNT = 6  # samples


@dataclass(frozen=True)
class Family:
    """A tiny model, and the targets that probing must find in it."""

    kind: Kind
    build: Callable[[], PreTrainedModel]
    targets: int
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of linear layers."""
    more: int = 0
    """Additional targets if heads and embeddings are included; tied ones and positions never are."""
    everything: bool = False
    """Whether heads and embeddings are included in all tests."""
    rounding: float = 1e-8
    """Relative rounding of what it computes in float64; more if its code goes through float32."""


def of(family: str, config: type[PreTrainedConfig], **options: Any) -> Callable[[], PreTrainedModel]:
    """Return a builder of a model with random weights and dimensions that differ from each other."""
    everywhere = {"vocab_size": tiny.VOCABULARY, "num_labels": tiny.LABELS, "pad_token_id": tiny.PAD}
    return lambda: tiny.drawn(getattr(transformers, family), config(**{**everywhere, **options}))


def mobilebert() -> PreTrainedModel:
    """A model that reads each token with its neighbours, and zeros beyond the text, so padding must be zero."""
    config = transformers.MobileBertConfig(
        **{**LAYERS, **LENGTH, "vocab_size": tiny.VOCABULARY, "num_labels": tiny.LABELS, "pad_token_id": tiny.PAD},
        embedding_size=12,
        intra_bottleneck_size=8,
        num_feedforward_networks=2,
        classifier_activation=False,
    )
    model = tiny.drawn(transformers.MobileBertForSequenceClassification, config)
    with torch.no_grad():
        model.mobilebert.embeddings.word_embeddings.weight[tiny.PAD] = 0
    return model


LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LENGTH = {"max_position_embeddings": 32}
GROUPED = {**LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, **LENGTH}
HEAD = "is a head"
FAMILIES = {
    # 6 a layer and the pooler
    "bert": Family("classification", tiny.bert, 13, {HEAD: 1}, 3),
    # and its head, words and token types; its positions are the same for all samples
    "bert-everything": Family(
        "classification",
        tiny.bert,
        16,
        {"not all of its inputs belong to examples of the batch": 1},
        everything=True,
    ),
    # 6 a layer; the head is two layers
    "distilbert": Family(
        "classification",
        of(
            "DistilBertForSequenceClassification",
            transformers.DistilBertConfig,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=24,
            **LENGTH,
        ),
        12,
        {HEAD: 2},
        3,
    ),
    # 11 a layer (3 of bottlenecks, 4 of attention, 2 for each of two feed-forward networks) and one of the embeddings
    "mobilebert": Family(
        "classification",
        mobilebert,
        23,
        {HEAD: 1},
        3,
    ),
    "roberta": Family(
        "classification",
        of("RobertaForSequenceClassification", transformers.RobertaConfig, **LAYERS, **LENGTH),
        12,
        {HEAD: 2},
        5,
    ),
    # query and key also read the embeddings of relative positions, which belong to no sample: 4 a layer are left
    "deberta-v3": Family(
        "classification",
        of(
            "DebertaV2ForSequenceClassification",
            transformers.DebertaV2Config,
            **LAYERS,
            **LENGTH,
            relative_attention=True,
            position_buckets=4,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            pooler_hidden_size=16,
        ),
        8,
        {HEAD: 2, "not all of its inputs belong to examples of the batch": 4},
        3,
    ),
    # one layer of 6 that runs 3 times, the layer before it and the pooler
    "albert": Family("classification", tiny.albert, 8, {HEAD: 1}, 3),
    # 4 a layer: query, key and value are one Conv1D
    "gpt2": Family("classification", tiny.gpt2, 8, {HEAD: 1}, 2),
    # 7 a layer; the head is tied to the embedding
    "llama": Family("causal", tiny.causal_llama, 14, {HEAD: 1}),
    # 4 a layer: query, key and value are one Linear
    "pythia": Family(
        "causal", of("GPTNeoXForCausalLM", transformers.GPTNeoXConfig, **LAYERS, **LENGTH), 8, {HEAD: 1}, 2
    ),
    # 6 a layer, and two between the width of the embedding and that of the layers
    "opt": Family(
        "causal",
        of(
            "OPTForCausalLM",
            transformers.OPTConfig,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=24,
            word_embed_proj_dim=12,
            **LENGTH,
        ),
        14,
        {HEAD: 1},
    ),
    "qwen2": Family("causal", of("Qwen2ForCausalLM", transformers.Qwen2Config, **GROUPED), 14, {HEAD: 1}, 2),
    "qwen3": Family(
        "causal", of("Qwen3ForCausalLM", transformers.Qwen3Config, **GROUPED, head_dim=8), 14, {HEAD: 1}, 2
    ),
    # 3 a layer; the weight of dt_proj is used without its forward
    "mamba": Family(
        "causal",
        of(
            "MambaForCausalLM",
            transformers.MambaConfig,
            hidden_size=16,
            num_hidden_layers=2,
            state_size=4,
            time_step_rank=3,
        ),
        6,
        {HEAD: 1, "its forward ran 0 times for one batch": 2},
        rounding=1e-5,
    ),
    # 2 a layer, of which one runs for each token
    "lstm": Family(
        "causal",
        lambda: tiny.drawn(
            eckart.model.lstm.LSTMForCausalLM,
            eckart.model.lstm.LSTMConfig(
                vocab_size=tiny.VOCABULARY, embedding_size=12, hidden_size=16, pad_token_id=tiny.PAD
            ),
        ),
        4,
        {HEAD: 1},
        2,
    ),
    # 6 a layer of the encoder, 10 of the decoder
    "bart": Family(
        "seq2seq",
        of(
            "BartForConditionalGeneration",
            transformers.BartConfig,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=20,
            **LENGTH,
        ),
        32,
        {HEAD: 1},
    ),
    # 7 a layer of the encoder, 11 of the decoder: a gated feed-forward network has 3; wo is looked at for its type
    "t5": Family(
        "seq2seq",
        of(
            "T5ForConditionalGeneration",
            transformers.T5Config,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=tiny.PAD,
        ),
        36,
        {HEAD: 1},
    ),
    # 6 a layer; the patches are cut by a convolution
    "vit": Family(
        "images",
        of(
            "ViTForImageClassification",
            transformers.ViTConfig,
            **LAYERS,
            image_size=8,
            patch_size=4,
        ),
        12,
        {HEAD: 1},
        1,
    ),
}


# --- data ------------------------------------------------------------------------------------------------------------


def samples(kind: Kind) -> list[dict[str, Tensor]]:
    """Return examples of different lengths, each as the model reads it alone."""
    read, written = tiny.samples(COUNT), tiny.samples(COUNT, seed=1)
    generator = torch.Generator().manual_seed(0)
    result: list[dict[str, Tensor]] = []
    for (ids, label), (target, _) in zip(read, written, strict=True):
        one = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind == "images":
            one = {"pixel_values": torch.randn(3, 8, 8, generator=generator)}
        if kind == "causal":
            one["labels"] = ids
        elif kind == "seq2seq":
            shifted = torch.cat([torch.tensor([tiny.PAD]), target[:-1]])
            one |= {"decoder_input_ids": shifted, "decoder_attention_mask": torch.ones_like(target), "labels": target}
        else:
            one["labels"] = torch.tensor(label)
        result.append(one)
    return result


def collate(some: Sequence[Mapping[str, Tensor]], more: int = 0) -> dict[str, Tensor]:
    """Return a batch padded on the right by `more` tokens beyond the longest text, twice as many for a decoder."""

    def padded(name: str) -> Tensor:
        values = [one[name] for one in some]
        if values[0].dim() != 1:
            return torch.stack(values)
        decoder = "decoder_input_ids" in some[0] and (name.startswith("decoder_") or name == "labels")
        length = max(map(len, values)) + more * (2 if decoder else 1)
        filling = -100 if name == "labels" else tiny.PAD
        return torch.stack([nn.functional.pad(value, (0, length - len(value)), value=filling) for value in values])

    return {name: padded(name) for name in some[0]}


def loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Sum the losses of examples: of the label, or the mean over the labelled tokens."""
    labels = batch["labels"]
    if labels.dim() == 1:
        return mean_loss_times_batch(model, batch)
    if "decoder_input_ids" in batch:
        return token_loss(model, batch)
    losses = nn.functional.cross_entropy(model(**batch).logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).sum()
