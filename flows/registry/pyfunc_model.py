"""The model as it is served: this file is logged with every version and loaded by MLflow, without the pipeline.

It may import what the version's requirements name, and eckart, whose code the version carries: never tasks or flows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import mlflow
import numpy as np
import pandas as pd
import torch
import transformers
from mlflow.pyfunc import PythonModel, PythonModelContext
from mlflow.types.schema import Array, ColSpec, DataType, Schema
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, BatchEncoding
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

import eckart as eckart  # teaches transformers the format
from eckart.calibration.losses import IGNORED
from eckart.text.qa_windows import best_answers, windows
from eckart.text.word_alignment import first_tokens

T = TypeVar("T")
Row = tuple[Any, ...]

ANSWERS: Mapping[str, Schema] = {
    "classification": Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")]),
    "regression": Schema([ColSpec(DataType.double, "value")]),
    "token_classification": Schema([ColSpec(Array(DataType.string), "tags")]),
    "question_answering": Schema([ColSpec(DataType.string, "answer"), ColSpec(DataType.double, "score")]),
    "summarization": Schema([ColSpec(DataType.string, "summary")]),
    "language_modeling": Schema(
        [ColSpec(DataType.double, "loss", required=False), ColSpec(DataType.string, "continuation", required=False)]
    ),
}
"""Kind of task → the columns of an answer (docs/promotion.md says what they hold)."""


class Served(PythonModel):
    """A model of any kind of task.

    `model_config` gives the `kind`, the class of transformers that loads it (`auto`), `max_length` in tokens and
    `batch_size` in rows, windows or blocks; and those of these that the kind reads: `target_length` and
    `continuation`, tokens to be written, `prefix` and `stride`.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Load the Hugging Face folder that is the artifact `model`; weights come from safetensors alone.

        Raises:
            ValueError: a continuation is longer than the model has positions.
        """
        folder = context.artifacts["model"]
        self._settings = context.model_config
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = getattr(transformers, self._settings["auto"]).from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        if self._settings["kind"] == "language_modeling":
            self._read = _room(model, self._settings["max_length"], self._settings["continuation"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """A row of answers, with the columns of ANSWERS, for each row of `text`, or of `text` and `text_pair`.

        Raises:
            NoRoom: a question is too long for its context to be read.
        """
        kind = self._settings["kind"]
        answer = {
            "classification": self._labels,
            "regression": self._values,
            "token_classification": self._tags,
            "question_answering": self._spans,
            "summarization": self._summaries,
            "language_modeling": self._continuations,
        }[kind]
        with torch.inference_mode():
            rows = [row for some in self._batches(model_input) for row in answer(some)]
        frame = pd.DataFrame(rows, columns=ANSWERS[kind].input_names(), dtype=object)
        return frame if frame.isna().any(axis=None) else frame.infer_objects()  # which would make a number of a null

    def _labels(self, rows: pd.DataFrame) -> Iterator[Row]:
        scores, ids = self._logits(self._inputs(rows)).double().softmax(-1).max(-1)
        yield from zip((self._name(label) for label in ids.tolist()), scores.tolist(), strict=True)

    def _values(self, rows: pd.DataFrame) -> Iterator[Row]:
        yield from ((value,) for value in self._logits(self._inputs(rows)).squeeze(-1).tolist())

    def _tags(self, rows: pd.DataFrame) -> Iterator[Row]:
        """A tag for each word, None for one without a token within `max_length`."""
        every = [[str(word) for word in words] for words in rows["text"]]
        inputs = self._tokenized([" ".join(words) for words in every], return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping").numpy()
        guesses = self._logits(inputs).argmax(-1).tolist()
        for row, words in enumerate(every):
            real = np.array([part is not None for part in inputs.sequence_ids(row)])
            first = first_tokens(words, offsets[row], real).tolist()
            yield ([None if token < 0 else self._name(guesses[row][token]) for token in first],)

    def _spans(self, rows: pd.DataFrame) -> Iterator[Row]:
        questions, contexts = rows["text"].tolist(), rows["text_pair"].tolist()
        stride = self._settings["stride"] or 0
        every = list(windows(questions, contexts, self._tokenizer, self._settings["max_length"], stride))
        starts: list[np.ndarray] = []
        ends: list[np.ndarray] = []
        for some in self._batches(every):
            inputs = pad_without_fast_tokenizer_warning(
                self._tokenizer, [window.inputs for window in some], padding_side="right", return_tensors="pt"
            )
            outputs = self._model(**inputs.to(self._model.device))
            starts += list(outputs.start_logits.double().cpu().numpy())
            ends += list(outputs.end_logits.double().cpu().numpy())
        for best in best_answers(every, starts, ends, contexts):
            yield best.text, best.probability

    def _summaries(self, rows: pd.DataFrame) -> Iterator[Row]:
        inputs = self._tokenized([(self._settings["prefix"] or "") + text for text in rows["text"]])
        ids = self._write(inputs["input_ids"], inputs["attention_mask"], self._settings["target_length"])
        for text in self._tokenizer.batch_decode(ids[:, 1:], skip_special_tokens=True):  # behind the one it starts from
            yield (text,)

    def _continuations(self, rows: pd.DataFrame) -> Iterator[Row]:
        """Of each text the mean loss over its blocks, None of less than two tokens, and what the model writes on."""
        every = self._tokenizer(rows["text"].tolist(), add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(self._losses(every), self._written(every), strict=True)

    def _losses(self, every: Sequence[Sequence[int]]) -> Iterator[float | None]:
        length = self._settings["max_length"]
        blocks = [
            (row, torch.tensor(ids[start : start + length]))
            for row, ids in enumerate(every)
            for start in range(0, len(ids), length)
        ]
        sums, counts = [0.0] * len(every), [0] * len(every)
        for some in self._batches(blocks):
            labels = pad_sequence([block for _, block in some], batch_first=True, padding_value=IGNORED)
            logits = self._logits({"input_ids": labels.clamp(min=0), "attention_mask": (labels != IGNORED).long()})
            losses = cross_entropy(
                logits[:, :-1].mT.float(), labels[:, 1:].to(logits.device), ignore_index=IGNORED, reduction="none"
            )
            for (row, block), loss in zip(some, losses.double().sum(1).tolist(), strict=True):
                sums[row] += loss
                counts[row] += len(block) - 1
        yield from (total / count if count else None for total, count in zip(sums, counts, strict=True))

    def _written(self, every: Sequence[Sequence[int]]) -> Iterator[str | None]:
        """What the model writes behind each text, None behind one without a token."""
        contexts = [torch.tensor(ids[-self._read :]) for ids in every if ids]
        texts: Iterator[str] = iter(())
        if contexts:
            ids = pad_sequence(contexts, batch_first=True, padding_value=IGNORED, padding_side="left")
            new = self._write(ids.clamp(min=0), (ids != IGNORED).long(), self._settings["continuation"])
            texts = iter(self._tokenizer.batch_decode(new[:, ids.shape[1] :], skip_special_tokens=True))
        yield from (next(texts) if ids else None for ids in every)

    def _write(self, ids: Tensor, mask: Tensor, tokens: int) -> Tensor:
        """What `generate` gives, greedily, `(rows, …)`."""
        device = self._model.device
        return self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            num_beams=1,
            do_sample=False,
            max_new_tokens=tokens,
        )

    def _inputs(self, rows: pd.DataFrame) -> BatchEncoding:
        return self._tokenized(*(rows[column].tolist() for column in ("text", "text_pair") if column in rows))

    def _tokenized(self, *texts: Sequence[str], **options: Any) -> BatchEncoding:
        length = self._settings["max_length"]
        return self._tokenizer(*texts, truncation=True, max_length=length, padding=True, return_tensors="pt", **options)

    def _logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """`(rows, classes)`, or `(rows, tokens, classes)` of heads that label each token."""
        device = self._model.device
        return self._model(**{name: values.to(device) for name, values in inputs.items()}).logits

    def _name(self, label: int) -> str:
        return str(self._model.config.id2label[label])

    def _batches(self, rows: T) -> Iterator[T]:
        size = self._settings["batch_size"]
        yield from (rows[start : start + size] for start in range(0, len(rows), size))  # type: ignore[arg-type, index]


def _room(model: Any, max_length: int, continuation: int) -> int:
    """Tokens of a text that are read before it is continued: the model needs positions for what it writes, too."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return max_length
    if continuation >= positions:
        raise ValueError(f"promotion.continuation is {continuation}, but the model has {positions} positions: lower it")
    return int(min(max_length, positions - continuation))


if not __package__:  # MLflow runs this file; whoever imports it sets no model
    mlflow.models.set_model(Served())
