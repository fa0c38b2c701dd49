"""The model as MLflow serves it. This file is part of every version, and MLflow runs it without the pipeline.

It may import the packages in the version's requirements, and eckart and tasks, which are part of the version. It must
not import flows. The answers come from the code of the task (tasks/nlp_tasks) with which the model was scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext
from transformers import AutoTokenizer

import eckart as eckart  # registers the format of candidates with transformers
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of


class Served(PythonModel):
    """A served model of any task.

    MLflow's `model_config` has its settings:

    - task: the task as the stage `extract` wrote it.
    - batch_size: number of examples, windows or blocks that are answered at a time.
    - continuation: number of tokens that a language model writes after a text.
    - column: the only column of the answers to return, as a series, which `mlflow.models.evaluate` needs; None: all.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Load the model from the Hugging Face folder, which is the artifact `model`; only safetensors files are read.

        Raises:
            ValueError: the continuation does not fit into the model's positions, or the answers have no such column.
        """
        folder, settings = context.artifacts["model"], context.model_config
        self._task = kind_of(Task.model_validate(settings["task"]))
        self._batch_size, self._continuation = settings["batch_size"], settings["continuation"]
        self._column = settings["column"]
        if self._column not in (None, *self._task.answer_columns):
            raise ValueError(f"column {self._column!r}: write null or one of {', '.join(self._task.answer_columns)}")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = self._task.auto.from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False
        ).eval()
        self._task.check_room(self._model, self._continuation)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame | pd.Series:
        """Answer each row of `model_input`, which has the column `text` and, for pairs of texts, `text_pair`.

        Returns:
            A DataFrame with a row of answers for each input. docs/how-to/serve.md describes its columns.

        Raises:
            MlflowException: an input cannot be answered; MLflow's server returns the message of this error only.
        """
        rows = _rows(model_input, self._task.text_is_words)
        try:
            answers = (
                self._task.answers(self._model, self._tokenizer, rows, self._batch_size, self._continuation)
                if len(rows)
                else []
            )
        except StageError as error:  # such as a question that is too long
            raise MlflowException.invalid_parameter_value(str(error)) from error
        frame = pd.DataFrame(answers, columns=list(self._task.answer_columns), dtype=object)
        # infer_objects turns None into nan, which is a number
        frame = frame if frame.isna().any(axis=None) else frame.infer_objects()
        return frame if self._column is None else frame[self._column]


def _rows(given: pd.DataFrame, words: bool) -> pd.DataFrame:
    """Return the rows of an input as MLflow passes it.

    MLflow makes a DataFrame whose only column is 0 of a string or a list of strings, and one row of a dictionary of
    lists. Of a task on single texts, it passes the first column of a DataFrame, whatever its name.

    Args:
        words: whether each text is a list of words.

    Raises:
        MlflowException: the first column of a task on single texts is named, but not `text`; a text is missing; or
            there are more texts than text pairs, or fewer.
    """
    rows = given.rename(columns={0: "text"})
    if "text" not in rows:
        raise MlflowException.invalid_parameter_value(
            f"the first column is {rows.columns[0]!r}: give a string, a list of strings, or a column text"
        )
    columns = [column for column in ("text", "text_pair") if column in rows]
    if not words and len(rows) == 1 and not any(isinstance(value, Mapping) for value in rows[columns].iloc[0]):
        try:
            rows = rows.explode(columns, ignore_index=True)
        except ValueError as error:
            raise MlflowException.invalid_parameter_value(
                "text and text_pair have different numbers of texts"
            ) from error
    for column in columns:
        for number, value in enumerate(rows[column]):
            parts = value if words and pd.api.types.is_list_like(value) else [value]
            if isinstance(value, Mapping) or not all(isinstance(part, str) for part in parts):
                raise MlflowException.invalid_parameter_value(f"row {number}: {column} is {value!r}, which is no text")
    return rows


if not __package__:  # MLflow runs this file; an import of it must not set the model
    mlflow.models.set_model(Served())
