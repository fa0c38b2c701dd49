"""Models with unusual inputs, heads or losses: their targets, their calibration statistics, and saving them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining, IBertConfig, IBertForSequenceClassification

import eckart
from eckart.calibration.batch_preparation import prepare_batches
from eckart.calibration.head_loss import objective_of
from eckart.calibration.losses import causal_loss, mean_loss_times_batch, span_loss, sum_loss, token_loss
from eckart.calibration.statistics import collect
from eckart.model.batches import first_examples, row_of
from eckart.model.macs import macs
from eckart.model.probing import NEVER_RAN
from eckart.model.targets import Targets, find_targets
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer tokens:UserWarning", "ignore:Targets are only:UserWarning")
NO_TOKENS = "its inputs are not the tokens of attention_mask"


def probed(case: tiny.Case) -> Targets:
    model, batch = case
    ready = prepare_batches(model, [batch])[0]
    return find_targets(model, first_examples(ready, 2))


# --- what is compressed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "masks", "excluded"),
    [
        ("layoutlm", {"attention_mask": 12, None: 1}, {"is a head": 1}),
        ("choices", {"attention_mask": 12, None: 1}, {"is a head": 1}),
        ("llava", {"attention_mask": 14, None: 14}, {"is a head": 1}),
        ("qwen2_vl", {None: 20}, {"is a head": 1}),
        ("kosmos2", {"attention_mask": 6, None: 17}, {"is a head": 1}),
        # the encoder, and what the decoder's attention reads of it
        ("whisper", {"decoder_attention_mask": 16, None: 16}, {"is a head": 1}),
        ("swin", {None: 19}, {"is a head": 1}),
        ("patchtst", {None: 13}, {"is a head": 1}),
        # the layers of every fourth character
        ("canine", {"attention_mask": 9, None: 1}, {"is a head": 1, NO_TOKENS: 15}),
        ("falcon", {"attention_mask": 8}, {"is a head": 1}),
    ],
)
def test_each_target_has_the_right_mask(name, masks, excluded):
    found = probed(tiny.UNUSUAL[name]())
    assert Counter(target.mask for target in found.targets) == masks
    assert Counter(found.excluded.values()) == excluded


def test_experts_that_are_linear_layers_are_excluded():
    """Whether the router sent it any of two examples' tokens or none."""
    found = probed(tiny.UNUSUAL["switch"]())
    reasons = [reason for name, reason in found.excluded.items() if ".experts." in name]
    assert len(reasons) == 2 * 2 * 4  # layers of an expert, sides, experts
    assert set(reasons) - {NEVER_RAN}
    model, batch = tiny.UNUSUAL["switch"]()
    unmasked = probed((model, {name: values for name, values in batch.items() if name != "attention_mask"}))
    assert not any(".experts." in target.name for target in (*found.targets, *unmasked.targets))


def test_a_model_without_attributable_inputs_is_an_error_with_the_reason():
    with pytest.raises(ValueError, match=rf"\b{NO_TOKENS}\b"):
        probed(tiny.UNUSUAL["layoutlmv3"]())


def test_masks_of_other_entries_hide_padding():
    """Hidden patches do not count in the statistics."""
    model, batch = tiny.patches_with_a_mask()
    found = probed((model, batch))
    assert Counter(target.mask for target in found.targets)["pixel_attention_mask"] == 13
    hidden = batch["pixel_attention_mask"] == 0
    other = batch | {"pixel_values": batch["pixel_values"].masked_fill(hidden[..., None], 9.0)}
    one, another = (collect(model, [some], found.targets, {"inputs"})["inputs"] for some in (batch, other))
    for key, value in one.items():
        torch.testing.assert_close(another[key], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_hidden_parts_of_pictures_are_an_error():
    model, batch = tiny.UNUSUAL["swin"]()
    with pytest.raises(ValueError, match="pixel_mask"):
        probed((model, batch | {"pixel_mask": torch.zeros(tiny.ROWS, 16, 16)}))


def test_a_head_beside_the_layers_is_excluded():
    model, batch = tiny.picture_classes()
    assert probed((model, batch)).excluded == {"classifier": "is a head"}


class Adapted(nn.Linear):
    """A linear layer that adds something small to x Wᵀ + b."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.more = nn.Parameter(1e-3 * torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.more


def test_a_linear_subclass_with_more_parameters_is_excluded():
    model, batch = tiny.UNUSUAL["layoutlm"]()
    model.layoutlm.encoder.layer[0].attention.self.query = Adapted()
    assert "Adapted" in probed((model, batch)).excluded["layoutlm.encoder.layer.0.attention.self.query"]


def test_a_parametrized_weight_is_excluded():
    model, batch = tiny.UNUSUAL["layoutlm"]()
    attention = model.layoutlm.encoder.layer[0].attention.self
    nn.utils.parametrizations.weight_norm(attention.query)
    assert "not a parameter" in probed((model, batch)).excluded["layoutlm.encoder.layer.0.attention.self.query"]


def test_weights_that_a_model_changes_in_place_while_it_trains_are_excluded():
    """Those of Gemma 3n, which clamps them in training mode."""
    config = {
        **tiny.GROUPED,
        **{"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
        **{"num_hidden_layers": 2, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "head_dim": 8},
        **{"activation_sparsity_pattern": [0.0, 0.0], "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3},
    }
    model = tiny.build("Gemma3nForCausalLM", **config)
    ids = torch.randint(4, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert "clamped" in probed((model, batch)).excluded["model.layers.0.altup.prediction_coefs"]
    small, _ = eckart.compress(model, [batch], 0.5, "kfac", check=False)
    small.train()(**batch).loss.backward()


def test_layers_with_random_inputs_are_excluded():
    model, batch = tiny.UNUSUAL["layoutlm"]()
    layer = model.layoutlm.encoder.layer[1]
    layer.register_forward_pre_hook(lambda _, args: (args[0] + torch.randn_like(args[0]), *args[1:]))
    reasons = probed((model, batch)).excluded
    assert "random" in reasons["layoutlm.encoder.layer.1.attention.self.query"]


def test_a_mask_of_pairs_of_tokens_is_an_error():
    model, batch = tiny.UNUSUAL["embedded"]()
    mask = batch["attention_mask"]
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 1, 10, 10\)"):
        probed((model, batch | {"attention_mask": mask[:, None, None, :] * mask[:, None, :, None]}))


def test_a_batch_that_does_not_fit_is_an_error_that_names_its_inputs():
    model, batch = tiny.UNUSUAL["embedded"]()
    with pytest.raises(ValueError, match=r"BertForSequenceClassification .*\binputs_embeds\b"):
        probed((model, batch | {"inputs_embeds": batch["inputs_embeds"][..., 1:]}))


# --- the whole model -------------------------------------------------------------------------------------------------


def test_a_census_counts_a_shared_weight_once():
    """Falcon's head is its embedding, of 64 words; the rest are 5 vectors of norms and biases in each layer."""
    model, _ = case = tiny.UNUSUAL["falcon"]()
    found = probed(case).census
    assert found.total == model.num_parameters()
    assert found.embeddings == 64 * 16
    assert found.targets == sum(target.parameters for target in probed(case).targets)
    assert not found.linear
    assert not found.experts


def test_experts_in_one_tensor_are_counted_and_warned_of():
    """By hand: 2 layers of 4 experts with 16 → 2 · 24 and 24 → 16; routers of 4 × 16; head and embedding of 64 × 16."""
    found = probed(tiny.mixtral())
    assert found.census.targets == 2 * 4 * 16 * 16
    assert found.census.experts == 2 * 4 * (16 * 48 + 24 * 16)
    assert found.census.embeddings == 64 * 16
    assert sorted(found.census.linear.values()) == [2 * 4 * 16, 64 * 16]
    assert found.census.warning is not None
    assert probed(tiny.UNUSUAL["falcon"]()).census.warning is None


def test_experts_cost_as_many_macs_as_tokens_reach_them():
    """Each token goes to 2 of 4: as many products as for a dense network of 2 experts."""
    model, batch = tiny.mixtral()
    rows, layers = batch["input_ids"].numel(), 2
    expert, router = 16 * 48 + 24 * 16, 4 * 16
    attention = 4 * 16 * 16 + 2 * tiny.TOKENS * 16
    head = 16 * 64
    assert macs(model, batch) == rows * (layers * (2 * expert + router + attention) + head)


def test_attention_counts_the_same_as_its_products_one_by_one():
    """Here with fewer heads of keys than of queries; with padding, transformers repeats the keys."""
    model = tiny.build("LlamaForCausalLM", **tiny.LAYERS, num_key_value_heads=1)
    ids = torch.randint(3, 20, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    counts = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        counts.append(
            [macs(model, batch) for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask})]
        )
    assert counts[0] == counts[1]


def test_other_linear_classes_are_named():
    config = IBertConfig(vocab_size=64, pad_token_id=1, max_position_embeddings=32, **tiny.LAYERS)
    with pytest.raises(ValueError, match="QuantLinear"):
        probed((IBertForSequenceClassification(config), tiny.text() | tiny.classes()))


# --- what is gathered ------------------------------------------------------------------------------------------------

LOSSES = {
    "embedded": mean_loss_times_batch,
    "choices": mean_loss_times_batch,
    "patchtst": mean_loss_times_batch,
    "masked_language_model": token_loss,
    "whisper": token_loss,
    "llava": causal_loss,
    "falcon": causal_loss,
    "speech": sum_loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_found_and_statistics_do_not_depend_on_how_examples_are_batched(name):
    model, batch = tiny.UNUSUAL[name]()
    data = prepare_batches(
        model.double(), [{key: x.double() if x.is_floating_point() else x for key, x in batch.items()}]
    )
    targets = find_targets(model, row_of(data[0], 0)).targets
    loss = objective_of(model, data, "kfac").loss
    assert loss is LOSSES[name]
    rows = [row_of(data[0], row) for row in range(tiny.ROWS)]
    together, alone = (collect(model, some, targets, loss=loss) for some in (data, rows))
    for kind, values in together.items():
        assert any(value.any() for value in values.values()), kind
        for key, value in values.items():
            torch.testing.assert_close(value, alone[kind][key], rtol=1e-4, atol=1e-6 * float(value.abs().max()))


def test_a_loss_that_is_no_sum_over_examples_needs_batches_of_one():
    model, batch = tiny.two_heads()
    data = prepare_batches(model, [batch])
    with pytest.raises(ValueError, match=r"loss="):
        objective_of(model, data, "kfac")
    rows = [row_of(batch, row) for row in range(tiny.ROWS)]
    assert objective_of(model, rows, "kfac").loss is mean_loss_times_batch


def test_a_loss_of_two_parts_is_an_error():
    model = BertForPreTraining(BertConfig(**tiny.WORDS, **tiny.LAYERS))
    batch = tiny.text() | {"labels": tiny.masked_words(), "next_sentence_label": torch.arange(tiny.ROWS) % 2}
    with pytest.raises(ValueError, match=r"loss="):
        objective_of(model, [batch], "kfac")


def test_a_loss_with_a_term_beside_the_logits_is_an_error():
    """The balance of a router is no mean over examples, even if all have the same number of tokens."""
    model, batch = tiny.mixtral()
    whole = {name: values[:, :4] for name, values in batch.items()}
    assert objective_of(model, [whole], "kfac").loss is causal_loss
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.1
    with pytest.raises(ValueError, match=r"loss="):
        objective_of(model, [whole], "kfac")


def test_ignored_labels_are_detected():
    """Pixels of the label 255."""
    model, batch = tiny.pixels()
    assert objective_of(model, [batch], "kfac").loss is mean_loss_times_batch
    batch["labels"][1, :8] = 255
    with pytest.raises(ValueError, match=r"loss="):
        objective_of(model, [batch], "kfac")


def test_examples_without_labels_are_skipped_in_token_losses_only():
    model, batch = tiny.UNUSUAL["masked_language_model"]()
    batch["labels"][0] = -100
    assert objective_of(model, [batch], "kfac").loss is token_loss
    model, batch = tiny.UNUSUAL["layoutlm"]()
    batch["labels"][0] = -100
    with pytest.raises(ValueError, match=r"batch 0 .*-100"):
        objective_of(model, [batch], "kfac")


@pytest.mark.parametrize(
    ("counting", "longest"),
    [
        (slice(None), 256),
        (slice(0, 20), 300),  # no label of the last tokens counts
        (slice(44, 45), 300),  # or only that of the first of them, which a causal model does not predict
    ],
)
def test_the_loss_of_a_long_text_is_found_on_its_end(counting, longest):
    model = tiny.build("LlamaForCausalLM", **tiny.WORDS, **tiny.LAYERS, num_key_value_heads=2).eval()
    ids = torch.arange(600).view(2, 300) % 7 + 1
    labels = torch.full_like(ids, -100)
    labels[:, counting] = ids[:, counting]
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _, args, output: seen.append(args[0].shape[1]))
    assert objective_of(model, [{"input_ids": ids, "labels": labels}], "kfac").loss is causal_loss
    assert max(seen) == longest


@pytest.mark.parametrize("name", ["choices", "falcon"])
def test_the_loss_is_found_in_half_precision_too(name):
    model, batch = tiny.UNUSUAL[name]()
    assert objective_of(model.to(torch.bfloat16), [batch], "kfac").loss is (LOSSES[name])


def test_a_span_loss_is_the_mean_of_its_ends():
    model = tiny.build("BertForQuestionAnswering", **tiny.WORDS, **tiny.LAYERS).eval()
    ids = torch.tensor([[5, 6, 7, 8], [8, 7, 6, 5]])
    ends = {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])}
    outputs = model(input_ids=ids)
    expected = cross_entropy(outputs.start_logits, ends["start_positions"], reduction="sum") / 2
    expected = expected + cross_entropy(outputs.end_logits, ends["end_positions"], reduction="sum") / 2
    torch.testing.assert_close(span_loss(model, {"input_ids": ids, **ends}), expected)


def test_span_losses_are_found_from_the_batch():
    model = tiny.build("BertForQuestionAnswering", **tiny.WORDS, **tiny.LAYERS).eval()
    batch = tiny.text() | {
        "start_positions": torch.tensor([1, 1, 2, 1]),
        "end_positions": torch.tensor([2, 2, 3, 1]),
    }
    assert objective_of(model, [batch], "kfac").loss is span_loss
    cut_off = batch | {"start_positions": torch.tensor([10, 1, 2, 1]), "end_positions": torch.tensor([10, 2, 3, 1])}
    assert objective_of(model, [cut_off], "kfac").loss is span_loss
    torch.testing.assert_close(
        span_loss(model, cut_off), span_loss(model, {name: values[1:] for name, values in cut_off.items()})
    )
    unmasked = {name: values[:1] for name, values in batch.items() if name != "attention_mask"}
    torch.testing.assert_close(span_loss(model, unmasked), span_loss(model, {n: v[:1] for n, v in batch.items()}))
    padding = batch["attention_mask"].sum(1).tolist().index(min(batch["attention_mask"].sum(1).tolist()))
    at_padding = {name: values[padding : padding + 1] for name, values in batch.items()}
    at_padding["end_positions"] = batch["attention_mask"][padding].sum()[None]  # the first after the text
    alone = {**at_padding, "end_positions": torch.tensor([len(batch["input_ids"][0])])}
    assert at_padding["end_positions"] < len(batch["input_ids"][0])
    torch.testing.assert_close(span_loss(model, at_padding), span_loss(model, alone))


def test_a_single_example_may_have_any_number_of_patches():
    """Two pictures or one: the statistics are sums over the tokens of all patches."""
    model, one = tiny.UNUSUAL["qwen2_vl"]()
    ids, labels = (torch.cat([one[name][:, :5], one[name]], 1) for name in ("input_ids", "labels"))
    two = {**one, "input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == 3).long()}
    two |= {name: torch.cat([one[name]] * 2) for name in ("pixel_values", "image_grid_thw")}
    data = prepare_batches(model, [one, two])
    targets = find_targets(model, data[0]).targets
    loss = objective_of(model, data, "kfac").loss
    both, first = (collect(model, some, targets, loss=loss)["inputs"] for some in (data, data[:1]))
    name = next(target.name for target in targets if target.name.endswith("visual.blocks.0.attn.qkv"))
    torch.testing.assert_close(both[name], 1.5 * first[name])  # per example
    padded = {**two, "attention_mask": (torch.arange(ids.shape[1]) < ids.shape[1] - 1).long()[None]}
    whole = {**one, "attention_mask": torch.ones_like(one["input_ids"])}
    with pytest.raises(ValueError, match="belong to no mask"):  # pictures may be padded, too
        collect(model, [whole, padded], targets, loss=loss)
    for wrong in ({"input_ids": torch.cat([ids, ids])}, {"labels": labels[0]}):
        with pytest.raises(ValueError, match=r"batch 0 .*one example"):
            prepare_batches(model, [{**two, **wrong}])


def test_pictures_that_are_not_one_for_each_example_need_batches_of_one_example():
    """The model takes such a batch, but none of its examples."""
    model, batch = tiny.llava()
    ids = batch["input_ids"]
    ids[0, 4:8], ids[1, :4] = 3, 5
    model(**batch)
    with pytest.raises(ValueError, match="batches of one example"):
        find_targets(model, batch)


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["choices", "llava", "qwen2_vl", "florence2", "whisper", "swin", "patchtst", "canine", "switch", "speech", "wavlm"],
)
def test_an_unusual_model_is_compressed_saved_and_loaded(name):
    """`compress` itself saves and loads the model and compares the outputs."""
    model, batch = tiny.UNUSUAL[name]()
    _, report = eckart.compress(model, [batch], 0.5, "drone")
    assert report.parameters[1] < report.parameters[0]
