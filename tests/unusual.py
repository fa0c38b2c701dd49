"""Tiny models with inputs beyond ids and a mask, or labels other than a class for each example; with a batch each.

Every batch has examples of several lengths, to show whether statistics depend on how examples are batched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests import tiny

Batch = dict[str, Tensor]
Case = tuple[PreTrainedModel, Batch]
ROWS, TOKENS, CLASSES = 4, 10, 3
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = {"vocab_size": 64, "pad_token_id": 1}
CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def made(family: str, config: type[PreTrainedConfig], **options: object) -> PreTrainedModel:
    return tiny.drawn(getattr(transformers, family), config(**options))


def text(rows: int = ROWS, tokens: int = TOKENS) -> Batch:
    """Return texts of 10, 8, 6, 4 tokens, and so on."""
    ids = torch.randint(5, 64, (rows, tokens), generator=torch.Generator().manual_seed(0))
    lengths = tokens - 2 * torch.arange(rows) % (tokens - 2)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def labelled(**more: Tensor) -> Batch:
    return text() | more | {"labels": torch.arange(ROWS) % CLASSES}


def following() -> Batch:
    """Return texts whose labels are their own tokens."""
    batch = text()
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def masked_words() -> Tensor:
    """Labels of 5, 1, 2 and 1 tokens."""
    batch = text()
    kept = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for row, places in enumerate((range(1, 6), [2], [1, 2], [1])):
        kept[row, list(places)] = True
    return batch["input_ids"].masked_fill(~kept, -100)


def sound(**options: object) -> dict[str, object]:
    """Return options of a model that reads waves, 8 samples to a frame."""
    return {
        **LAYERS,
        "vocab_size": 20,
        "pad_token_id": 0,
        "conv_dim": (8, 8),
        "conv_stride": (4, 2),
        "conv_kernel": (4, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "num_labels": CLASSES,
        "classifier_proj_size": 8,
        "mask_time_prob": 0.0,
        **options,
    }


def letters() -> Tensor:
    """Labels of 5, 3, 2 and 5 letters."""
    labels = torch.randint(3, 20, (ROWS, 5), generator=torch.Generator().manual_seed(2))
    labels[1, 3:] = labels[2, 2:] = -100
    return labels


# --- batches with more than ids and a mask ---------------------------------------------------------------------------


@case
def layoutlm() -> Case:
    """A box for each token."""
    model = made("LayoutLMForSequenceClassification", transformers.LayoutLMConfig, **WORDS, **LAYERS, num_labels=3)
    return model, labelled(bbox=torch.tensor([0, 0, 5, 5]).expand(ROWS, TOKENS, 4).clone())


@case
def layoutlmv3() -> Case:
    """Boxes, and a picture whose patches follow the tokens."""
    model = made(
        "LayoutLMv3ForSequenceClassification",
        transformers.LayoutLMv3Config,
        **WORDS,
        **LAYERS,
        num_labels=CLASSES,
        input_size=16,
        patch_size=8,
        coordinate_size=3,
        shape_size=2,
        max_2d_position_embeddings=32,
    )
    boxes = torch.tensor([0, 0, 5, 5]).expand(ROWS, TOKENS, 4).clone()
    return model, labelled(bbox=boxes, pixel_values=drawn(ROWS, 3, 16, 16))


@case
def tapas() -> Case:
    """Seven types for each token."""
    model = made("TapasForSequenceClassification", transformers.TapasConfig, **WORDS, **LAYERS, num_labels=CLASSES)
    return model, labelled(token_type_ids=torch.zeros(ROWS, TOKENS, 7, dtype=torch.long))


@case
def embedded() -> Case:
    """Vectors in place of ids."""
    model = made("BertForSequenceClassification", transformers.BertConfig, **WORDS, **LAYERS, num_labels=CLASSES)
    batch = labelled()
    del batch["input_ids"]
    return model, {"inputs_embeds": drawn(ROWS, TOKENS, 16)} | batch


@case
def choices() -> Case:
    """Two texts in each example."""
    model = made("BertForMultipleChoice", transformers.BertConfig, **WORDS, **LAYERS)
    batch = {name: values.view(ROWS, 2, TOKENS) for name, values in text(2 * ROWS).items()}
    return model, batch | {"labels": torch.arange(ROWS) % 2}


@case
def llava() -> Case:
    """A picture's tokens first, which must all stay, then text."""
    vision = transformers.CLIPVisionConfig(**LAYERS, image_size=8, patch_size=4, projection_dim=16)
    words = transformers.LlamaConfig(**LAYERS, vocab_size=64, pad_token_id=1, max_position_embeddings=64)
    model = made(
        "LlavaForConditionalGeneration",
        transformers.LlavaConfig,
        vision_config=vision,
        text_config=words,
        image_token_index=3,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    batch = following()
    image = torch.full((ROWS, 4), 3)
    return model, {
        "input_ids": torch.cat([image, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(image), batch["attention_mask"]], 1),
        "pixel_values": drawn(ROWS, 3, 8, 8),
        "labels": torch.cat([torch.full_like(image, -100), batch["labels"]], 1),
    }


@case
def whisper() -> Case:
    """Sound of one length, and text that is padded."""
    model = made(
        "WhisperForConditionalGeneration",
        transformers.WhisperConfig,
        **WORDS,
        num_mel_bins=8,
        d_model=16,
        **{f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=2,
        bos_token_id=2,
        eos_token_id=2,
    )
    return model, {"input_features": drawn(ROWS, 8, 20), "labels": following()["labels"]}


@case
def swin() -> Case:
    """Windows of a picture, several for each example."""
    model = made(
        "SwinForImageClassification",
        transformers.SwinConfig,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=CLASSES,
    )
    return model, {"pixel_values": drawn(ROWS, 3, 16, 16), "labels": torch.arange(ROWS) % CLASSES}


@case
def patchtst() -> Case:
    """Three channels of a series, each by itself; the labels have a name of their own."""
    model = made(
        "PatchTSTForClassification",
        transformers.PatchTSTConfig,
        num_input_channels=3,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        ffn_dim=24,
        num_targets=CLASSES,
        use_cls_token=True,
    )
    return model, {"past_values": drawn(ROWS, 16, 3), "target_values": torch.arange(ROWS) % CLASSES}


@case
def canine() -> Case:
    """A layer of characters, then layers of every fourth."""
    model = made(
        "CanineForSequenceClassification",
        transformers.CanineConfig,
        **LAYERS,
        num_labels=CLASSES,
        num_hash_buckets=32,
        num_hash_functions=4,
        local_transformer_stride=16,
        downsampling_rate=4,
        upsampling_kernel_size=4,
    )
    return model, text(tokens=32) | {"labels": torch.arange(ROWS) % CLASSES}


@case
def switch() -> Case:
    """Experts that are linear layers, whose inputs a router chooses."""
    model = made(
        "SwitchTransformersForConditionalGeneration",
        transformers.SwitchTransformersConfig,
        **WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )
    return model, following()


@case
def falcon() -> Case:
    """Linear layers of a class of their own."""
    model = made(
        "FalconForCausalLM",
        transformers.FalconConfig,
        **WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return model, following()


# --- heads -----------------------------------------------------------------------------------------------------------


@case
def masked_language_model() -> Case:
    model = made("BertForMaskedLM", transformers.BertConfig, **WORDS, **LAYERS)
    return model, text() | {"labels": masked_words()}


@case
def question_over_pictures() -> Case:
    """Named as a head that points at spans, which it is not."""
    model = made(
        "LxmertForQuestionAnswering",
        transformers.LxmertConfig,
        vocab_size=64,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        num_qa_labels=CLASSES,
        l_layers=1,
        x_layers=1,
        r_layers=1,
        visual_feat_dim=6,
    )
    return model, labelled(visual_feats=drawn(ROWS, 3, 6), visual_pos=torch.rand(ROWS, 3, 4))


@case
def speech() -> Case:
    """Its loss is the sum over examples, and its code reads `in_features` to initialize weights."""
    options = sound(feat_extract_norm="layer", do_stable_layer_norm=True)
    model = made("Wav2Vec2ForCTC", transformers.Wav2Vec2Config, **options)
    return model, {"input_values": drawn(ROWS, 160), "labels": letters()}


@case
def wavlm() -> Case:
    return made("WavLMForCTC", transformers.WavLMConfig, **sound()), speech()[1]


@case
def data2vec_audio() -> Case:
    options = sound(conv_pos_kernel_size=3, num_conv_pos_embeddings=2)
    del options["num_feat_extract_layers"]
    return made("Data2VecAudioForCTC", transformers.Data2VecAudioConfig, **options), speech()[1]


@case
def unispeech() -> Case:
    return made("UniSpeechSatForCTC", transformers.UniSpeechSatConfig, **sound()), speech()[1]


# --- no sum or mean over samples -------------------------------------------------------------------------------------


def two_heads() -> Case:
    """A mean over all tokens, and one over examples."""
    model = made(
        "GPT2DoubleHeadsModel", transformers.GPT2Config, vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32
    )
    batch = {name: values.view(ROWS, 2, TOKENS) for name, values in text(2 * ROWS).items()}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    ends = batch["attention_mask"].sum(-1) - 1
    return model, batch | {"mc_token_ids": ends, "labels": labels, "mc_labels": torch.arange(ROWS) % 2}


def told_from_made_up() -> Case:
    """A mean over all tokens of one logit each."""
    model = made("ElectraForPreTraining", transformers.ElectraConfig, **WORDS, **LAYERS, embedding_size=8)
    batch = text()
    return model, batch | {"labels": batch["input_ids"] % 2}


# --- masks and heads of pictures --------------------------------------------------------------------------------------


def patches_with_a_mask() -> Case:
    """Pictures of 16, 12, 8 and 4 patches."""
    vision = {**LAYERS, "num_patches": 16, "patch_size": 2, "num_channels": 3}
    text_config = {**LAYERS, "vocab_size": 64, "max_position_embeddings": 16}
    config = transformers.Siglip2Config(vision_config=vision, text_config=text_config, num_labels=CLASSES)
    model = tiny.drawn(transformers.Siglip2ForImageClassification, config)
    mask = (torch.arange(16) < torch.tensor([16, 12, 8, 4])[:, None]).long()
    shapes = torch.tensor([[4, 4], [3, 4], [2, 4], [2, 2]])
    pictures = {"pixel_values": drawn(ROWS, 16, 12), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    return model, pictures | {"labels": torch.arange(ROWS) % CLASSES}


def picture_classes() -> Case:
    """Its layers and head have the same parent."""
    vision = {**LAYERS, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = transformers.CLIPConfig(vision_config=vision, num_labels=CLASSES)
    model = tiny.drawn(transformers.CLIPForImageClassification, config)
    return model, {"pixel_values": drawn(ROWS, 3, 8, 8), "labels": torch.arange(ROWS) % CLASSES}


def pixels() -> Case:
    """A class for each pixel."""
    model = made(
        "SegformerForSemanticSegmentation",
        transformers.SegformerConfig,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=CLASSES,
    )
    labels = torch.randint(0, CLASSES, (3, 16, 16), generator=torch.Generator().manual_seed(0))
    return model, {"pixel_values": drawn(3, 3, 16, 16), "labels": labels}


# --- experts ---------------------------------------------------------------------------------------------------------


def mixtral() -> Case:
    """Four experts, of which each token goes to two; their weights are one tensor."""
    options = {**LAYERS, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
    return made("MixtralForCausalLM", transformers.MixtralConfig, **WORDS, **options), following()
