"""How the stages dense and evaluate score a model: on test rows, which reports and gates read, and on validation rows,
by which candidates and trials are chosen."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.continuations import continuations
from tasks.dataset import Split, load_split, load_task
from tasks.kinds import kind_of
from tasks.kinds.kind import Scored
from tasks.params import Evaluate, section
from tasks.records import Scores, rows_file
from tasks.stage import say
from tasks.zero_shot import zero_shot


def score_on(split: Split, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Scored:
    """Score all rows of a split, and say so of the model under this `name`."""
    task = load_task()
    size = section("evaluate", Evaluate).batch_size
    found = kind_of(task).score(model, tokenizer, load_split(split), task, size, split)
    say(f"{name}: {task.metric} {found.score.metric:.4f} on {found.score.rows} {split} rows")
    return found


def all_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, known: Scored | None = None
) -> tuple[Scores, pd.DataFrame]:
    """All that is asked of a model that could be shipped, and what each test row contributed.

    Args:
        known: its score on the test split, where that is known already.
    """
    test, settings = known or score_on("test", model, tokenizer, name), section("evaluate", Evaluate)
    scores = Scores(
        score=test.score,
        validation=score_on("validation", model, tokenizer, name).score,
        zero_shot=zero_shot(model, tokenizer, settings.zero_shot, settings.batch_size),
        continuations=continuations(model, tokenizer, settings.continuation),
    )
    return scores, test.rows


def same_weights(one: Path, other: Path) -> bool:
    """Whether training took no step from one folder to the other, so that there is nothing new to score."""
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


def write_rows(name: str, rows: Mapping[str, pd.DataFrame]) -> None:
    """Write what each test row contributed to the scores of some models, whose names are in the column `model`."""
    path = rows_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    together = pd.concat([some.assign(model=model) for model, some in rows.items()], ignore_index=True)
    together.to_parquet(path, index=False)
