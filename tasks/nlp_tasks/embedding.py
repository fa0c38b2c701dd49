"""Embedding: a vector for each text, whose cosines tell how similar two texts are.

A compressed model should give the vectors of the original, so the original's embeddings are the labels of all training
and scoring (`NlpTask.from_original`), and the data need none. A column of scores for pairs of texts serves the metric
`spearman` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.embeddings import embeddings
from eckart.calibration.losses import Loss
from eckart.calibration.predictions import Predictions
from eckart.model.batches import Batch, without_labels
from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import Metric, MetricName
from tasks.artifacts.task_spec import Split
from tasks.nlp_tasks._encoding import encode_texts
from tasks.nlp_tasks._prediction import Columns, predict
from tasks.nlp_tasks.nlp_task import NUMBERS, Answers, NlpTask, Scored, Tokenizer
from tasks.nlp_tasks.regression import Regression, correlation
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws, mean_of

if TYPE_CHECKING:
    from tasks.config.schema import Data

_BATCH = 64  # texts that the original embeds at a time
_NEIGHBORS = 10
_AT_ONCE = 1024  # texts whose cosines with all others are in memory
_WORDS = 4096  # of the trivial baseline


class Embedding(NlpTask):
    metrics: ClassVar = ("recall_at_10", "spearman")
    own_metrics: ClassVar = {"recall_at_10": Metric("recall@10", share=True)}
    trivial_answer: ClassVar = "TF-IDF vectors, which count words"
    answer_columns: ClassVar = {"embedding": NUMBERS}
    answers_pairs: ClassVar = False
    label: ClassVar = "optional"
    numeric_labels: ClassVar = True
    from_original: ClassVar = True
    own_loss: ClassVar = False
    calibration_labels: ClassVar = ("drawn",)
    auto_class: ClassVar = "AutoModel"
    options: ClassVar = ("pooling", "prefix")
    library: ClassVar = "sentence-transformers"
    loader: ClassVar = "SentenceTransformer"
    pipeline: ClassVar = "sentence-similarity"

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        labeled = params.columns.label is not None
        if labeled and params.columns.text_pair is None:
            raise StageError(
                "data.columns.label must name the scores of pairs of texts, but data.columns.text_pair is null: name "
                "the column of the second text, or write null for label"
            )
        if params.metric == "spearman" and not labeled:
            raise StageError(
                "data.metric is spearman, the correlation with scores of pairs of texts: name their columns in "
                "data.columns, text_pair and label, or write recall_at_10"
            )
        for name in ("validation", "test"):
            if (different := len(np.unique(_texts(splits[name])))) <= _NEIGHBORS + 1:
                raise StageError(
                    f"the {name} split has {different} different texts, so the {_NEIGHBORS} nearest to a text are "
                    f"always all others: give it a hundred or more (data.sizes.{name}, data.shares.{name})"
                )
        return Regression.convert_labels(splits, params) if labeled else ()

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return each text as an example of its own, also those of a pair, with the original's embedding as label."""
        texts = [f"{self.spec.prefix or ''}{text}" for text in _texts(frame).ravel()]
        inputs = encode_texts(tokenizer, texts, max_length=self.spec.max_length)
        return {**inputs, "labels": _originals(frame).reshape(len(texts), -1)} if "original" in frame else inputs

    def with_originals(self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame) -> pd.DataFrame:
        """Return `frame` with the column `original`: the embeddings that `model` gives a row's texts, joined."""
        return frame.assign(original=[*self._embeddings(model, tokenizer, frame, _BATCH).reshape(len(frame), -1)])

    @property
    def predictions(self) -> Predictions:
        return embeddings(self.spec.pooling or "mean")

    @property
    def loss(self) -> Loss:
        """Half the squared distance of the embedding from the original's, which is one minus their cosine."""
        embed = self.predictions

        def distance(model: Any, batch: Batch) -> Tensor:
            return (embed(model(**without_labels(batch)), batch) - batch["labels"]).square().sum() / 2

        return distance

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Compare a model's embeddings with the original's and, if pairs of texts have scores, with these."""
        found = self._embeddings(model, tokenizer, frame, batch)
        rows = _rows(frame, found, self._distinct(tokenizer, frame))
        metrics: dict[MetricName, float] = {"recall_at_10": float(rows["recall_at_10"].mean())}
        if "label" in rows:
            metrics["spearman"] = correlation(spearmanr, rows["label"].to_numpy(), rows["value"].to_numpy())
        return self.scored(metrics, float(1 - (found * _originals(frame)).sum(-1).mean()), rows)

    def _embeddings(self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int) -> np.ndarray:
        """Return the embeddings of each row's texts, `(rows, texts of a row, width)`."""
        data = self.columns(frame.drop(columns="original", errors="ignore"), tokenizer, "test")
        (found,) = predict(model, data, self.collate(tokenizer, model), batch, self._read)
        return found.reshape(*_texts(frame).shape, -1)

    def _distinct(self, tokenizer: Tokenizer, frame: pd.DataFrame) -> np.ndarray:
        """Return the token ids of each row's texts as bytes, `(rows, texts of a row)`."""
        columns = self.columns(frame.drop(columns="original", errors="ignore"), tokenizer, "test")
        ids = [np.asarray(row, np.int64).tobytes() for row in columns["input_ids"]]
        return np.array(ids, object).reshape(_texts(frame).shape)

    def _read(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        pooled = outputs.get("sentence_embedding")  # of an ONNX graph
        return (self.predictions(outputs, batch) if pooled is None else pooled,)

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        found = self._embeddings(model, tokenizer, frame[["text"]], batch)
        return [{"embedding": embedding.tolist()} for (embedding,) in found]

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Embed texts by TF-IDF: counts of the most frequent training words, each weighted by how few texts have it."""
        from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second

        texts = _texts(frame)
        options: dict[str, Any] = {"max_features": _WORDS, "dtype": np.float32}
        try:
            words = TfidfVectorizer(**options).fit(_texts(train).ravel())
        except ValueError:  # no text has a word of two letters
            words = TfidfVectorizer(analyzer="char", **options).fit(_texts(train).ravel())
        found = words.transform(texts.ravel()).toarray().reshape(*texts.shape, -1)
        return _rows(frame, found, self._distinct(tokenizer, frame))

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        return on_draws.spearman(rows) if self.spec.metric == "spearman" else mean_of(rows["recall_at_10"])


def _texts(frame: pd.DataFrame) -> np.ndarray:
    """Return the texts of each row, `(rows, 1)`, or `(rows, 2)` for pairs."""
    return frame[[name for name in ("text", "text_pair") if name in frame]].to_numpy()


def _originals(frame: pd.DataFrame) -> np.ndarray:
    """Return the original's embeddings of each row's texts, `(rows, texts of a row, width)`."""
    return np.stack(frame["original"].to_list()).reshape(*_texts(frame).shape, -1)


def _rows(frame: pd.DataFrame, found: np.ndarray, distinct: np.ndarray) -> pd.DataFrame:
    """Return the per-example results of embeddings `found` `(rows, texts of a row, width)`, each of length 1.

    Args:
        distinct: what tells texts apart `(rows, texts of a row)`.

    The recall of a text is the share of its ten nearest other texts, by the original's embeddings, that are among the
    ten nearest by those found; that of a pair is the mean over its texts. Each text counts once as a neighbor.
    """
    _, places, back = np.unique(distinct.ravel(), return_index=True, return_inverse=True)
    wanted, nearest = (_neighbors(each.reshape(distinct.size, -1)[places]) for each in (_originals(frame), found))
    recall = (wanted[:, :, None] == nearest[:, None, :]).any(-1).mean(1) if len(places) > 1 else np.ones(1)
    rows = pd.DataFrame({"recall_at_10": recall[back].reshape(distinct.shape).mean(1)})
    if "label" in frame:
        rows = rows.assign(label=frame["label"].to_numpy(), value=(found[:, 0] * found[:, 1]).sum(-1))
    return rows


def _neighbors(vectors: np.ndarray) -> np.ndarray:
    """Return the places of each vector's nearest others by their products, `(vectors, neighbors)`."""
    count, found = min(_NEIGHBORS, len(vectors) - 1), []
    for start in range(0, len(vectors), _AT_ONCE):
        products = vectors[start : start + _AT_ONCE] @ vectors.T
        own = np.arange(len(products))
        products[own, start + own] = -np.inf
        found.append(np.argpartition(-products, count, axis=1)[:, :count])
    return np.concatenate(found)
