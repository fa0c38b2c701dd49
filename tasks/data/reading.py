"""Read the data set that data.source names: a packaged data set, files under data/raw, or a data set of the hub."""

from __future__ import annotations

import csv
import glob
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd

from tasks.artifacts.errors import StageError
from tasks.artifacts.input_folders import FORMATS, RAW
from tasks.artifacts.task_spec import Split
from tasks.config.schema import Columns, Data, Splits, Text
from tasks.data.hub_data import load_from_hub
from tasks.data.label_encoding import is_numeric
from tasks.data.packaged_datasets import PACKAGED
from tasks.nlp_tasks import task_class
from tasks.runtime.stage_runner import say

_NAMES = ("train", "validation", "test")  # of files that are meant as splits, whatever data.splits names
_SEPARATED: Mapping[str, Mapping[str, Any]] = {".csv": {}, ".tsv": {"sep": "\t", "quoting": 3}}
_WITH_CLASSES = ("classification", "multi_label_classification")
_WRITTEN = "written"  # key of a frame's attrs
# Parts of the error messages with which the loaders of `datasets` refuse a file without rows.
_NO_ROWS = re.compile(
    "corresponds to no data|No columns to parse|BatchSize must be|size is 0 bytes|at least one example|^StopIteration"
)


def load_source(params: Data) -> dict[Split, pd.DataFrame]:
    """Load the splits that data.splits names. Their columns get the names text, text_pair and label.

    A packaged data set has only a training split.

    Raises:
        StageError: the source cannot be read, or lacks a split or a column.
    """
    source = _source(params)
    split_names = params.splits.named()
    if absent := [name for name in split_names.values() if name not in source]:
        raise StageError(f"{params.source} has no split {', '.join(absent)}: data.splits may name {', '.join(source)}")
    if ignored := [name for name in source if name not in split_names.values()]:
        say(f"splits that are not used: {', '.join(ignored)} (data.splits names those that are)")
    label = params.columns.label
    frames: dict[Split, pd.DataFrame] = {split: as_frame(source[name](), label) for split, name in split_names.items()}
    if label:
        _keep_spelling(frames.values(), label, params)
    parts = {split: _columns(frame, params) for split, frame in frames.items()}
    if label:
        _give_one_type(parts)
    return parts


def _keep_spelling(frames: Collection[pd.DataFrame], label: str, params: Data) -> None:
    """Spell classes that were read as numbers or booleans as their CSV file does, if another split has words.

    A program may write 1.0 for 1 and TRUE for true. So a spelling that the words lack becomes that of the word that
    differs from it so, or the shortest one in the files.

    Raises:
        StageError: all classes are numbers, and two of them, such as 1.1 and 1.10, are the same.
    """
    if not (written := [(frame, frame.attrs.pop(_WRITTEN)) for frame in frames if _WRITTEN in frame.attrs]):
        return
    words = {word for frame in frames if label in frame for word in _words(frame[label], params.task)}
    if not words:
        _refuse_equal_numbers([cells for frame, cells in written if is_numeric(frame[label])], params.source)
        return
    alike = Counter(map(_plain, words))
    cells_of_files = {cell.strip() for _, cells in written for cell in cells.dropna()}
    shortest_last = sorted(cells_of_files, key=lambda cell: (-len(cell), cell))
    spelled = {_plain(spelling): spelling for spelling in (*shortest_last, *words)}

    def spell(cell: str) -> str:
        return cell if cell in words or alike[_plain(cell)] > 1 else spelled[_plain(cell)]

    for frame, cells in written:
        frame[label] = cells.map(spell, "ignore")


def _words(labels: pd.Series, task: str) -> Iterable[str]:
    """Return the classes in a column of text, or of the sets of multi-label classification: a|b, or lists."""
    cells = labels.dropna()
    if task == "multi_label_classification":
        parts = cells.map(lambda cell: cell.split("|") if isinstance(cell, str) else cell).explode()
        return (part.strip() for part in parts if isinstance(part, str))
    return cells if pd.api.types.is_string_dtype(labels) else ()


def _plain(cell: str) -> str:
    return re.sub(r"^\+|(?<=\d)\.0*$", "", cell.strip().casefold())


def _give_one_type(parts: Mapping[Split, pd.DataFrame]) -> None:
    """Turn numbers and booleans in the column label into text if another split has text, and 1.0 into 1 elsewhere.

    Files of several formats, and programs that write 1.0 for 1, need this.
    """
    for rows in parts.values():
        if pd.api.types.is_float_dtype(rows["label"]) and _are_whole(rows["label"]):
            rows["label"] = rows["label"].astype("int64")
    if texts := [rows["label"] for rows in parts.values() if pd.api.types.is_string_dtype(rows["label"])]:
        for rows in parts.values():
            if pd.api.types.is_bool_dtype(rows["label"]):
                spelled = {label.casefold(): label for labels in texts for label in labels.dropna().unique()}
                rows["label"] = [spelled.get(str(label).casefold(), str(label)) for label in rows["label"]]
            elif pd.api.types.is_numeric_dtype(rows["label"]):  # whole numbers beside empty cells are floats
                rows["label"] = rows["label"].convert_dtypes().astype("string")


def _are_whole(numbers: pd.Series) -> bool:
    """Whether all are whole, and none is missing or too large for an integer."""
    return bool(numbers.notna().all() and (numbers.abs() < 2**53).all() and (numbers % 1 == 0).all())


def source_of(text: Text, params: Data) -> Data:
    """Return the settings with which `text` is read like the source of `params`, with its rows as the split train."""
    place = {"source": text.source, "config": text.config, "revision": text.revision}
    splits = Splits(train=text.split, validation=None, test=None)
    columns = Columns(text=text.column, text_pair=None, label=None)
    return params.model_copy(update={**place, "splits": splits, "columns": columns})


def load_text(name: str, text: Text, params: Data) -> list[str]:
    """Load the rows of the text `name` of evaluate.texts.

    Raises:
        StageError: the source cannot be read, or lacks the split or the column.
    """
    try:
        return list(load_source(source_of(text, params))["train"]["text"])
    except StageError as error:
        raise StageError(f"evaluate.texts.{name}: {error}") from error


def _source(params: Data) -> Mapping[str, Callable[[], datasets.Dataset | pd.DataFrame]]:
    """Find a packaged data set, a file, a folder with one file for each split, or a data set on the hub.

    Returns:
        Name of the split in the source → function that loads its rows: a folder may have other files than data.
    """
    if params.source in PACKAGED:
        return {"train": PACKAGED[params.source]}
    path = Path(os.path.normpath(params.source))
    inside = path.absolute().is_relative_to(RAW.absolute())
    if not path.exists() and _suffix(path) not in FORMATS and not inside:
        return _from_hub(params)
    if not path.resolve().is_relative_to(Path.cwd()) or not inside:
        raise StageError(f"{path} is outside {RAW}: put it there, so that DVC sees when it changes")
    if not path.exists():
        raise StageError(f"{path} does not exist: correct data.source")
    classes = params.columns.label if params.task in _WITH_CLASSES else None
    used = [name for name in params.columns.model_dump().values() if name is not None]
    files = files_of_splits(path, params.splits.train)
    return {name: partial(read_file, file, classes, used) for name, file in files.items()}


def files_of_splits(path: Path, single: str = "train") -> dict[str, Path]:
    """Return name of the split → its file. The files in a folder are named after their splits.

    Args:
        single: name of the split if `path` is itself a file.

    Raises:
        StageError: no file has a known format, two files are the same split, or the only file of a split has another
            format: the split would be taken out of train.
    """
    files: dict[str, Path] = {}
    others: dict[str, Path] = {}
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        name = file.stem if path.is_dir() else single
        if _suffix(file) not in FORMATS:
            if file.is_file():
                others[file.name.partition(".")[0].lower()] = file
            continue
        if name in files:
            raise StageError(f"{files[name]} and {file} are both the split {name}: remove one of them")
        files[name] = file
    if not files:
        raise StageError(f"{path} has no file ending in {', '.join(FORMATS)}")
    for name in {*_NAMES} & {*others} - {name.lower() for name in files}:
        raise StageError(
            f"{others[name]} is named like the split {name}, but does not end in {', '.join(FORMATS)}: unpack or "
            "convert it, or give it another name"
        )
    return files


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def read_file(file: Path, classes: str | None = None, used: Collection[str] = ()) -> datasets.Dataset | pd.DataFrame:
    """Load a file in the format that its suffix names.

    Args:
        classes: column with names of classes; None: there is none.
        used: columns of whose names a CSV file has one each.

    Raises:
        StageError: the file is empty or does not have this format.
    """
    try:
        rows = _read_csv(file, classes, used) if _suffix(file) in _SEPARATED else _load(file)
    except UnicodeDecodeError as error:
        raise StageError(f"{file} cannot be read: {error}; save it in UTF-8") from error
    except Exception as error:  # the loaders raise many types of errors, which all mean this to the user
        cause = error.__cause__ or error
        if _NO_ROWS.search(repr(cause)):
            raise StageError(f"{file} is empty: give it rows") from error
        raise StageError(f"{file} cannot be read: {str(cause) or repr(cause)}") from error
    if not len(rows):
        raise StageError(f"{file} is empty: give it rows")
    return rows


def _read_csv(file: Path, classes: str | None, used: Collection[str]) -> pd.DataFrame:
    """Read a CSV or TSV file. Only empty cells are missing; by default, pandas also takes words such as None and NA so.

    In a TSV file, quotes are characters like any other.

    A column's type follows from all of its cells. `datasets` takes it from the first 10,000, and refuses other cells
    behind them, or writes True as true and 01 as 1. A column with a cell such as 01 holds codes, which stay text. If
    `classes` are read as numbers or booleans, `attrs` has their cells: another file may have words.

    Raises:
        StageError: the next quote after one that begins a cell of a CSV file does not end the cell, which pandas would
            ignore; rows have cells beyond the names in the first line (a separator at the end of the rows makes none);
            two columns have the name of a used one; or the separator is another one.
    """
    if _suffix(file) == ".csv":
        _check_quotes(file)
    options = {"keep_default_na": False, "na_values": [""], "low_memory": False, **_SEPARATED[_suffix(file)]}
    options["index_col"] = False
    try:
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            rows = pd.read_csv(file, **options)
    except (pd.errors.ParserWarning, pd.errors.ParserError) as error:
        raise StageError(_too_many_cells(file) or str(error)) from None  # see _check_quotes
    _check_separator(file, rows)
    _check_names(file, used)
    untyped = [name for name in rows if is_numeric(rows[name])]
    if classes in rows and pd.api.types.is_bool_dtype(rows[classes]):
        untyped.append(classes)
    if not untyped:
        return rows
    cells = pd.read_csv(file, **{**options, "usecols": untyped, "dtype": str})
    codes = [name for name in untyped if cells[name].str.contains(r"^\s*[+-]?0\d", na=False).any()]
    rows[codes] = cells[codes]
    if classes in {*untyped} - {*codes}:
        rows.attrs[_WRITTEN] = cells[classes]
    return rows


def _refuse_equal_numbers(columns: Sequence[pd.Series], source: str) -> None:
    """Raise a StageError if two cells are the same number, but not because one has only zeros after its point."""
    if not columns:
        return
    cells = pd.concat(columns).dropna()
    written = pd.Series(cells.map(_plain).unique())
    if equal := written[pd.to_numeric(written).duplicated(keep=False)].tolist():
        raise StageError(
            f"the labels {' and '.join(sorted(equal)[:2])} of {source} are the same number. If they are one class, "
            "spell it alike in all files; else write classes that differ as numbers, or words such as v1.10"
        )


def _check_separator(file: Path, rows: pd.DataFrame) -> None:
    """Raise a StageError if the only column of a CSV or TSV file is several of another separator."""
    if len(rows.columns) == 1:
        name, cells = str(rows.columns[0]), rows.iloc[:100, 0].astype(str)
        for separator in _other_separators(file, name):
            if cells.str.count(re.escape(separator)).eq(name.count(separator)).all():
                raise StageError(_save_with_own(file, name))


def _other_separators(file: Path, name: str) -> list[str]:
    """Return the characters in a name that separate columns, but not in a file of this format."""
    return [character for character in ",;\t|" if character in name and character != _separator(file)]


def _separator(file: Path) -> str:
    return str(_SEPARATED[_suffix(file)].get("sep", ","))


def _save_with_own(file: Path, name: str) -> str:
    return (
        f"its first line, {name!r}, has another separator than a {_suffix(file)} file: separate columns by "
        f"{_separator(file)!r}"
    )


def _check_quotes(file: Path) -> None:
    begins = 1
    try:
        with _cells(file) as reader:
            for _ in reader:
                begins = reader.line_num + 1
    except csv.Error as error:
        raise StageError(
            f"lines {begins} to {reader.line_num}: {error}. A cell that begins with a quote ends at the next "
            "one: double the quotes within it, and put the cell into quotes"
        ) from None  # its cause would be shown in place of this sentence


def _too_many_cells(file: Path) -> str:
    """Say why rows of a CSV or TSV file have cells beyond the names in the first line; return "" if none has."""
    longest, found = 0, ""
    with _cells(file) as reader:
        names = _names(reader)
        if len(names) == 1 and _other_separators(file, names[0]):
            return _save_with_own(file, names[0])
        for row in reader:
            words = f"line {reader.line_num} has {len(row)} cells, but the first line has {len(names)} names"
            if any(row[len(names) :]):
                return f"{words}: put cells that contain the separator into quotes, or name all columns"
            if len(row) > max(longest, len(names)):
                longest, found = len(row), f"{words}: remove the separators at its end"
    return found


def _check_names(file: Path, used: Collection[str]) -> None:
    with _cells(file) as reader:
        names = _names(reader)
    if twice := [name for name in used if names.count(name) > 1]:
        raise StageError(f"its first line has two columns {', '.join(map(repr, twice))}: rename or remove one")


def _names(reader: Iterator[list[str]]) -> list[str]:
    return next(row for row in reader if any(map(str.strip, row)))


@contextmanager
def _cells(file: Path) -> Iterator[Any]:
    """Yield a reader of the rows of a CSV or TSV file, whatever the length of their cells."""
    longest = csv.field_size_limit(sys.maxsize)
    own: dict[str, Any] = {} if _suffix(file) == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            yield csv.reader(lines, strict=True, **own)
    finally:
        csv.field_size_limit(longest)


def _load(file: Path) -> datasets.Dataset:
    """Load a file of another format."""
    if _suffix(file) != ".parquet":
        _check_utf8(file)
    options: dict[str, Any] = {}
    if _suffix(file) == ".txt":  # line breaks stay in rows, as on the hub; a byte order mark does not
        options = {"keep_linebreaks": True, "encoding": "utf-8-sig"}
    if FORMATS[_suffix(file)] == "json":  # the types of fields follow from the first 128 MB, not 10
        options["chunksize"] = min(file.stat().st_size + 1, 2**27)
    return datasets.load_dataset(
        FORMATS[_suffix(file)],
        data_files=glob.escape(str(file.absolute())),  # a [ would begin a pattern
        split="train",
        download_mode="force_redownload",  # the library's cache would answer for another content of the same age
        **options,
    )


def _check_utf8(file: Path) -> None:
    """Raise a UnicodeDecodeError if a text is not in UTF-8: some loaders would find that only where it is used."""
    with file.open(encoding="utf-8") as lines:
        while lines.read(2**20):
            pass


def _from_hub(params: Data) -> dict[str, Callable[[], datasets.Dataset]]:
    try:
        found = load_from_hub(params.source, params.config, params.revision)
    except StageError:
        raise
    except Exception as error:  # the hub client raises many types of errors, which all mean this to the user
        raise StageError(
            f"{params.source} is neither one of {', '.join(PACKAGED)} nor a path under {RAW}, and the hub does not "
            f"give it: {error}"
        ) from error
    return {name: partial(found.get, name) for name in found}


def as_frame(rows: datasets.Dataset | pd.DataFrame, label: str | None) -> pd.DataFrame:
    """Return the rows as a DataFrame; those of a CSV file or a packaged data set are one already.

    If the column `label` holds class ids, class names replace them. The names are a pandas categorical whose categories
    are in the order of the ids. If the cells are lists of ids, each cell becomes such a categorical. The id -1, which
    marks unlabeled rows on the hub, becomes a missing label. The id -100, which marks words without a tag, stays.
    """
    if isinstance(rows, pd.DataFrame):
        return rows
    frame = rows.to_pandas()
    feature = rows.features.get(label)
    if label and isinstance(feature, datasets.ClassLabel):
        frame[label] = pd.Categorical(frame[label].map(dict(enumerate(feature.names))), categories=feature.names)
    if label and isinstance(tags := getattr(feature, "feature", None), datasets.ClassLabel):
        from eckart.model.batches import IGNORED  # imports torch, which these tasks need anyway

        ignored = [IGNORED] if frame[label].explode().eq(IGNORED).any() else []
        names = pd.CategoricalDtype([*tags.names, *ignored])
        codes = [None if ids is None else np.where(ids == IGNORED, len(tags.names), ids) for ids in frame[label]]
        frame[label] = [None if some is None else pd.Categorical.from_codes(some, dtype=names) for some in codes]
    return frame


def _columns(frame: pd.DataFrame, params: Data) -> pd.DataFrame:
    """Return the columns that data.columns names, renamed to text, text_pair and label.

    The task has checked and cleaned them (`NlpTask.prepare`).
    """
    names = {role: name for role, name in params.columns.model_dump().items() if name is not None}
    if absent := [name for name in names.values() if name not in frame]:
        raise StageError(
            f"{params.source} has no column {', '.join(absent)}: data.columns may name {', '.join(map(str, frame))}"
        )
    frame = pd.DataFrame({role: frame[name] for role, name in names.items()})
    if binary := [name for role, name in names.items() if any(isinstance(cell, bytes) for cell in frame[role])]:
        raise StageError(f"column {' and '.join(binary)} of {params.source} holds bytes: write it as text")
    return task_class(params.task).prepare(frame, names, params.source)
