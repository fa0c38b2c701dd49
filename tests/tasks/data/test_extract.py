"""The extract stage on files of every format: what the splits hold, and what a broken source is told."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from tasks.artifacts.task_spec import SPLITS, load_split, load_task
from tasks.config.schema import Data
from tasks.data.loading import encoded
from tasks.data.splitting import split_source
from tasks.extract import extract
from tasks.runtime.stage_runner import StageError
from tests.workspace import digests, reviews, tiny_params, tiny_tokenizer, write_params

WRITERS: dict[str, Callable[[pd.DataFrame, str], Any]] = {
    ".csv": lambda frame, file: frame.to_csv(file, index=False),
    ".tsv": lambda frame, file: frame.to_csv(file, index=False, sep="\t"),
    ".jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True),
    ".json": lambda frame, file: frame.to_json(file, orient="records"),
    ".parquet": lambda frame, file: frame.to_parquet(file, index=False),
}
REGRESSION = {"task": "regression", "metric": "pearson"}
GIVEN = {"splits": {"test": "test"}}
SPLIT = ("train", "validation", "test")
ALL = {"sizes": dict.fromkeys((*SPLIT, "calibration"), 1000)}


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace with a cache of its own and no hub."""
    folder = tmp_path / "workspace"
    (folder / "data" / "raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def write(frame: pd.DataFrame | None = None, name: str = "rows", suffix: str = ".csv") -> str:
    """The path of a file under data/raw with the rows of `frame`, or the reviews."""
    file = f"data/raw/{name}{suffix}"
    Path(file).parent.mkdir(exist_ok=True)
    WRITERS[suffix](reviews() if frame is None else frame, file)
    return file


def write_bytes(content: bytes, suffix: str = ".csv") -> str:
    Path(f"data/raw/rows{suffix}").write_bytes(content)
    return f"data/raw/rows{suffix}"


def rows(labels: Any) -> pd.DataFrame:
    """A text of its own for every label."""
    return pd.DataFrame({"text": [f"text number {position}" for position in range(len(labels))], "label": labels})


def run(source: str, **changes: Any) -> dict[str, pd.DataFrame]:
    """The splits of `source`; `changes` are of the section `data`."""
    write_params(Path(), tiny_params(data={"source": source, **changes}))
    extract()
    return {name: load_split(name) for name in (*SPLIT, "calibration")}


def error(source: str, **changes: Any) -> str:
    """The message about `source`, which leaves no splits."""
    with pytest.raises(StageError) as caught:
        run(source, **changes)
    assert not SPLITS.exists()
    return str(caught.value)


def sizes(splits: dict[str, pd.DataFrame]) -> tuple[int, ...]:
    return tuple(map(len, splits.values()))


def texts(splits: dict[str, pd.DataFrame]) -> set[str]:
    return {text for name in SPLIT for text in splits[name]["text"]}


def pairs(frame: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(frame.itertuples(index=False, name=None))


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_splits(suffix: str) -> None:
    frame = reviews().assign(other=range(60))
    splits = run(write(frame, suffix=suffix))
    expected = run(write(frame, "csv"))
    assert all(splits[name].equals(expected[name]) for name in splits)
    assert load_task().labels == ("negative", "positive")
    assert sizes(splits) == (32, 8, 12, 16)


def test_every_row_keeps_its_text_and_its_label() -> None:
    splits = run(write())
    truth = {(text, int(label == "positive")) for text, label in pairs(reviews())}
    assert all(pairs(frame) <= truth for frame in splits.values())
    assert list(splits["train"]) == ["text", "label"]


def test_quotes_and_commas_and_lines_are_part_of_a_text() -> None:
    frame = rows(["a", "b"] * 15)
    frame.loc[0, "text"] = 'it said "no,\nnever" — été'
    splits = run(write(frame), **ALL)
    assert 'it said "no,\nnever" — été' in texts(splits)


def test_a_quote_in_a_tsv_is_a_character() -> None:
    lines = ["text\tlabel", '"open and never closed\ta', *(f"text {i}\t{'ab'[i % 2]}" for i in range(29))]
    splits = run(write_bytes("\n".join(lines).encode(), ".tsv"), **ALL)
    assert '"open and never closed' in texts(splits)


def test_sizes_are_at_most_what_was_asked() -> None:
    train, validation, test, calibration = sizes(run(write(), **ALL))
    assert train + validation + test == len(reviews())
    assert calibration == train
    asked = {"train": 10, "validation": 3, "test": 5, "calibration": 4}
    assert sizes(run(write(), sizes=asked)) == tuple(asked.values())


def test_a_row_stays_where_it_is_as_data_grow() -> None:
    """In its split, whatever rows come; and in the sample, unless one of lower lot takes its place."""
    old, new = (run(write(frame), **ALL) for frame in (reviews().head(40), reviews().sample(frac=1, random_state=0)))
    assert all(pairs(old[name]) <= pairs(new[name]) for name in SPLIT)
    some = {"sizes": {"train": 20, "validation": 4, "test": 6, "calibration": 8}}
    before, after = (run(write(frame), **some) for frame in (reviews().head(40), reviews()))
    for name in SPLIT:
        assert len(before[name]) == len(after[name])
        assert pairs(after[name]) & pairs(old[name]) <= pairs(before[name])


def test_shares_are_met_to_binomial_accuracy() -> None:
    frame = pd.DataFrame({"text": [f"text {number}" for number in range(10_000)], "label": ["a", "b"] * 5_000})
    found = run(write(frame), shares={"validation": 0.1, "test": 0.3}, sizes=dict.fromkeys(SPLIT, 10_000))
    for name, share in {"train": 0.6, "validation": 0.1, "test": 0.3}.items():
        assert abs(len(found[name]) - share * 10_000) < 4 * math.sqrt(10_000 * share * (1 - share))


def test_a_split_that_is_given_takes_none_of_train() -> None:
    write(name="folder/train")
    write(reviews().assign(text=lambda frame: frame["text"] + " so"), "folder/dev")
    splits = run("data/raw/folder", splits={"validation": "dev"}, **ALL)
    assert len(splits["validation"]) == len(splits["train"]) + len(splits["test"]) == 60


def test_equal_texts_are_on_one_side() -> None:
    """Also those with another label."""
    splits = run(write(pd.concat([reviews(), reviews(), reviews().assign(label="negative")])), **ALL)
    sides = [set(splits[name]["text"]) for name in SPLIT]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 60
    assert sum(len(splits[name]) for name in SPLIT) == 180


def test_a_pair_is_carved_as_a_pair() -> None:
    """The same first sentence may stand on both sides, the same pair may not."""
    frame = pd.DataFrame({"text": "one", "other": [f"{i % 40}!" for i in range(80)], "label": ["a", "b"] * 40})
    splits = run(write(frame), columns={"text_pair": "other"}, **ALL)
    sides = [set(splits[name]["text_pair"]) for name in SPLIT]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 40


def test_questions_about_one_context_are_on_one_side() -> None:
    frame = pd.DataFrame({"text": [f"{i}?" for i in range(80)], "text_pair": [f"{i % 20}!" for i in range(80)]})
    params = Data(**tiny_params(data={"task": "question_answering", "metric": "f1", **ALL})["data"])
    splits = split_source({"train": frame}, params)
    sides = [set(splits[name]["text_pair"]) for name in SPLIT]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 20


def test_what_a_given_split_has_is_left_out_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    write(name="folder/train")
    write(reviews().head(12), "folder/dev")
    write(pd.concat([reviews().head(2), reviews().tail(5)]), "folder/test")
    splits = run("data/raw/folder", splits={"validation": "dev", "test": "test"}, **ALL)
    assert sizes(splits)[:3] == (60 - 12 - 5, 12 - 2, 7)
    assert not set(splits["train"]["text"]) & {*splits["validation"]["text"], *splits["test"]["text"]}
    said = capsys.readouterr().out
    assert "train: 17 rows left out" in said
    assert "validation: 2 rows left out" in said


def test_calibration_is_a_part_of_train() -> None:
    splits = run(write())
    assert pairs(splits["calibration"]) < pairs(splits["train"])
    assert not splits["calibration"].duplicated().any()


def test_calibration_is_not_the_head_of_train() -> None:
    splits = run(write())
    assert pairs(splits["calibration"]) != pairs(splits["train"].head(16))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_splits() -> None:
    found = []
    for seed in (3, 3, 5):
        found.append((run(write(), seed=seed), digests(SPLITS)))
    assert found[0][1] == found[1][1]
    assert pairs(found[0][0]["test"]) != pairs(found[2][0]["test"])


def test_splits_are_those_of_the_names_of_files() -> None:
    write(reviews().head(50), "folder/first")
    write(reviews().tail(10).assign(label="positive"), "folder/second", ".jsonl")
    splits = run("data/raw/folder", splits={"train": "first", "test": "second"})
    assert len(splits["test"]) == 10
    assert set(splits["test"]["text"]) == set(reviews().tail(10)["text"])


def test_a_test_split_that_is_not_named_is_not_read() -> None:
    write(name="folder/train")
    write(reviews().assign(text="a leak"), "folder/test")
    assert "a leak" not in set(run("data/raw/folder")["test"]["text"])


def test_a_given_test_split_is_sampled_to_its_size() -> None:
    write(name="folder/train")
    write(reviews().head(20), "folder/test")
    assert len(run("data/raw/folder", **GIVEN, sizes={"test": 7})["test"]) == 7


def test_two_files_of_one_split_are_an_error() -> None:
    """Or else one of them would be dropped in silence."""
    write(name="folder/train")
    write(name="folder/train", suffix=".tsv")
    assert "train.csv" in error("data/raw/folder")


def test_pairs_of_sentences_have_two_texts_and_two_segments() -> None:
    frame = reviews().assign(answer="is it dull")
    splits = run(write(frame), columns={"text": "text", "text_pair": "answer"})
    assert list(splits["train"]) == ["text", "text_pair", "label"]
    inputs = encoded("train", tiny_tokenizer())
    assert all(1 in row for row in inputs["token_type_ids"])
    assert inputs["labels"] == splits["train"]["label"].tolist()


def test_columns_may_have_any_name() -> None:
    frame = reviews().rename(columns={"text": "label", "label": "what it is"})
    splits = run(write(frame), columns={"text": "label", "label": "what it is"})
    assert pairs(splits["train"]) <= {(text, int(label == "positive")) for text, label in pairs(reviews())}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["no", "yes"], ("no", "yes")),
        ([5, 3], ("3", "5")),
        ([True, False], ("False", "True")),
        ([10, 9, 1], ("1", "9", "10")),
    ],
    ids=["strings", "numbers", "truths", "three"],
)
def test_classes_are_numbered_in_the_order_of_their_names(suffix: str, values: list[Any], names: tuple[str]) -> None:
    frame = rows(values * 10)
    splits = run(write(frame, suffix=suffix))
    task, truth = load_task(), {text: str(label) for text, label in pairs(frame)}
    assert task.labels == names
    for split in splits.values():
        assert split["label"].dtype == np.int64
        assert all(truth[text] == task.labels[label] for text, label in pairs(split))


@pytest.mark.parametrize("word", ["NA", "None", "null", "nan", "n/a"])
def test_a_word_that_pandas_takes_for_a_hole_is_a_class(word: str) -> None:
    run(write(rows([word, "yes"] * 15)))
    assert set(load_task().labels) == {word, "yes"}


def test_a_word_that_pandas_takes_for_a_hole_is_a_text() -> None:
    frame = rows(["no", "yes"] * 15)
    frame.loc[3, "text"] = "null"
    splits = run(write(frame), **ALL)
    assert "null" in texts(splits)


def test_classes_of_a_typed_file_keep_their_names() -> None:
    """As data sets of the hub have them, in the order of their ids: the second is what F1 counts (MRPC's names)."""
    names = ["not_equivalent", "equivalent"]
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=names))
    content = {"text": [f"text {position}" for position in range(30)], "label": [0, 1] * 15}
    datasets.Dataset.from_dict(content, features=features).to_parquet("data/raw/rows.parquet")
    splits = run("data/raw/rows.parquet")
    assert load_task().labels == ("not_equivalent", "equivalent")
    ids = {text: position % 2 for position, text in enumerate(content["text"])}
    assert all(
        ids[text] == label for text, label in zip(splits["train"]["text"], splits["train"]["label"], strict=True)
    )


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_regression_has_numbers_and_no_classes(suffix: str) -> None:
    frame = rows([0.5, -1.25, 4.0, 2.0] * 5)
    splits = run(write(frame, suffix=suffix), **REGRESSION)
    assert load_task().labels == ()
    assert load_task().kind == "regression"
    for split in splits.values():
        assert split["label"].dtype == np.float32
        assert pairs(split) <= pairs(frame)


def test_the_task_is_what_the_parameters_say() -> None:
    run(write(), metric="matthews", max_length=9)
    assert (load_task().kind, load_task().metric, load_task().max_length) == ("classification", "matthews", 9)
    assert max(map(len, encoded("train", tiny_tokenizer())["input_ids"])) <= 9


def test_a_changed_file_is_read_anew() -> None:
    """The library's own cache must not answer for it."""
    file = write(rows(["a", "b"] * 15))
    run(file)
    write(rows(["c", "d"] * 15))
    run(file)
    assert load_task().labels == ("c", "d")


# What is wrong, and what the message must say of it.


@pytest.mark.parametrize("role", ["text", "text_pair", "label"])
def test_a_missing_column_is_named_with_those_there_are(role: str) -> None:
    message = error(write(reviews().rename(columns={"label": "mood"})), columns={"label": "mood", role: "absent"})
    assert {"absent", "data.columns", "text", "mood"} <= set(re.findall(r"[\w.]+", message))


def test_an_absent_split_is_named_with_those_there_are() -> None:
    write(name="folder/train")
    write(name="folder/held_out")
    assert re.search(r"\btest\b.*data\.splits.*\bheld_out\b", error("data/raw/folder", **GIVEN))


def test_a_file_has_no_test_split() -> None:
    assert re.search(r"\btest\b.*data\.splits", error(write(), **GIVEN))


def test_too_few_rows_leave_a_split_empty() -> None:
    assert re.search(r"data/raw/rows\.csv.*data\.shares", error(write(rows(["a"]))))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_file_without_rows_is_empty(suffix: str) -> None:
    assert re.match(rf"data/raw/rows{suffix} .*\bempty\b", error(write(rows([]), suffix=suffix)))


def test_a_test_split_without_rows_is_empty() -> None:
    write(name="folder/train", suffix=".parquet")
    write(reviews().head(0), "folder/test", ".parquet")
    assert re.match(r"data/raw/folder/test\.parquet .*\bempty\b", error("data/raw/folder", **GIVEN))


@pytest.mark.parametrize("label", ["good", 1, True])
def test_a_single_class_is_named(label: Any) -> None:
    assert re.search(rf"\blabel\b.* {label!r}", error(write(rows([label] * 20))))


def test_a_class_of_the_test_that_train_has_not_is_named() -> None:
    write(name="folder/train")
    write(reviews().head(5).assign(label="mixed"), "folder/test")
    message = error("data/raw/folder", **GIVEN)
    assert "mixed" in message
    assert "positive" not in message


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["text", "label", "pair"])
def test_empty_cells_are_counted(suffix: str, column: str) -> None:
    frame = reviews().assign(pair="and")
    frame.loc[[3, 5, 8], column] = None
    assert re.search(rf" 3 .*\b{column}\b", error(write(frame, suffix=suffix), columns={"text_pair": "pair"}))


def test_an_empty_cell_of_another_column_is_no_mistake() -> None:
    frame = reviews().assign(remark="fine")
    frame.loc[3, "remark"] = None
    assert sizes(run(write(frame))) == (32, 8, 12, 16)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_an_empty_text_is_an_empty_cell_in_every_format(suffix: str) -> None:
    frame = reviews()
    frame.loc[3, "text"] = ""
    assert re.search(r" 1 .*\btext\b", error(write(frame, suffix=suffix)))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_text_that_is_a_number_is_refused(suffix: str) -> None:
    """The wrong column was named: the tokenizer of a later stage would stumble over it."""
    assert "id" in error(write(reviews().assign(id=range(60)), suffix=suffix), columns={"text": "id"})


def test_words_are_no_regression() -> None:
    assert re.search(r"\blabel\b.*data\.task", error(write(), **REGRESSION))


def test_dates_are_no_regression() -> None:
    frame = rows(list(pd.date_range("2020-01-01", periods=10)))
    assert re.search(r"\blabel\b.*data\.task", error(write(frame, suffix=".parquet"), **REGRESSION))


def test_infinity_is_no_label() -> None:
    assert "label" in error(write(rows([1.0, 2.0, float("inf"), -1.0] * 5)), **REGRESSION)


@pytest.mark.parametrize("labels", [[[0], [1]] * 5, ["a", 1] * 5], ids=["lists", "mixed"])
def test_labels_that_are_no_classes_are_named(labels: list[Any]) -> None:
    lines = [json.dumps({"text": f"text {position}", "label": label}) for position, label in enumerate(labels)]
    assert "label" in error(write_bytes("\n".join(lines).encode(), ".jsonl"))


@pytest.mark.parametrize(
    "source", ["rows.csv", "data/rows.csv", "data/raw/../rows.csv", "./data/splits.csv", "data", "../other/rows.csv"]
)
def test_a_source_outside_data_raw_is_refused(source: str) -> None:
    """DVC watches data/raw alone, and would not see it change."""
    Path("../other").mkdir()
    for file in ("rows.csv", "data/rows.csv", "../other/rows.csv", "data/splits.csv"):
        reviews().to_csv(file, index=False)
    assert re.match(rf"{os.path.normpath(source)} .*\bdata/raw\b", error(source))


def test_a_link_out_of_the_workspace_is_refused(tmp_path: Path) -> None:
    reviews().to_csv(tmp_path / "rows.csv", index=False)
    Path("data/raw/rows.csv").symlink_to(tmp_path / "rows.csv")
    assert error("data/raw/rows.csv").startswith("data/raw/rows.csv ")


@pytest.mark.parametrize("source", ["data/raw/absent.csv", "data/raw/absent"])
def test_an_absent_file_is_named(source: str) -> None:
    assert re.match(rf"{source} .*\bdata\.source\b", error(source))


def test_a_file_of_an_unknown_kind_is_told_the_known_ones() -> None:
    message = error(write_bytes(b"text", ".xlsx"))
    assert all(suffix in message for suffix in WRITERS)


def test_an_empty_folder_is_named() -> None:
    assert re.match(r"data/raw .*\.csv\b", error("data/raw"))


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".csv", b""),
        (".csv", b"text,label\na,b\na,b,c,d\n"),
        (".csv", b'text,label\n"never closed,a\nb,c\n'),
        (".csv", b"text,label\ncaf\xe9,yes\n"),
        (".jsonl", b""),
        (".jsonl", b'{"text": "a", "lab'),
        (".jsonl", b'["a", "b"]\n3\n'),
        (".parquet", b""),
        (".parquet", b"this is no Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(suffix: str, content: bytes) -> None:
    assert error(write_bytes(content, suffix)).startswith(f"data/raw/rows{suffix}")


@pytest.mark.parametrize("source", ["nobody/nothing", "nothing"])
def test_a_data_set_that_the_hub_does_not_give_is_named(source: str) -> None:
    assert re.match(rf"{source} .*data/raw\b", error(source))


def test_a_data_set_of_the_hub_is_taken_from_its_cache(tmp_path: Path) -> None:
    """Where the library keeps what it downloaded once: OWNER___NAME. A folder elsewhere stands for the hub."""
    stand_in = tmp_path / "reviews"
    stand_in.mkdir()
    for name, frame in {"train": reviews(), "validation": reviews().head(12)}.items():
        frame.to_csv(stand_in / f"{name}.csv", index=False)
    datasets.load_dataset(str(stand_in))
    (tmp_path / "cache" / "reviews").rename(tmp_path / "cache" / "owner___reviews")
    splits = run("owner/reviews", splits={"train": "train", "test": "validation"})
    assert len(splits["test"]) == 12
    assert set(splits["test"]["text"]) == set(reviews().head(12)["text"])
    assert load_task().labels == ("negative", "positive")
