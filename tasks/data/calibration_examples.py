"""The calibration examples: of the training data, of other texts, and what the original model writes, as tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd
from datasets import Dataset, concatenate_datasets

from tasks.artifacts.task_spec import CALIBRATION_TEXTS, SPLITS, load_split, load_task
from tasks.config.params_file import section
from tasks.config.schema import Written
from tasks.data.loading import with_originals
from tasks.data.writing import written_blocks
from tasks.models.model_io import TEACHER, load_tokenizer
from tasks.nlp_tasks import kind_of


def calibration_examples() -> Dataset:
    """Return the calibration examples, tokenized and with labels, but not yet padded.

    Those of a language model may come from several texts: the training text, the other `data.calibration_texts`, and
    what the model writes. They are mixed evenly, so that the first examples, which are all that some rank searches
    read, have each text in its share.

    Raises:
        StageError: a text is shorter than a block, or the model cannot write such blocks.
    """
    return mixed([*_parts()])


def mixed(parts: list[Dataset]) -> Dataset:
    """Concatenate data sets in an order in which each is spread evenly; a single one stays as it is."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    return concatenate_datasets(parts).select(np.argsort(places, kind="stable"))


def _parts() -> Iterator[Dataset]:
    """Yield the calibration examples from each text."""
    task, tokenizer = load_task(), load_tokenizer(TEACHER)
    if task.sizes["calibration"]:
        yield kind_of(task).encode(with_originals(load_split("calibration"), task), tokenizer, "calibration")
    for text in json.loads((SPLITS / CALIBRATION_TEXTS).read_text()):
        sizes = {**task.sizes, "train": sys.maxsize, "calibration": text["examples"]}  # train limits data.source only
        own = task.model_copy(update={"sizes": sizes, "separator": text["separator"]})
        yield kind_of(own).encode(pd.DataFrame({"text": text["rows"]}), tokenizer, "calibration")
    if (written := section("data.written", Written)).examples:
        ids = np.array(written_blocks(written))
        yield Dataset.from_dict({"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids})
