"""Derive values of a new workspace's params.yaml from the user's model and data. The user may then edit them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from eckart.model.positions import longest_text
from tasks.artifacts.errors import StageError
from tasks.config import yaml_edit
from tasks.config.contradictions import column_mistakes
from tasks.config.params_file import PARAMS, parse, read, sections
from tasks.config.schema import Data
from tasks.data.reading import as_frame, files_of_splits, load_source, read_file
from tasks.data.splitting import split_and_convert
from tasks.models import sentence_files, task_head
from tasks.models.base_model import located, reason
from tasks.models.model_io import UNLOADABLE
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class

_SPLITS = ("train", "validation", "test")
_VALIDATION = ("dev", "val", "valid")  # other names of that split
_SAMPLE = 1000  # number of examples to count the tokens of
_MOST = 512  # tokens in a text
_SHARE = 0.95  # share of the examples that must fit into max_length
_BLOCKS = 128  # of the user's text, and as many that the model writes, to calibrate a language model with
_AT_ONCE = 4  # blocks in a forward pass: a block's logits are as many numbers as tokens times words
_RECALL = 0.1  # largest drop of an embedding model's recall: a near neighbor in ten may be another one
_UNSEEN = {"editorials": {"source": "editorials", "examples": 64}}  # a text that no statistic has seen


def of_data(
    source: str,
    base: str,
    revision: str | None,
    text: str | None,
    text_pair: str | None,
    label: str | None,
    task: TaskName | None,
) -> tuple[dict[str, Any], str]:
    """Derive sections of params.yaml from data and a base model.

    Args:
        source: a file, or a folder with a file for each split, named by the split. The path is relative to the
            workspace, which is the working directory.
        base, revision: the model, as in the section model.
        text, text_pair, label: names of columns. None stands for a column that is named like its role, if there is one.
        task: None to derive the task from the label.

    Returns:
        The sections, and a sentence that says what happens to the base model's head; it may be empty.

    Raises:
        StageError: a file or the model cannot be read, a column is missing, the task is unclear, or the stage extract
            would refuse the rows.
    """
    datasets.disable_progress_bars()
    splits, train = _splits(Path(source))
    rows = as_frame(read_file(train), None)
    columns = _columns(rows, text, text_pair, label)
    kind = task or _task(rows, columns)
    if label is None and task_class(kind).label != "required":
        columns["label"] = None  # a column of this name may hold something else
    if text_pair is None and task_class(kind).text_pair == "refused":
        columns["text_pair"] = None
    if mistakes := [*column_mistakes(kind, columns)]:
        raise StageError("\n".join(mistakes))
    config, tokenizer = read_base(base, revision)
    if type(config) not in getattr(transformers, task_class(kind).auto_class)._model_mapping:
        raise StageError(f"transformers has no {config.model_type} for {kind}: name another model than {base}")
    changes: dict[str, Any] = {
        "data": {
            "source": source,
            "splits": {split: splits.get(split) for split in _SPLITS},
            "columns": columns,
            "task": kind,
            "metric": task_class(kind).metrics[0],
        }
    }
    if task_class(kind).running_text:  # sizes count blocks, and drops are perplexity
        changes["data"] |= _blocks(tokenizer)
        changes["study"] = {"recipes": ["narrowed"], "keeps": [0.8, 0.6], "control": "narrowed"}
        changes["importance"] = {"batch_size": _AT_ONCE}
        changes["trainer"] = {"micro_batch": _AT_ONCE}
        changes["evaluate"] = {"batch_size": _AT_ONCE, "texts": _UNSEEN}
        changes["export"] = {"recipes": ["narrowed"]}
    else:
        changes["data"]["sizes"] = {"train": None}  # all, also of data that grow
    own = _sentence_settings(base, revision) if task_class(kind).from_original else None
    if own:
        changes["data"] |= {"pooling": own.pooling, "prefix": own.prompt if own.prompt_is_pooled else None}
    for name, section_of_task in of_task(kind).items():
        changes[name] = changes.get(name, {}) | section_of_task
    section = sections(read())["data"]
    changes["data"] |= {name: None for name in ("config", "revision") if section[name]}  # of a data set on the hub
    if task_class(kind).running_text and train.suffix.lower() == ".txt":
        changes["data"]["separator"] = ""  # lines keep their line breaks, so joined they are the file's text
    elif section["separator"] == "":
        changes["data"]["separator"] = None
    yaml_edit.change(section, changes["data"])
    data = parse(section, Data, PARAMS, "data")
    _, labels = split_and_convert(load_source(data), data)  # raises the errors of the stage extract
    length = _length(rows, (columns["text"], columns["text_pair"]), kind, config, tokenizer)
    changes["data"]["max_length"] = min(length, own.max_length) if own and own.max_length else length
    if "target_length" in task_class(kind).required_options:
        changes["data"]["target_length"] = _length(rows, (columns["label"],), kind, config, tokenizer)
    if not task_class(kind).one_graph:
        changes["export"] = {"recipes": []}
    knows = task_head.fit(config, kind, labels) == "known"
    return changes | ({"teacher": {"epochs": 0}} if knows else {}), task_head.in_words(config, kind, labels)


def of_task(kind: TaskName) -> dict[str, dict[str, Any]]:
    """Return the sections of params.yaml that follow from the task alone: limits are in the units of its metric."""
    if task_class(kind).running_text:
        return {"promotion": {"largest_drop": 5.0, "keep": 0.8, "least_speedup": None}}
    if task_class(kind).from_original:
        return {
            "importance": {"labels": task_class(kind).calibration_labels[0]},
            "study": {"goals": [{"largest_drop": _RECALL}]},
            "promotion": {"largest_drop": _RECALL},
        }
    return {"study": {"goals": [{"largest_drop": 0.01}]}}


def _splits(source: Path) -> tuple[dict[str, str], Path]:
    """Return split → its name in a folder with files named by split, and the file of train.

    Case does not matter, and validation has other names, too. If `source` is a file, it is the split train.
    """
    files = files_of_splits(source)
    names: dict[str, str] = {}
    for name in sorted(files, key=lambda name: name.lower() in _VALIDATION):  # own names first
        split = "validation" if name.lower() in _VALIDATION else name.lower()
        if names.get(split, "").lower() == split != name.lower():
            continue  # dev beside validation
        if split in names and split in _SPLITS:
            raise StageError(f"{files[names[split]]} and {files[name]} are both the split {split}: remove one of them")
        names[split] = name
    if "train" not in names:
        raise StageError(
            f"{source} has no file named train: name one so, and those of other splits validation and test"
        )
    return names, files[names["train"]]


def _columns(rows: pd.DataFrame, *names: str | None) -> dict[str, str | None]:
    """Return role (text, text_pair, label) → name of the column; None if the data has no such column."""
    roles = zip(("text", "text_pair", "label"), names, strict=True)
    columns = {role: name or (role if role in rows else None) for role, name in roles}
    for role, name in columns.items():
        if (name is None and role == "text") or (name is not None and name not in rows):
            raise StageError(
                f"there is no column {name or role} for {role}: write --{role.replace('_', '-')} with one of "
                f"{', '.join(map(str, rows))}"
            )
    return columns


def _task(rows: pd.DataFrame, columns: dict[str, str | None]) -> TaskName:
    label = columns["label"]
    if label is None and len(rows.columns) > 1:
        raise StageError(
            f"there is no column label: write --label with one of {', '.join(map(str, rows))}, or, for running "
            "text, --task language_modeling"
        )
    labels = None if label is None else rows[label].dropna()
    texts = rows[columns["text"]].dropna()
    for name in TASK_NAMES:
        if task_class(name).looks_like(texts, labels):
            return name
    raise StageError(f"column {label} has neither classes nor numbers: write --task, one of {', '.join(TASK_NAMES)}")


def _sentence_settings(base: str, revision: str | None) -> sentence_files.Settings:
    with ExitStack() as stack:
        return sentence_files.settings_of(located(base, revision, stack)[0])


def read_base(base: str, revision: str | None) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Load the config and the tokenizer of a base model, which is named as in the section model."""
    with ExitStack() as stack:
        folder, extra = located(base, revision, stack)
        try:
            options: dict[str, Any] = {"trust_remote_code": False, **extra}
            return AutoConfig.from_pretrained(folder, **options), AutoTokenizer.from_pretrained(folder, **options)
        except UNLOADABLE as error:
            raise StageError(f"{base} cannot be read as a model with a tokenizer: {reason(str(error))}") from error


def _blocks(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the values of the section data that say which blocks of running text a language model reads."""
    begins_with_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    first = {"first": "bos"} if begins_with_bos else {}  # without it, Gemma's perplexity and statistics mean nothing
    written = {"examples": _BLOCKS, **first}
    return {"sizes": {"calibration": _BLOCKS}, "calibration_blocks": "random", "written": written, **first}


def _most_tokens(config: PreTrainedConfig) -> int:
    """Return the number of tokens that the model has positions for, or 512 if it has more, or its config says none."""
    stated = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    if not 0 < stated <= _MOST + 2:  # RoBERTa counts its padding; XLNet states -1
        return _MOST
    with suppress(*UNLOADABLE), torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation="eager", trust_remote_code=False)
        stated = longest_text(model) or stated
    return min(stated, _MOST)


def _length(
    rows: pd.DataFrame,
    columns: Sequence[str | None],
    kind: TaskName,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """Return the number of tokens into which nearly all texts of `columns` fit, rounded up to a multiple of 8.

    It is at most 512, and at most what the model allows. For running text it is the largest such number.
    """
    most = _most_tokens(config)
    if task_class(kind).running_text:
        return most
    sample = rows.sample(min(_SAMPLE, len(rows)), random_state=0)
    words = task_class(kind).text_is_words  # lists of words, which files of JSON lines hold as arrays
    try:
        texts = [[list(cell) if words else cell for cell in sample[name]] for name in columns if name]
        encoded = tokenizer(*texts, is_split_into_words=words)["input_ids"]
    except (TypeError, ValueError) as error:
        raise StageError(f"column {columns[0]} is not text: name another one of {', '.join(map(str, rows))}") from error
    needed = int(pd.Series([len(ids) for ids in encoded]).quantile(_SHARE))
    return max(8, min(most, -(-needed // 8) * 8))
