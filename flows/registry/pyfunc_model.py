"""The model as it is served: this file is logged with every version and loaded by MLflow, without the pipeline.

It may import what the version's requirements name, and eckart and tasks, whose code the version carries: never flows.
Its answers are those of the task itself (tasks/nlp_tasks), by the same code that scored the model.
"""

from __future__ import annotations

from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext
from transformers import AutoTokenizer

import eckart as eckart  # teaches transformers the format
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of


class Served(PythonModel):
    """A model of any task.

    `model_config` gives the `task` as the stage extract wrote it down, `batch_size` in rows, windows or blocks, and
    `continuation`, the tokens that a language model writes after a text.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Load the Hugging Face folder that is the artifact `model`; weights come from safetensors alone.

        Raises:
            ValueError: a continuation is longer than the model has positions.
        """
        folder, settings = context.artifacts["model"], context.model_config
        self._task = kind_of(Task.model_validate(settings["task"]))
        self._batch_size, self._continuation = settings["batch_size"], settings["continuation"]
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = self._task.auto.from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False
        ).eval()
        self._task.check_room(self._model, self._continuation)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return a row of answers for each row of `text`, or of `text` and `text_pair` (docs/promotion.md)."""
        answers = (
            self._task.answers(self._model, self._tokenizer, model_input, self._batch_size, self._continuation)
            if len(model_input)
            else []
        )
        frame = pd.DataFrame(answers, columns=list(self._task.answer_columns), dtype=object)
        return frame if frame.isna().any(axis=None) else frame.infer_objects()  # which would make a number of a null


if not __package__:  # MLflow runs this file; whoever imports it sets no model
    mlflow.models.set_model(Served())
