"""Probing: every linear layer is a target or has a reason not to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import BarkSemanticConfig, BarkSemanticModel, Blip2Config, Blip2ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from eckart.calibration.statistics import collect
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import Inputs, Plain, weigh
from eckart.model.batches import columns
from eckart.model.layers import factorize_target
from eckart.model.probing import NO_WORDS, is_embedding, is_linear, shortened
from eckart.model.targets import Targets, find_targets, in_selector, weight_of
from tests import tiny

BATCH = tiny.collate(tiny.samples(2))


def found(model, **options) -> Targets:
    return find_targets(model, BATCH, **options)


def names(result: Targets) -> list[str]:
    return [target.name for target in result.targets]


def long_texts(padded: int = 0) -> dict[str, Tensor]:
    """Two texts of 300 tokens, the second with some padding."""
    ids = torch.randint(4, tiny.VOCABULARY, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 300 - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask}


LLAMA_LAYER = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
BERT_LAYER = [
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
]
GPT2_LAYER = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
EXPECTED = {
    "bert": [f"bert.encoder.layer.{i}.{name}" for i in range(2) for name in BERT_LAYER] + ["bert.pooler.dense"],
    "gpt2": [f"transformer.h.{i}.{name}" for i in range(2) for name in GPT2_LAYER],
    "llama": [f"model.layers.{i}.{name}" for i in range(2) for name in LLAMA_LAYER],
}
HEADS = {"bert": "classifier", "gpt2": "score", "llama": "score"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_linear_layers_but_the_head_are_targets_in_order_of_execution(family):
    result = found(tiny.FAMILIES[family]())
    assert names(result) == EXPECTED[family]
    assert result.excluded == {HEADS[family]: "is a head"}


def test_every_linear_layer_is_a_target_or_has_a_reason():
    model = tiny.llama()
    result = found(model, include=["*.1.*"], exclude=["*.mlp.*"])
    linear = {name for name, module in model.named_modules() if is_linear(module)}
    assert set(names(result)) | set(result.excluded) == linear
    assert not set(names(result)) & set(result.excluded)


class Doubled(nn.Linear):
    """A subclass of Linear that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Spelled(nn.Linear):
    """A subclass of Linear that computes the same, as Falcon's."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_a_subclass_of_linear_is_a_target_if_it_computes_the_same():
    assert is_linear(nn.Linear(1, 1))
    assert is_linear(Conv1D(1, 1))
    assert not is_linear(nn.Embedding(1, 1))
    model = tiny.bert()
    for kind, layer in ((Doubled, 0), (Spelled, 1)):
        attention = model.bert.encoder.layer[layer].attention.self
        attention.query = kind(16, 16)
    result = found(model)
    assert names(result) == EXPECTED["bert"][1:]
    assert "Doubled" in result.excluded[EXPECTED["bert"][0]]


def test_an_embedding_that_changes_its_weight_cannot_be_a_target():
    class Special(nn.Embedding):
        pass

    assert is_embedding(nn.Embedding(1, 1))
    assert not is_embedding(nn.Embedding(1, 1, max_norm=1.0))
    assert not is_embedding(Special(1, 1))


# --- who reads what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layer", "groups"),
    [
        (
            "bert",
            "bert.encoder.layer.1.",
            {"attention.self.query": ["attention.self.query", "attention.self.key", "attention.self.value"]},
        ),
        (
            "llama",
            "model.layers.1.",
            {
                "self_attn.q_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                "mlp.gate_proj": ["mlp.gate_proj", "mlp.up_proj"],
            },
        ),
        ("gpt2", "transformer.h.1.", {}),
    ],
)
def test_targets_that_read_one_tensor_share_their_input(family, layer, groups):
    targets = [t for t in found(tiny.FAMILIES[family]()).targets if t.name.startswith(layer)]
    expected = {layer + name: layer + first for first, members in groups.items() for name in members}
    assert {t.name: t.input_of for t in targets} == {t.name: expected.get(t.name, t.name) for t in targets}


def test_the_first_reader_is_always_a_target():
    """Also if the first layer that reads the tensor is excluded: statistics are gathered for targets alone."""
    result = found(tiny.bert(), exclude=["*.query"])
    readers = {target.name: target.input_of for target in result.targets}
    assert set(readers.values()) <= set(readers)
    assert readers["bert.encoder.layer.0.attention.self.value"] == "bert.encoder.layer.0.attention.self.key"


# --- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*.query", "*.key"], [], [name for name in EXPECTED["bert"] if name.endswith(("query", "key"))]),
        (["*"], ["*.pooler.*", "*.layer.0.*"], [name for name in EXPECTED["bert"] if ".layer.1." in name]),
        (["*.query"], ["*.0.*"], ["bert.encoder.layer.1.attention.self.query"]),
    ],
)
def test_targets_match_an_include_pattern_and_no_exclude_pattern(include, exclude, expected):
    result = found(tiny.bert(), include=include, exclude=exclude)
    assert names(result) == expected
    assert "pattern" in result.excluded["bert.pooler.dense"]


def test_patterns_match_whole_names():
    with pytest.raises(ValueError, match=r"\.query .*pattern"):
        found(tiny.bert(), include=["query"])


# --- reasons ---------------------------------------------------------------------------------------------------------


def test_a_tied_head_shares_its_weight():
    model = tiny.causal_llama()
    batch = dict(BATCH, labels=BATCH["input_ids"])
    result = find_targets(model, batch, heads=True)
    assert result.excluded == {"lm_head": "shares its weight with model.embed_tokens"}
    assert find_targets(model, batch).excluded == {"lm_head": "is a head"}


def test_two_layers_with_one_weight_are_both_excluded():
    model = tiny.llama()
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    excluded = found(model).excluded
    assert excluded["model.layers.0.mlp.up_proj"] == "shares its weight with model.layers.0.mlp.gate_proj"
    assert excluded["model.layers.0.mlp.gate_proj"] == "shares its weight with model.layers.0.mlp.up_proj"


def test_a_layer_that_never_runs_is_excluded():
    model = tiny.llama()
    model.model.spare = nn.Linear(2, 2)
    assert found(model).excluded["model.spare"] == "its forward did not run for the batch"


def test_order_is_of_execution_not_of_definition():
    model = tiny.bert()
    for layer in model.bert.encoder.layer:
        layer._modules["attention"] = layer._modules.pop("attention")  # now the last of the layer by definition
    defined = [name for name, module in model.named_modules() if is_linear(module)]
    assert defined[:-1] != EXPECTED["bert"]
    assert names(found(model)) == EXPECTED["bert"]


def test_no_targets_is_an_error_that_gives_each_reason():
    model = tiny.llama()
    model.model.spare = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"\bmodel\.layers\.0\.self_attn\.q_proj .*\bscore .*\bmodel\.spare "):
        found(model, exclude=["*.layers.*"])


# --- long texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [long_texts(), long_texts(padded=5)], ids=["whole", "padded"])
def test_few_tokens_of_long_texts_tell_the_same(batch):
    model = tiny.causal_llama()
    lengths = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    assert find_targets(model, batch) == find_targets(model, columns(batch, "attention_mask", torch.arange(9)))
    assert max(lengths) < 300


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_shortened_text_keeps_its_share_of_padding_on_its_side(left):
    batch = long_texts(padded=150)
    batch["input_ids"][batch["attention_mask"] == 0] = tiny.PAD
    batch = {name: values.flip(1) if left else values for name, values in batch.items()}
    short = shortened(tiny.causal_llama(), batch)
    whole, half = short["input_ids"]
    assert torch.equal(whole, batch["input_ids"][0, -256:])
    text = batch["input_ids"][1][batch["attention_mask"][1] == 1][-128:]
    padding = torch.full((128,), tiny.PAD)
    assert torch.equal(half, torch.cat([padding, text] if left else [text, padding]))
    assert torch.equal(short["attention_mask"][1], half.ne(tiny.PAD).long())


def test_layers_that_a_short_text_refuses_are_probed_with_the_long_one():
    """Longformer pads texts to whole windows, so its layers read more than the tokens of a shorter text."""
    windows = {**tiny.LAYERS, "attention_window": 320, "max_position_embeddings": 700}
    model = tiny.build("LongformerForMaskedLM", vocab_size=tiny.VOCABULARY, pad_token_id=tiny.PAD, **windows)
    ids = torch.randint(4, tiny.VOCABULARY, (2, 640), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert "longformer.encoder.layer.1.output.dense" in names(find_targets(model, batch))
    with pytest.raises(ValueError, match="no targets"):
        find_targets(model, columns(batch, "attention_mask", torch.arange(320)))


@pytest.mark.parametrize("masked", [False, True])
def test_probing_does_not_switch_bigbird_to_full_attention_for_good(masked):
    """It does so when it runs with few tokens."""
    model = tiny.build(
        "BigBirdForMaskedLM", **tiny.LAYERS, block_size=64, num_random_blocks=1, max_position_embeddings=512
    )
    ids = torch.randint(4, tiny.VOCABULARY, (1, 512))
    find_targets(model, {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {}))
    assert {layer.attention.attention_type for layer in model.bert.encoder.layer} == {"block_sparse"}


def test_a_model_of_a_fixed_number_of_tokens_gets_them_all():
    model = tiny.causal_llama()

    def refuse(module, args, kwargs):
        if kwargs["input_ids"].shape[1] != 300:
            raise ValueError("300 tokens are needed")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    batch = {"input_ids": long_texts()["input_ids"]}
    assert names(find_targets(model, batch)) == names(find_targets(tiny.causal_llama(), batch))


# --- the model afterwards --------------------------------------------------------------------------------------------


def test_probing_does_not_change_the_model():
    """Not even the mode of a block in eval mode within a model in training."""
    model = tiny.bert().train()
    model.bert.encoder.layer[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    found(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_the_model_is_restored_if_the_batch_does_not_fit():
    model = tiny.bert().train()
    with pytest.raises(ValueError, match="input_ids"):
        find_targets(model, {"nothing_of_the_kind": torch.zeros(1)})
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_factorized_target_is_no_target():
    """Its factors must not be factorized again."""
    model = tiny.bert()
    name = "bert.encoder.layer.0.output.dense"
    factorize_target(model, name, torch.ones(16, 2), torch.ones(2, 40))
    assert names(found(model)) == [other for other in EXPECTED["bert"] if other != name]


# --- what running the model shows ------------------------------------------------------------------------------------

NAME = "model.layers.0.mlp.up_proj"


def changed(forward) -> Targets:
    """Find targets if the first feed-forward block runs `forward(block, x)`."""
    model = tiny.llama()
    block = model.model.layers[0].mlp
    block.forward = lambda x: forward(block, x)
    return found(model)


def plain(block, x):
    return block.down_proj(block.act_fn(block.gate_proj(x)) * block.up_proj(x))


@pytest.mark.parametrize(
    "forward",
    [
        lambda block, x: plain(block, x) + x @ block.up_proj.weight.T @ block.up_proj.weight,
        # unseen by torch, as in a kernel
        lambda block, x: plain(block, x) * float(block.up_proj.weight.detach().numpy().sum()),
    ],
)
def test_a_layer_whose_weight_is_used_outside_its_forward_is_excluded(forward):
    """Its statistics would not know of the other use."""
    result = changed(forward)
    assert result.excluded[NAME] == "its weight is used outside its forward"
    assert len(result.targets) == len(EXPECTED["llama"]) - 1


def test_a_layer_with_an_attribute_that_low_rank_layers_lack_is_excluded():
    result = changed(lambda block, x: plain(block, x) if block.up_proj.reset_parameters else x)
    assert result.excluded[NAME].startswith("cannot be replaced: ")
    assert "reset_parameters" in result.excluded[NAME]


def test_a_layer_that_also_reads_inputs_of_no_example_is_excluded():
    """Its gradient cannot be attributed to examples."""
    result = changed(lambda block, x: plain(block, x) + block.up_proj(torch.ones(1, 16)).sum())
    assert result.excluded[NAME] == "not all of its inputs belong to examples of the batch"


def test_unsampled_layers_are_targets_without_statistics():
    model = tiny.ARCHITECTURES["deberta-v3"].build().eval()
    result = found(model, unsampled=True)
    mixed = [target for target in result.targets if not target.sampled]
    assert {target.name.rpartition(".")[2] for target in mixed} == {"query_proj", "key_proj"}
    assert {target.name for target in mixed} == set(found(model).excluded) - set(result.excluded)
    statistics = collect(model, [BATCH], [target for target in result.targets if target.sampled])
    with pytest.raises(ValueError, match=r"targets\.unsampled"):
        weigh(Inputs(kind="inputs"), mixed[0], statistics)
    before = model(**BATCH).logits
    for target in result.targets:
        weight = weight_of(model.get_submodule(target.name))
        parts = decompose(weight, weigh(Plain(kind="none"), target, statistics))
        factorize_target(model, target.name, *parts.truncate(min(weight.shape)))
    torch.testing.assert_close(model(**BATCH).logits, before, rtol=1e-4, atol=1e-4)


def test_a_layer_that_reads_tokens_and_something_else_is_excluded():
    result = changed(lambda block, x: plain(block, x) + block.up_proj(x.mean(1)).mean())
    assert result.excluded[NAME] == "its inputs are not the tokens of attention_mask"


def test_a_layer_that_runs_once_for_each_token_is_a_target():
    def one_by_one(block, x):
        up = torch.stack([block.up_proj(token) for token in x.unbind(1)], 1)
        return block.down_proj(block.act_fn(block.gate_proj(x)) * up)

    for length in (1, 5):  # a batch of one token is no reason to think that it runs once
        model = tiny.llama()
        block = model.model.layers[0].mlp
        block.forward = lambda x, block=block: one_by_one(block, x)
        batch = {name: values[:, :length] for name, values in BATCH.items() if name != "labels"}
        by_name = {target.name: target for target in find_targets(model, batch).targets}
        assert by_name[NAME].repeated
        assert by_name[NAME].mask == "attention_mask"
        assert not any(target.repeated for name, target in by_name.items() if name != NAME)


class _OtherInputs(nn.Module):
    """A layer that reads other inputs than its neighbors from the second of three calls on."""

    def __init__(self, map: nn.Linear) -> None:
        super().__init__()
        self.map = map
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.map(x if self.calls % 3 == 1 else x + 1)


def test_layers_share_their_input_only_if_all_their_calls_do():
    by_name = {target.name: target for target in found(tiny.albert()).targets}
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    assert by_name[f"{layer}attention.key"].input_of == f"{layer}attention.query"
    assert by_name[f"{layer}attention.query"].input_of == f"{layer}attention.query"

    model = tiny.albert()
    attention = model.albert.encoder.albert_layer_groups[0].albert_layers[0].attention
    attention.key = _OtherInputs(attention.key)
    by_name = {target.name: target for target in found(model).targets}
    assert by_name[f"{layer}attention.key.map"].input_of == f"{layer}attention.key.map"


# --- tokens of a decoder ---------------------------------------------------------------------------------------------


def translation() -> dict[str, torch.Tensor]:
    """Return a batch whose encoder and decoder texts have one length."""
    inputs = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    return {**inputs, **{f"decoder_{name}": values for name, values in inputs.items()}, "labels": BATCH["input_ids"]}


@pytest.mark.parametrize("missing", [["decoder_attention_mask"], ["decoder_input_ids", "decoder_attention_mask"]])
def test_a_decoder_without_a_mask_is_an_error(missing):
    batch = {name: values for name, values in translation().items() if name not in missing}
    with pytest.raises(ValueError, match=rf"^[^:]*\b{missing[0]}\b"):
        find_targets(tiny.ARCHITECTURES["bart"].build(), batch)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_sides_of_one_length_are_told_apart(family):
    masks = {target.mask for target in find_targets(tiny.ARCHITECTURES[family].build(), translation()).targets}
    assert masks == {"attention_mask", "decoder_attention_mask"}


def test_an_encoder_alone_that_labels_tokens_needs_no_mask_of_a_decoder():
    inputs = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    batch = {**inputs, "labels": torch.zeros_like(BATCH["input_ids"])}
    assert len(find_targets(tiny.of("T5ForTokenClassification", **tiny.T5)(), batch).targets) == 12


def test_a_decoder_that_reads_what_the_encoder_reads_has_its_mask():
    model = tiny.of(
        "BartForSequenceClassification", **tiny.BART, vocab_size=tiny.VOCABULARY + 1, eos_token_id=tiny.VOCABULARY
    )()
    ids = torch.tensor([[3, 4, 5, tiny.VOCABULARY]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([1])}
    result = find_targets(model, batch)
    assert {target.mask for target in result.targets} == {"attention_mask"}


def test_only_embeddings_of_words_are_targets():
    """RoBERTa computes positions for each text. A text may be longer than those that calibrate."""
    model = tiny.of("RobertaForSequenceClassification", **tiny.LAYERS, max_position_embeddings=64)()
    result = found(model, embeddings=True)
    assert [target.name for target in result.targets if target.looks_up] == ["roberta.embeddings.word_embeddings"]
    assert result.excluded["roberta.embeddings.position_embeddings"] == NO_WORDS


class TestModulesThatMustNotBeReplaced:
    """Their replacement would be silently wrong, so each has a reason."""

    def excluded(self, change: Callable[[nn.Linear, nn.Module], None]) -> str:
        model = tiny.bert()
        intermediate = model.bert.encoder.layer[0].intermediate
        change(intermediate.dense, intermediate)
        return found(model).excluded["bert.encoder.layer.0.intermediate.dense"]

    def test_a_hook_on_the_layer(self) -> None:
        assert "hook" in self.excluded(lambda map, _: map.register_forward_hook(lambda *args: 2 * args[2]))

    def test_a_forward_of_its_own(self) -> None:
        assert "patched forward" in self.excluded(
            lambda map, _: setattr(map, "forward", lambda x: 2 * (x @ map.weight.T))
        )

    def test_a_call_by_another_reference(self) -> None:
        def by_reference(map: nn.Linear, parent: nn.Module) -> None:
            kept = [map]
            parent.forward = lambda x: parent.intermediate_act_fn(kept[0](x))  # type: ignore[method-assign]

        assert "not called through its name" in self.excluded(by_reference)

    def test_inputs_in_order_of_tokens(self) -> None:
        """Tokens first, then examples, flattened: their number is the same."""

        def time_first(map: nn.Linear, parent: nn.Module) -> None:
            def forward(x: Tensor) -> Tensor:
                y = map(x.transpose(0, 1).reshape(-1, x.shape[-1]))
                return parent.intermediate_act_fn(y.view(x.shape[1], x.shape[0], -1).transpose(0, 1))

            parent.forward = forward  # type: ignore[method-assign]

        assert "order of the examples" in self.excluded(time_first)

    def test_tokens_that_the_model_makes_up(self) -> None:
        """Always eight, whatever the batch has."""

        def padded(map: nn.Linear, parent: nn.Module) -> None:
            def forward(x: Tensor) -> Tensor:
                y = map(torch.nn.functional.pad(x, (0, 0, 0, 8))[:, :8])
                return parent.intermediate_act_fn(torch.nn.functional.pad(y, (0, 0, 0, 8))[:, : x.shape[1]])

            parent.forward = forward  # type: ignore[method-assign]

        assert "not the tokens of" in self.excluded(padded)


def test_heads_elsewhere_than_beside_the_backbone_and_what_selects_patches_are_no_targets() -> None:
    config = BarkSemanticConfig(
        hidden_size=16, num_layers=1, num_heads=2, input_vocab_size=64, output_vocab_size=50, block_size=32
    )
    found = find_targets(BarkSemanticModel(config).eval(), {"input_ids": torch.arange(12)[None]})
    assert found.excluded == {"lm_head": "is a head"}
    assert in_selector("model.patcher.layers.0.self_attn.q_proj", ())  # BLT's
    assert not in_selector("vision.patch_embed.projection", ())


def test_a_layer_between_the_parts_of_a_model_that_writes_text_is_a_target() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    image = {**sizes, "image_size": 8, "patch_size": 4}
    reader = {**sizes, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
    text = {"model_type": "opt", "vocab_size": 64, "ffn_dim": 24, "word_embed_proj_dim": 16, **sizes}
    config = Blip2Config(
        vision_config=image, qformer_config=reader, text_config=text, num_query_tokens=2, image_token_index=63
    )
    model = Blip2ForConditionalGeneration(config).eval()
    ids = torch.arange(3, 11).repeat(2, 1)
    ids[:, :2] = 63
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": ids}
    result = find_targets(model, batch)
    assert "language_projection" in [target.name for target in result.targets]
    assert result.excluded["language_model.lm_head"] == "is a head"
