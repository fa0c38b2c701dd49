"""Token classification: a tag for each word of an example, such as named entities or parts of speech.

The first sub-token of a word carries the word's label. Words beyond `max_length` tokens are neither learned nor scored.
(choice) Words are joined by spaces before tokenization, instead of being tokenized one by one: byte-level BPE and
SentencePiece recognize the start of a word by the space before it, and would treat a word without a space as the middle
of another word.
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
from transformers import DataCollatorForTokenClassification, PreTrainedModel

from eckart.calibration.losses import Loss, sum_of_means, token_loss
from eckart.model.batches import IGNORED, Batch
from eckart.text.word_alignment import first_tokens
from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split
from tasks.data.label_encoding import class_ids, names_in_source
from tasks.nlp_tasks._encoding import check_room
from tasks.nlp_tasks._prediction import Collate, Columns, predict
from tasks.nlp_tasks.nlp_task import STRINGS, Answers, NlpTask, Scored, Tokenizer
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

if TYPE_CHECKING:
    from tasks.config.schema import Data

ENTITY_TAG = re.compile(r"O|[BIES]-.+")
"""If all tags match this pattern, F1 counts whole entities; otherwise it is the mean F1 over tags."""


class TokenClassification(NlpTask):
    metrics: ClassVar = ("accuracy", "f1")
    text_pair: ClassVar = "refused"
    text_is_words: ClassVar = True
    text_columns: ClassVar = ()
    auto_class: ClassVar = "AutoModelForTokenClassification"
    problem_type: ClassVar = "single_label_classification"
    own_loss: ClassVar = False
    pipeline: ClassVar = "token-classification"
    trivial_answer: ClassVar = "the most frequent tag of the training examples"
    answer_columns: ClassVar = {"tags": STRINGS}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether texts and labels are lists; `prepare` compares their lengths."""
        return labels is not None and all(map(pd.api.types.is_list_like, [*texts, *labels]))

    @classmethod
    def prepare(cls, frame: pd.DataFrame, names: Mapping[str, str], source: str) -> pd.DataFrame:
        """Check the lists of words, and convert them to tuples, so that rows can be compared."""
        frame = super().prepare(frame, names, source)
        rows, column = frame["text"], f"column {names['text']} of {source}"
        if not all(pd.api.types.is_list_like(row) and all(isinstance(word, str) for word in row) for row in rows):
            raise StageError(
                f"{column} is not lists of words: data.columns.text must name a column of lists of strings"
            )
        if empty := sum(not len(row) for row in rows):
            raise StageError(f"{column} has {empty} examples without a word: remove them")
        frame["text"] = [tuple(row) for row in rows]
        return frame

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        """Convert tags to ids; -100 stays, as it does in data for transformers, for a word that is not to be tagged.

        Among tags that are strings, it is the string "-100".

        If the source defines tag names, train need not contain them all.
        """
        for name, frame in splits.items():
            pairs = zip(frame["text"], frame["label"], strict=True)
            if wrong := sum(not pd.api.types.is_list_like(tags) or len(tags) != len(words) for words, tags in pairs):
                raise StageError(
                    f"the {name} split has {wrong} examples where column {params.columns.label} is not a list of as "
                    f"many tags as {params.columns.text} has words: correct data.columns, or those examples"
                )
            if empty := frame["label"].explode().isna().sum():
                raise StageError(
                    f"column {params.columns.label} of the {name} split has {empty} empty tags: write a tag for each "
                    "word, or the number -100 for words to ignore if tags are numbers"
                )
        names = [name for name in names_in_source(splits["train"]["label"]) if name != IGNORED]
        for name, frame in splits.items():
            frame["label"] = [[IGNORED if str(tag) == str(IGNORED) else tag for tag in row] for row in frame["label"]]
            if not any(tag != IGNORED for row in frame["label"] for tag in row):
                raise StageError(
                    f"no word of the {name} split has a tag: name another split in data.splits, or null to take a part "
                    "of train"
                )
        tags = {name: frame["label"].explode() for name, frame in splits.items()}
        ids = class_ids({name: column[column != IGNORED] for name, column in tags.items()}, params, names)
        known = {**ids, IGNORED: IGNORED}
        for frame in splits.values():
            frame["label"] = [[known[tag] for tag in row] for row in frame["label"]]
        return tuple(map(str, ids))

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return model inputs. The labels are each word's tag at its first sub-token, and -100 at all other tokens.

        Raises:
            StageError: the tokenizer is not a fast one.
        """
        return self._columns(frame, tokenizer)[0]

    def _columns(self, frame: pd.DataFrame, tokenizer: Tokenizer) -> tuple[dict[str, list[Any]], list[np.ndarray]]:
        """Return model inputs and, for each row, the positions of its words' first sub-tokens, `(words,)`.

        The position is -1 for a word without a token. If `frame` has no labels, every word gets the tag 0, which only
        marks the tokens to predict.
        """
        self.check_offsets(tokenizer)
        check_room(tokenizer, self.spec.max_length)
        texts = [" ".join(words) for words in frame["text"]]
        columns = tokenizer(texts, truncation=True, max_length=self.spec.max_length, return_offsets_mapping=True)
        firsts = [
            first_tokens(words, np.array(offsets), np.array([part is not None for part in columns.sequence_ids(row)]))
            for row, (words, offsets) in enumerate(zip(frame["text"], columns.pop("offset_mapping"), strict=True))
        ]
        tags = frame["label"] if "label" in frame else [np.zeros(len(words), int) for words in frame["text"]]
        rows = zip(columns["input_ids"], tags, firsts, strict=True)
        labels = []
        for ids, row_tags, first in rows:
            labels.append(np.full(len(ids), IGNORED))
            labels[-1][first[first >= 0]] = np.asarray(row_tags)[first >= 0]
        return {**columns, "labels": labels}, firsts

    @property
    def loss(self) -> Loss:
        return token_loss

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        return DataCollatorForTokenClassification(tokenizer)

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model. `Scored.predictions` has true and predicted tags at the labeled tokens of each example."""
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
        """Return a tag for each word, or None for words beyond `max_length` tokens and words without a token."""
        data, firsts = self._columns(frame.drop(columns="label", errors="ignore"), tokenizer)
        outputs, labels = predict(model, data, self.collate(tokenizer, model), batch, _read)
        rows = zip(outputs.argmax(-1), labels, firsts, strict=True)
        return [{"tags": self._tags(guesses[row != IGNORED], first)} for guesses, row, first in rows]

    def _tags(self, guesses: np.ndarray, first: np.ndarray) -> list[str | None]:
        """Return the predicted tag of each word of a row; None for a word without a token.

        Args:
            guesses: predicted class at each labeled token, `(labeled tokens,)`, in order.
            first: position of each word's first sub-token, `(words,)`; -1 if there is none. Only the order of the
                positions is used, because padding may shift them.
        """
        order = iter(np.unique(first[first >= 0], return_inverse=True)[1])
        return [None if token < 0 else self.spec.labels[guesses[next(order)]] for token in first]

    def all_metrics(self, guesses: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
        """Return all metrics at labeled tokens; `guesses` and `labels` are `(rows, tokens)`.

        If every tag is O or begins with B-, I-, E- or S-, F1 counts whole entities (as in seqeval and conlleval).
        Otherwise it is the mean F1 over tags.
        """
        where = labels != IGNORED
        accuracy = float(accuracy_score(labels[where], guesses[where]))
        if not self._has_entities:
            return {"accuracy": accuracy, "f1": float(f1_score(labels[where], guesses[where], average="macro"))}
        from seqeval.metrics import f1_score as entity_f1_score  # not required by a served version

        names = np.array(self.spec.labels)
        true, predicted = (
            [names[row[here]].tolist() for row, here in zip(tags, where, strict=True)] for tags in (labels, guesses)
        )
        return {"accuracy": accuracy, "f1": float(entity_f1_score(true, predicted, zero_division=0))}

    @property
    def _has_entities(self) -> bool:
        return all(ENTITY_TAG.fullmatch(tag) for tag in self.spec.labels)

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Predict the most frequent tag of the training examples for every word."""
        tags = np.concatenate(train["label"].tolist())
        most = int(np.bincount(tags[tags != IGNORED]).argmax())
        labels = [np.array(row) for row in self.columns(frame, tokenizer, "test")["labels"]]
        true = [row[row != IGNORED] for row in labels]
        return pd.DataFrame({"label": true, "guess": [np.full_like(row, most) for row in true]})

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        guesses = np.unique(np.concatenate(list(rows["guess"])))
        return self.spec.labels[int(guesses[0])] if len(guesses) == 1 else None

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        if self.spec.metric == "f1" and self._has_entities:
            return on_draws.of_sums(self._entity_counts(rows), lambda sums: on_draws.f1(*sums.T))
        metric = {"accuracy": on_draws.accuracy, "f1": on_draws.macro_f1}[self.spec.metric]
        return on_draws.of_classes(on_draws.class_counts(rows, len(self.spec.labels)), metric)

    def _entity_counts(self, rows: pd.DataFrame) -> np.ndarray:
        """Count the right, predicted and true entities of each row, `(rows, 3)`."""
        from seqeval.metrics.sequence_labeling import get_entities

        names = np.array(self.spec.labels)
        pairs = [
            [set(get_entities(names[np.asarray(tags, int)].tolist())) for tags in pair]
            for pair in zip(rows["guess"], rows["label"], strict=True)
        ]
        return np.array([[len(predicted & true), len(predicted), len(true)] for predicted, true in pairs], float)


def mean_loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean over examples of an example's mean cross-entropy, as in `eckart.calibration.losses.token_loss`.

    Args:
        outputs: `(rows, tokens, classes)`.
        labels: `(rows, tokens)`.
    """
    predicted, true = torch.from_numpy(outputs).double(), torch.from_numpy(labels)
    return float(sum_of_means(predicted, true)) / len(true)


def _read(outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
    return outputs["logits"], batch["labels"]
