"""A workspace that is valid and tiny: sixty reviews, a BERT of two layers, two recipes at one keep."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from ruamel.yaml import YAML
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Task
from tasks.config.params_file import read
from tasks.config.resolved import resolve
from tasks.nlp_tasks import TaskName
from tasks.nlp_tasks._prediction import Collate

REPOSITORY = Path(__file__).parents[1]
REVIEWS = "data/raw/reviews.csv"
BASE = "models/base/tiny"

SUBJECTS = ("plot", "acting", "music", "ending", "script", "cast")
WORDS = {
    "positive": ("brilliant", "moving", "clever", "fresh", "warm"),
    "negative": ("dull", "flat", "weak", "silly", "stale"),
}
_CHANGES: dict[str, Any] = {
    "study": {"name": "tiny", "recipes": ["svd", "kfac"], "keeps": [0.5]},
    "threads": {"shared": 1, "candidate": 1},
    "data": {
        "source": REVIEWS,
        "config": None,
        "revision": None,
        "splits": {"train": "train", "validation": None, "test": None},
        "shares": {"validation": 0.15, "test": 0.25},
        "columns": {"text": "text", "text_pair": None, "label": "label"},
        "task": "classification",
        "metric": "accuracy",
        "sizes": {"train": 32, "validation": 8, "test": 12, "calibration": 16},
        "max_length": 16,
        "seed": 0,
    },
    "model": {"base": BASE, "revision": None},
    "teacher": {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3},
    "importance": {"batch_size": 8},
    "recipes": {
        "svd": {"recovery": {"steps": 2, "batch_size": 8}},
        "kfac": {"recovery": {"steps": 2, "batch_size": 8}, "ranks": {"multiple": 1}},  # the layers are small
    },
    "evaluate": {"batch_size": 8},
    "export": {"recipes": []},
    "benchmark": {"shapes": [[2, 8]], "repetitions": 6},
}


def tiny_workspace(root: Path, **changes: Any) -> Path:
    """Write params.yaml, data/raw and models/base into `root`, and return `root`.

    `changes` are merged into the parameters: `tiny_workspace(root, data={"seed": 1})` changes the seed of the split and
    no other parameter of `data`.
    """
    write_params(root, tiny_params(**changes))
    write_reviews(root / REVIEWS)
    write_base(root / BASE)
    for folder in ("data/reference", "data/shards"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / ".gitkeep").touch()
    return root


def tiny_params(**changes: Any) -> dict[str, Any]:
    """Return the repository's parameters, changed so that a study takes seconds, with `changes` merged in."""
    params = resolve(merged(repository_params(), _CHANGES))
    params["recipes"] = {name: params["recipes"][name] for name in ("svd", "kfac")}
    return merged(params, changes)


def repository_params() -> dict[str, Any]:
    """Return the content of the repository's params.yaml, with all defaults filled in."""
    return plain(resolve(read(REPOSITORY / "params.yaml")))


def write_params(root: Path, params: dict[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    YAML().dump(params, root / "params.yaml")


def plain(content: Any) -> Any:
    """Return a copy of `content` in which no two parts are the same object, so that YAML writes no anchors."""
    return json.loads(json.dumps(content))


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `old` with the values of `new`. Nested mappings are merged key by key."""
    result = copy.deepcopy(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def reviews() -> pd.DataFrame:
    """Return sixty different sentences with labels. Half are positive; two words of each sentence say the label."""
    rows = [
        {"text": f"the {subject} is {first} and {second}", "label": label}
        for label, words in WORDS.items()
        for subject, (first, second) in itertools.product(SUBJECTS, itertools.pairwise((*words, words[0])))
    ]
    return pd.DataFrame(rows)


def write_reviews(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    reviews().to_csv(file, index=False)


def a_task(kind: TaskName, labels: Sequence[str], metric: MetricName, max_length: int = 16) -> Task:
    """Return a description of a data set, as the stage `extract` writes it."""
    sizes = {"train": 32, "validation": 8, "test": 12, "calibration": 16}
    return Task(
        kind=kind,
        labels=tuple(labels),
        metric=metric,
        max_length=max_length,
        target_length=None,
        prefix=None,
        stride=None,
        sizes=sizes,
        seed=0,
    )


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Return a WordPiece tokenizer whose vocabulary is the words of the reviews."""
    words = ["the", "is", "and", *SUBJECTS, *itertools.chain(*WORDS.values())]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertTokenizer(vocab={token: position for position, token in enumerate(tokens)})


def collate() -> Collate:
    """Return a function that makes a padded batch from examples of `rows`."""
    return DataCollatorWithPadding(tiny_tokenizer())


def tiny_config(**changes: Any) -> BertConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertConfig(**{"vocab_size": len(tiny_tokenizer()), "max_position_embeddings": 64, **sizes, **changes})


def bert(**changes: Any) -> PreTrainedModel:
    """Return a BERT classifier with random weights, the same in every call, in eval mode as after `from_pretrained`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(tiny_config(**changes)).eval()


def rows() -> Dataset:
    """Return the reviews as inputs of a model, with labels and without padding."""
    frame = reviews()
    labels = (frame["label"] == "positive").astype(int).tolist()
    return Dataset.from_dict({**tiny_tokenizer()(frame["text"].tolist()), "labels": labels})


def write_base(folder: Path) -> None:
    """Save a BERT without a head, with the same random weights in every call, and its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(tiny_config()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def run_stage(name: str, recipe: str | None = None, keep: str | None = None, shard: str | None = None) -> None:
    """Do what `python -m tasks.NAME --recipe RECIPE --keep KEEP` does, in this process and its working directory."""
    candidate = ["--recipe", recipe, "--keep", keep] if recipe and keep else ["--shard", shard] if shard else []
    before = sys.argv, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    sys.argv = [name, *candidate]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # says that the module was imported before
            runpy.run_module(f"tasks.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before[0]
        torch.set_num_threads(before[1])
        torch.use_deterministic_algorithms(before[2])


TO_IMPORTANCE = ("extract", "teacher", "calibration", "importance")
"""The stages that all candidates share."""


@contextmanager
def inside(root: Path, *stages: str) -> Iterator[None]:
    """Work in the workspace `root` until the context ends, with a cache of its own, after running these stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root.parent / "cache")
        for stage in stages:
            run_stage(stage)
        yield


def run_study(*recipes: str) -> None:
    """Run all stages of a study of these recipes at keep 0.5 in this process, with the exports of params.yaml."""
    exported = read()["export"]["recipes"]
    first = ("extract", "check", "teacher", "control", "dense", "calibration")
    for stage in (*first, *["export_dense"] * bool(exported), "importance"):
        run_stage(stage)
    for recipe in recipes:
        for stage in ("search", "factorize", "finetune", "evaluate", *["export"] * (recipe in exported)):
            run_stage(stage, recipe, "0.5")
    run_stage("benchmark")
    run_stage("compare")


def digests(folder: Path) -> dict[str, str]:
    """Return relative path → digest of each file in `folder` and its subfolders."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
