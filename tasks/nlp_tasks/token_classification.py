"""Token classification: a tag for each word of an example, such as named entities or parts of speech.

A word is labelled at its first sub-token. (choice) The words are joined by spaces before they are tokenized, not handed
over one by one: tokenizers of bytes and of sentence pieces mark a word by the space before it, and would take words
without one for the middles of others. Words beyond `max_length` tokens are neither learned nor scored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForTokenClassification, PreTrainedModel

from eckart.calibration.losses import IGNORED, Loss, Predictions, token_loss
from eckart.text.word_alignment import first_tokens
from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split
from tasks.data.label_encoding import class_ids, names_in_source
from tasks.nlp_tasks._prediction import Collate, Columns, predict
from tasks.nlp_tasks.nlp_task import STRINGS, Answers, NlpTask, Scored, Tokenizer, labelled
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

if TYPE_CHECKING:
    from tasks.config.schema import Data

ENTITY_TAG = re.compile(r"O|[BIES]-.+")
"""If all tags match, F1 counts entities, each right only as a whole."""


class TokenClassification(NlpTask):
    metrics: ClassVar = ("accuracy", "f1")
    text_pair: ClassVar = "refused"
    text_is_words: ClassVar = True
    text_columns: ClassVar = ()
    auto_class: ClassVar = "AutoModelForTokenClassification"
    problem_type: ClassVar = "single_label_classification"
    own_loss: ClassVar = False
    pipeline: ClassVar = "token-classification"
    trivial_answer: ClassVar = "the most frequent tag of the training rows"
    answer_columns: ClassVar = {"tags": STRINGS}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether texts are lists of words, and labels are lists as long."""
        if labels is None or not all(map(pd.api.types.is_list_like, [*texts, *labels])):
            return False
        return bool((texts.map(len) == labels.map(len)).all())

    @classmethod
    def prepare(cls, frame: pd.DataFrame, names: Mapping[str, str], source: str) -> pd.DataFrame:
        """Check the words, and turn lists of words into tuples, which can be compared."""
        frame = super().prepare(frame, names, source)
        rows, column = frame["text"], f"column {names['text']} of {source}"
        if not all(pd.api.types.is_list_like(row) and all(isinstance(word, str) for word in row) for row in rows):
            raise StageError(
                f"{column} is not lists of words: data.columns.text must name lists of strings, one a word"
            )
        if empty := sum(not len(row) for row in rows):
            raise StageError(f"{column} has {empty} rows without a word: remove them")
        frame["text"] = [tuple(row) for row in rows]
        return frame

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        """Turn tags into ids; a tag that the source names is known even if train does not have it."""
        for name, frame in splits.items():
            pairs = zip(frame["text"], frame["label"], strict=True)
            if wrong := sum(not pd.api.types.is_list_like(tags) or len(tags) != len(words) for words, tags in pairs):
                raise StageError(
                    f"the {name} split has {wrong} rows where column {params.columns.label} is not a list of as many "
                    f"tags as {params.columns.text} has words: correct data.columns, or those rows"
                )
        names = names_in_source(splits["train"]["label"])
        ids = class_ids({name: frame["label"].explode() for name, frame in splits.items()}, params, names)
        for frame in splits.values():
            frame["label"] = [[ids[tag] for tag in tags] for tags in frame["label"]]
        return tuple(map(str, ids))

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return rows with the tag of each word at its first sub-token, and -100 elsewhere.

        Raises:
            StageError: the tokenizer does not say where its tokens stand.
        """
        return self._columns(frame, tokenizer)[0]

    def _columns(self, frame: pd.DataFrame, tokenizer: Tokenizer) -> tuple[dict[str, list[Any]], list[np.ndarray]]:
        """Return the columns, and the first sub-token of each word `(words,)`, -1 where it has none.

        Without a column label every word has tag 0, which marks the tokens that are to be answered.
        """
        self.check_offsets(tokenizer)
        texts = [" ".join(words) for words in frame["text"]]
        columns = tokenizer(texts, truncation=True, max_length=self.spec.max_length, return_offsets_mapping=True)
        firsts = [
            first_tokens(words, np.array(offsets), np.array([part is not None for part in columns.sequence_ids(row)]))
            for row, (words, offsets) in enumerate(zip(frame["text"], columns.pop("offset_mapping"), strict=True))
        ]
        tags = frame["label"] if "label" in frame else [np.zeros(len(words), int) for words in frame["text"]]
        rows = zip(columns["input_ids"], tags, firsts, strict=True)
        labels = [_token_labels(len(ids), np.asarray(row), first) for ids, row, first in rows]
        return {**columns, "labels": labels}, firsts

    @property
    def loss(self) -> Loss:
        return token_loss

    @property
    def predictions(self) -> Predictions:
        return labelled

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        return DataCollatorForTokenClassification(tokenizer)

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model; a row contributes the tags of its labelled tokens."""
        data = self.columns(frame, tokenizer, split)
        outputs, labels = predict(model, data, self.collate(tokenizer, model), batch, _read)
        guesses, where = outputs.argmax(-1), labels != IGNORED
        tags = {
            name: [row[here] for row, here in zip(values, where, strict=True)]
            for name, values in (("label", labels), ("guess", guesses))
        }
        return self.scored(self.all_metrics(guesses, labels), mean_loss(outputs, labels), pd.DataFrame(tags))

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        """Return a tag for each word, None for a word without a token within `max_length`."""
        data, firsts = self._columns(frame.drop(columns="label", errors="ignore"), tokenizer)
        outputs, labels = predict(model, data, self.collate(tokenizer, model), batch, _read)
        rows = zip(outputs.argmax(-1), labels, firsts, strict=True)
        return [{"tags": self._tags(guesses[row != IGNORED], first)} for guesses, row, first in rows]

    def _tags(self, guesses: np.ndarray, first: np.ndarray) -> list[str | None]:
        """Return the tags of words from `guesses` `(labelled tokens,)`; padding may be on either side of a row."""
        order = iter(np.unique(first[first >= 0], return_inverse=True)[1])
        return [None if token < 0 else self.spec.labels[guesses[next(order)]] for token in first]

    def all_metrics(self, guesses: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
        """Return all metrics of tags `(rows, tokens)` at labelled tokens.

        F1 counts entities, each right only as a whole (seqeval's, which is conlleval's), if every tag is O or begins
        with B-, I-, E- or S-; otherwise it is the mean over tags.
        """
        where = labels != IGNORED
        accuracy = float(accuracy_score(labels[where], guesses[where]))
        if not self._has_entities:
            return {"accuracy": accuracy, "f1": float(f1_score(labels[where], guesses[where], average="macro"))}
        from seqeval.metrics import f1_score as entity_f1_score  # which a served version does not need

        names = np.array(self.spec.labels)
        wanted, given = (
            [names[row[here]].tolist() for row, here in zip(tags, where, strict=True)] for tags in (labels, guesses)
        )
        return {"accuracy": accuracy, "f1": float(entity_f1_score(wanted, given, zero_division=0))}

    @property
    def _has_entities(self) -> bool:
        return all(ENTITY_TAG.fullmatch(tag) for tag in self.spec.labels)

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Give every word the most frequent tag of the training rows."""
        most = int(np.bincount(np.concatenate(train["label"].tolist())).argmax())
        labels = [np.array(row) for row in self.columns(frame, tokenizer, "test")["labels"]]
        wanted = [row[row != IGNORED] for row in labels]
        return pd.DataFrame({"label": wanted, "guess": [np.full_like(row, most) for row in wanted]})

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        guesses = np.unique(np.concatenate(list(rows["guess"])))
        return self.spec.labels[int(guesses[0])] if len(guesses) == 1 else None

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        if self.spec.metric == "f1" and self._has_entities:
            return on_draws.of_sums(self._entity_counts(rows), lambda sums: on_draws.f1(*sums.T))
        metric = {"accuracy": on_draws.accuracy, "f1": on_draws.macro_f1}[self.spec.metric]
        return on_draws.of_classes(on_draws.class_counts(rows, len(self.spec.labels)), metric)

    def _entity_counts(self, rows: pd.DataFrame) -> np.ndarray:
        """Count how many entities of each row are right, guessed and wanted, `(rows, 3)`."""
        from seqeval.metrics.sequence_labeling import get_entities

        names = np.array(self.spec.labels)
        pairs = [
            [set(get_entities(names[np.asarray(tags, int)].tolist())) for tags in pair]
            for pair in zip(rows["guess"], rows["label"], strict=True)
        ]
        return np.array([[len(given & wanted), len(given), len(wanted)] for given, wanted in pairs], float)


def mean_loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over rows of each row's mean cross-entropy, as `eckart.calibration.losses.token_loss` has it.

    Args:
        outputs: `(rows, tokens, classes)`.
        labels: `(rows, tokens)`.
    """
    predicted, wanted = torch.from_numpy(outputs).double(), torch.from_numpy(labels)
    losses = cross_entropy(predicted.mT, wanted, ignore_index=IGNORED, reduction="none")
    return float((losses.sum(1) / (wanted != IGNORED).sum(1).clamp(min=1)).mean())


def _token_labels(tokens: int, tags: np.ndarray, first: np.ndarray) -> np.ndarray:
    labels = np.full(tokens, IGNORED)
    labels[first[first >= 0]] = tags[first >= 0]
    return labels


def _read(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return outputs["logits"], batch["labels"]
