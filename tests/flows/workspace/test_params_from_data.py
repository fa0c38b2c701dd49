"""What a new workspace's params.yaml says of a model and data: read off the files, and accepted by the check."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import RobertaConfig, RobertaForSequenceClassification, T5Config

from flows.workspace import params_from_data
from tasks.artifacts.errors import EckartError
from tasks.config import validation, yaml_edit
from tasks.models import sentence_files
from tests.workspace import BASE, REPOSITORY, bert, reviews, tiny_tokenizer, write_base

RAW = Path("data/raw")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a tiny base model, the default study and no data yet."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / "params.yaml", tmp_path)
    RAW.mkdir(parents=True)
    write_base(Path(BASE))
    return tmp_path


def table(name: str = "rows.csv", **columns: Any) -> str:
    frame = pd.DataFrame({"text": reviews()["text"], **columns})
    (RAW / name).parent.mkdir(exist_ok=True)
    frame.to_csv(RAW / name, index=False)
    return str(RAW / name)


def told(source: str, **given: Any) -> dict[str, Any]:
    options = {"revision": None, "text": None, "text_pair": None, "label": None, "task": None} | given
    return params_from_data.of_data(source, BASE, **options)[0]


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (["good", "bad", "so so"], "classification"),
        ([1, 2, 3, 4, 5], "classification"),
        ([True, False], "classification"),
        ([0.5, 1.25, 2.0], "regression"),
        (list(range(30)), "regression"),
        (["plot|cast", "cast", "", "music|plot"], "multi_label_classification"),
    ],
)
def test_the_label_tells_the_task(workspace: Path, labels: list[Any], task: str) -> None:
    source = table(label=[labels[row % len(labels)] for row in range(60)])
    assert told(source)["data"]["task"] == task


def lines(**columns: Any) -> str:
    """Write JSON lines, and return their path."""
    pd.DataFrame(columns).to_json(RAW / "rows.jsonl", orient="records", lines=True)
    return str(RAW / "rows.jsonl")


def test_words_with_tags_are_token_classification(workspace: Path) -> None:
    words = [["the", "plot", "is", f"w{row}"] for row in range(60)]
    found = told(lines(text=words, label=[["O", "B-X", "O", tag] for tag in ("O", "B-Y")] * 30))
    assert found["data"]["task"] == "token_classification"
    assert found["data"]["max_length"] == 8


@pytest.mark.parametrize("several", [False, True])
def test_answers_are_question_answering(workspace: Path, several: bool) -> None:
    answers = [{"text": [f"man {row}"], "answer_start": [4]} for row in range(60)]
    one = [[{"text": f"man {row}", "answer_start": 4}] for row in range(60)]
    texts = {"text": [f"who {row}?" for row in range(60)], "context": [f"The man {row} went" for row in range(60)]}
    found = told(lines(**texts, label=one if several else answers), text_pair="context")
    assert found["data"]["task"] == "question_answering"


def test_what_is_told_makes_params_without_a_mistake(workspace: Path) -> None:
    source = table(stars=[row % 3 for row in range(60)])
    yaml_edit.update({**told(source, label="stars"), "model": {"base": BASE}})
    typed = validation.check()
    assert typed["data"].columns.label == "stars"
    assert typed["data"].sizes.train is None


def test_summaries_get_a_length_and_no_onnx_file(workspace: Path) -> None:
    source = table(label=["the plot is dull"] * 60)
    with pytest.raises(EckartError, match="no bert for summarization"):
        told(source, task="summarization")
    T5Config(vocab_size=99, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(BASE)
    yaml_edit.update({**told(source, task="summarization"), "model": {"base": BASE}})
    typed = validation.check()
    assert typed["data"].target_length == 8  # four words and two special tokens
    assert typed["export"].recipes == ()


def test_rows_fit_into_the_length_and_the_model(workspace: Path) -> None:
    """A review has 6 words, and two special tokens around; twenty of them are more than the model's 64 positions."""
    source = table(label=[row % 2 for row in range(60)])
    assert told(source)["data"]["max_length"] == 8
    frame = pd.DataFrame({"text": [" ".join([text] * 20) for text in reviews()["text"]], "label": 30 * [0, 1]})
    frame.to_csv(RAW / "long.csv", index=False)
    assert told("data/raw/long.csv")["data"]["max_length"] == 64


def test_the_positions_of_roberta_begin_after_its_padding(workspace: Path) -> None:
    """Of 34, those for 32 tokens are left, as the padding has the id 1."""
    config = RobertaConfig(
        vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=1
    )
    config.max_position_embeddings = 34
    RobertaForSequenceClassification(config).save_pretrained(BASE)
    source = table(text=[" ".join([text] * 20) for text in reviews()["text"]], label=30 * [0, 1])
    assert told(source)["data"]["max_length"] == 32


@pytest.mark.parametrize(
    ("outputs", "labels", "knows"),
    [
        (None, [0, 1, 2], True),
        (None, [0, 1], False),
        (None, ["bad", "good", "so so"], False),  # which output is which, nobody says
        (["so so", "good", "bad"], ["bad", "good", "so so"], True),
        (["joy", "anger", "fear"], ["bad", "good", "so so"], False),
        (["1 star", "2 stars", "3 stars"], [1, 2, 3], False),
    ],
)
def test_a_model_that_knows_the_labels_is_taken_as_it_is(
    workspace: Path, outputs: list[str] | None, labels: list[Any], knows: bool
) -> None:
    model = bert(num_labels=3)
    if outputs:
        model.config.id2label = dict(enumerate(outputs))
    model.save_pretrained(BASE)
    tiny_tokenizer().save_pretrained(BASE)
    found = told(table(label=[labels[row % len(labels)] for row in range(60)]))
    assert found.get("teacher") == ({"epochs": 0} if knows else None)


@pytest.mark.parametrize("labels", [["", "a", "b"], ["a"], [f"summary {row}" for row in range(60)]])
def test_rows_that_the_study_would_refuse_are_refused_at_once(workspace: Path, labels: list[str]) -> None:
    with pytest.raises(EckartError):
        told(table(label=[labels[row % len(labels)] for row in range(60)]))


def test_columns_fit_the_task(workspace: Path) -> None:
    source = table(text_pair=reviews()["text"], label=reviews()["text"])
    with pytest.raises(EckartError, match="no bert for summarization"):  # the column text_pair is left alone
        told(source, task="summarization")
    with pytest.raises(EckartError, match=r"text_pair.*summarization reads one text"):
        told(source, task="summarization", text_pair="text_pair")
    with pytest.raises(EckartError, match=r"text_pair.*needs a second text"):
        told(table("other.csv", label=reviews()["text"]), task="question_answering")


def test_files_named_by_split_are_the_splits(workspace: Path) -> None:
    Path(RAW / "folder").mkdir()
    rows = pd.DataFrame({"text": reviews()["text"], "label": 30 * [0, 1]})
    rows[:40].to_csv(RAW / "folder/train.csv", index=False)
    rows[40:].to_csv(RAW / "folder/test.csv", index=False)
    assert told("data/raw/folder")["data"]["splits"] == {"train": "train", "validation": None, "test": "test"}


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["train.csv", "dev.csv"], ["train", "dev", None]),
        (["Train.csv", "Test.csv", "valid.CSV"], ["Train", "valid", "Test"]),
    ],
)
def test_splits_have_their_usual_names(workspace: Path, files: list[str], splits: list[str | None]) -> None:
    for first, name in enumerate(files):
        frame = pd.DataFrame({"text": reviews()["text"], "label": 30 * [0, 1]})
        (RAW / "folder").mkdir(exist_ok=True)
        frame[20 * first : 20 * first + 20].to_csv(RAW / "folder" / name, index=False)
    assert list(told("data/raw/folder")["data"]["splits"].values()) == splits


def test_two_other_names_of_validation_are_refused_but_its_own_wins(workspace: Path) -> None:
    for name in ("train.csv", "dev.csv", "val.csv"):
        table(f"folder/{name}", label=30 * [0, 1])
    with pytest.raises(EckartError, match=r"dev\.csv and .*val\.csv"):
        told("data/raw/folder")
    table("folder/validation.csv", label=30 * [0, 1], text=[f"a {text}" for text in reviews()["text"]])
    assert told("data/raw/folder")["data"]["splits"]["validation"] == "validation"


def running_text() -> str:
    """Write a table of texts alone, and return its path."""
    texts = [f"{row}, {text}" for row in range(99) for text in reviews()["text"]]
    pd.DataFrame({"text": texts}).to_csv(RAW / "long.csv", index=False)
    return "data/raw/long.csv"


def test_text_alone_is_running_text(workspace: Path) -> None:
    found = told(running_text())
    assert found["data"]["task"] == "language_modeling"
    assert found["data"]["columns"]["label"] is None
    assert found["data"]["written"]["examples"] == found["data"]["sizes"]["calibration"]
    assert found["evaluate"]["texts"]


def test_lines_of_a_text_file_are_joined_to_the_text_of_the_file(workspace: Path) -> None:
    table = running_text()
    file = RAW / "long.txt"
    file.write_text("".join(f"{text}\n" for text in pd.read_csv(table)["text"]))
    assert told(str(file))["data"]["separator"] == ""
    assert told(table)["data"].get("separator") is None


@pytest.mark.parametrize(("begins_with", "first"), [("[CLS]", "bos"), ("[MASK]", None)])
def test_blocks_begin_with_the_token_that_begins_texts(workspace: Path, begins_with: str, first: str | None) -> None:
    """A tokenizer may have a beginning-of-text token and not use it, as SmolLM2's."""
    tokenizer = tiny_tokenizer()  # begins each text with [CLS]
    tokenizer.bos_token = begins_with
    tokenizer.save_pretrained(BASE)
    data = told(running_text())["data"]
    assert [data.get("first"), data["written"].get("first")] == [first, first]


def test_an_embedding_study_has_the_pooling_of_its_base_and_needs_no_label(workspace: Path) -> None:
    """A column label may be there for something else, unless it is named."""
    prompts = '{"prompts": {"query": "the "}, "default_prompt_name": "query"}'
    sentence_files.write(Path(BASE), {"1_Pooling/config.json": '{"pooling_mode": "lasttoken"}'})
    sentence_files.write(Path(BASE), {"sentence_bert_config.json": '{"max_seq_length": 9}'})
    sentence_files.write(Path(BASE), {"config_sentence_transformers.json": prompts})
    texts = [f"{word} {text}" for word in ("the", "and", "is") for text in reviews()["text"]]
    source = table(text=texts, label=["a", "b", "c"] * 60)
    yaml_edit.update({**told(source, task="embedding"), "model": {"base": BASE}})
    data = validation.check()["data"]
    assert (data.pooling, data.columns.label) == ("lasttoken", None)
    assert (data.prefix, data.max_length) == ("the ", 9)
    with pytest.raises(EckartError, match="text_pair"):
        told(source, task="embedding", label="label")


@pytest.mark.parametrize("given", [{"text": "body"}, {"label": "stars"}, {}])
def test_columns_that_are_not_there_are_asked_for_by_those_that_are(workspace: Path, given: dict[str, str]) -> None:
    pd.DataFrame({"review": ["a", "b"], "grade": [1, 2]}).to_csv(RAW / "other.csv", index=False)
    with pytest.raises(EckartError, match="review, grade"):
        told("data/raw/other.csv", **given)


def test_a_folder_that_is_no_model_is_named(workspace: Path) -> None:
    Path(BASE, "config.json").write_text(json.dumps({}))
    with pytest.raises(EckartError, match=BASE):
        told(table(label=[row % 2 for row in range(60)]))


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="is about machines without sentencepiece")
def test_a_tokenizer_that_needs_a_package_is_refused_with_its_name(workspace: Path) -> None:
    """transformers would name another one."""
    folder = Path("models/base/pieces")
    T5Config().save_pretrained(folder)
    (folder / "spiece.model").write_bytes(b"a SentencePiece model")
    with pytest.raises(EckartError, match="pip install sentencepiece"):
        params_from_data.read_base(str(folder), None)
