"""The model as it is served: this file is logged with every version and loaded by MLflow, without the pipeline.

It may import what the version's requirements name, and eckart, whose code the version carries: never tasks or flows.
"""

from __future__ import annotations

from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import eckart as eckart  # teaches transformers the format


class Served(PythonModel):
    """A sequence classifier or a regression; `model_config` gives `max_length` in tokens and `batch_size` in rows."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the Hugging Face folder that is the artifact `model`; weights come from safetensors alone."""
        folder = context.artifacts["model"]
        self._settings = context.model_config
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False
        )
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """A row of answers for each row of `text`, or of `text` and `text_pair`.

        Returns:
            `label` and `score`, the probability of that label; of a regression, `value`.
        """
        size = self._settings["batch_size"]
        batches = [self._outputs(model_input[start : start + size]) for start in range(0, len(model_input), size)]
        config = self._model.config
        outputs = torch.cat(batches) if batches else torch.empty(0, config.num_labels)
        if config.problem_type == "regression":
            return pd.DataFrame({"value": outputs.squeeze(-1).tolist()})
        scores, ids = outputs.softmax(-1).max(-1)
        return pd.DataFrame({"label": [config.id2label[label] for label in ids.tolist()], "score": scores.tolist()})

    @torch.inference_mode()
    def _outputs(self, rows: pd.DataFrame) -> Tensor:
        """`(rows, classes)`, or `(rows, 1)` of a regression."""
        texts = [rows[column].tolist() for column in ("text", "text_pair") if column in rows]
        inputs = self._tokenizer(
            *texts, truncation=True, max_length=self._settings["max_length"], padding=True, return_tensors="pt"
        )
        return self._model(**inputs.to(self._model.device)).logits.double().cpu()


mlflow.models.set_model(Served())
