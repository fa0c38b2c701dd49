"""Summarization with an encoder-decoder: the encoder reads a document, the decoder generates a summary.

Scores are ROUGE F-measures (Lin, 2004), computed with `rouge_score` and stemming: each generated summary is compared
with its whole, untruncated reference, and the metric is the mean over examples.

(choice) Words of all scripts count, and accents; `rouge_score` alone counts a to z and digits. In scripts without
spaces between words, such as Chinese, each character counts as a word.
(choice) ROUGE-L treats a summary as one sequence. Papers on CNN/DailyMail often report ROUGE-Lsum, the union over
sentences, which is larger. For summaries of one sentence, as in XSum, the two are equal.
(choice) Decoding is greedy unless data.generation asks for beams. Greedy decoding is cheap and has no settings; papers
use beam search, which scores somewhat higher. Other generation settings of the model (forced tokens, n-grams that must
not repeat) are kept.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from tokenizers import Regex, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithPadding, PreTrainedModel

from eckart.calibration.batch_preparation import decoder_inputs
from eckart.calibration.losses import Loss, token_loss, token_losses
from eckart.model.batches import IGNORED, Batch
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split
from tasks.nlp_tasks._encoding import encode_texts
from tasks.nlp_tasks._prediction import Collate, Columns, predict
from tasks.nlp_tasks.nlp_task import STRING, Answers, NlpTask, Scored, Tokenizer

if TYPE_CHECKING:
    from tasks.config.schema import Data


_TITLES = "".join(rf"(?<!\b{title})" for title in ("[A-Z]", "Mr", "Mrs", "Ms", "Dr", "St", "Prof"))
_END = re.compile(rf"(?P<sentence>(?:{_TITLES}\.|[!?])[.!?]*[\"'”’)\]]*)\s+(?![a-z\s])")
"""The end of a sentence; the group `sentence` is without the white space after it."""

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = pre_tokenizers.Split(
    Regex(rf"[{_UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]&&[^{_UNSPACED}]]+"), behavior="removed", invert=True
)
"""Finds the words of a text: letters, their marks and digits, or one character of a script without spaces."""


class Summarization(NlpTask):
    metrics: ClassVar = ("rouge1", "rouge2", "rougeL")
    text_pair: ClassVar = "refused"
    text_columns: ClassVar = ("text", "label")
    options: ClassVar = ("target_length", "generation", "prefix")
    required_options: ClassVar = {"target_length": "how many tokens a summary has at most"}
    one_graph: ClassVar = False  # an export would need an encoder, a decoder and a decoder with cache
    auto_class: ClassVar = "AutoModelForSeq2SeqLM"
    head_class: ClassVar = "ForConditionalGeneration"
    own_loss: ClassVar = False
    pipeline: ClassVar = "summarization"
    trivial_answer: ClassVar = "the first three sentences of each document (Lead-3)"
    perfect_is_far: ClassVar = True
    answers_may_differ: ClassVar = True
    answer_columns: ClassVar = {"summary": STRING}

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        for name, frame in splits.items():
            if blank := (frame["label"].str.strip() == "").sum():
                raise StageError(
                    f"the {name} split has {blank} examples with a blank {params.columns.label}: remove them"
                )
        return ()

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return the token ids of the documents, with their prefix, and of the reference summaries if there are labels.

        Documents are cut to `max_length` tokens, and summaries to `target_length`.
        """
        documents = [(self.spec.prefix or "") + text for text in frame["text"]]
        inputs = encode_texts(tokenizer, documents, max_length=self.spec.max_length)
        columns = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        if "label" not in frame:
            return columns
        summaries = frame["label"].tolist()
        targets = tokenizer(text_target=summaries, truncation=True, max_length=self.spec.target_length)
        return {**columns, "labels": targets["input_ids"]}

    @property
    def loss(self) -> Loss:
        return token_loss

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        """Return the function that makes a padded batch. If there are labels, it adds the decoder's inputs and mask.

        Raises:
            StageError: the model does not say with which token a summary begins, or learns with another one than it
                writes with.
        """
        _check_first_token(model, tokenizer)
        pad = DataCollatorWithPadding(tokenizer)

        def batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
            inputs = pad([{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows])
            if "labels" not in rows[0]:  # the model generates summaries
                return dict(inputs)
            tokens = [torch.tensor(row["labels"]) for row in rows]
            labels = pad_sequence(tokens, batch_first=True, padding_value=IGNORED)
            return {**inputs, "labels": labels, **decoder_inputs(model, labels)}

        return batch

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score the summaries that the model generates with ROUGE. The loss is the mean over all reference tokens."""
        data = self.columns(frame, tokenizer, split)
        losses, labels = predict(model, data, self.collate(tokenizer, model), batch, _losses)
        summaries = self._written(model, tokenizer, data, batch)
        loss = float(losses[labels != IGNORED].astype(np.float64).mean())
        rows = rouge(frame["label"].tolist(), summaries)
        return self.scored({name: fmean(rows[name]) for name in self.metrics}, loss, rows)

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        data = self.columns(frame.drop(columns="label", errors="ignore"), tokenizer, "test")
        return [{"summary": text} for text in self._written(model, tokenizer, data, batch)]

    def _written(self, model: PreTrainedModel, tokenizer: Tokenizer, data: Columns, batch: int) -> list[str]:
        """Return the summaries that the model generates, with at most `target_length` tokens each."""
        options: dict[str, Any] = {"num_beams": 1, "do_sample": False, "max_new_tokens": self.spec.target_length}
        options |= {"num_return_sequences": 1, "return_dict_in_generate": False}  # whatever the model's config says
        options |= _language(model, tokenizer)
        if search := self.spec.generation:
            options["num_beams"] = search.beams
            if search.length_penalty is not None:
                options["length_penalty"] = search.length_penalty
        (ids,) = predict(model, data, self.collate(tokenizer, model), batch, lambda ids, _: (ids,), **options)
        ids = np.where(ids == IGNORED, tokenizer.pad_token_id, ids)[:, 1:]  # without the decoder's start token
        return list(tokenizer.batch_decode(ids, skip_special_tokens=True))

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Answer with the first three sentences of each document, and score that. Only `frame` is used."""
        return rouge(frame["label"].tolist(), [lead(document) for document in frame["text"]])


def _check_first_token(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Raise StageError unless the model learns and writes summaries that begin with the same token."""
    labels = torch.tensor([tokenizer(text_target="a")["input_ids"]])
    try:
        learned = int(decoder_inputs(model, labels)["decoder_input_ids"][0, 0])
    except (AttributeError, TypeError, ValueError) as error:  # each model family raises its own
        raise StageError(
            "the model does not say with which token a summary begins: add decoder_start_token_id to its "
            "config.json and generation_config.json"
        ) from error
    settings = model.generation_config
    written = settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
    if written != learned:
        raise StageError(
            f"the model learns summaries that begin with the token {learned}, but writes {written} first: add "
            f"decoder_start_token_id: {learned} to its generation_config.json"
        )


def _language(model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the option to begin with the language that the tokenizer's labels begin with (NLLB), if they do."""
    language = getattr(tokenizer, "tgt_lang", None)
    if language is None or getattr(model.generation_config, "forced_bos_token_id", None) is not None:
        return {}
    token = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "lang_code_to_token", {}).get(language, language))
    return {"forced_bos_token_id": token} if tokenizer(text_target="a")["input_ids"][0] == token else {}


def lead(document: str) -> str:
    """Return the first three sentences of a document, or all of it if it has no more.

    (choice) A sentence ends with `.`, `!` or `?`, and quotes or brackets that close there, before white space that is
    not followed by a small letter. A dot after a single capital letter (J. Smith) or after Mr, Mrs, Ms, Dr, St or Prof
    ends none. A line break is white space like any other.
    """
    ends = [match.end("sentence") for match in _END.finditer(document)]
    return document[: ends[2]] if len(ends) >= 3 else document


def rouge(references: list[str], summaries: list[str]) -> pd.DataFrame:
    """Return the ROUGE F-measures of each summary, in [0, 1]."""
    # Imported only here: rouge_score imports absl, which closes stderr if logging is set up afterwards.
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(Summarization.metrics, tokenizer=_Words())
    rows = [scorer.score(*pair) for pair in zip(references, summaries, strict=True)]
    return pd.DataFrame({name: [row[name].fmeasure for row in rows] for name in Summarization.metrics})


class _Words:
    """Cuts a text into stems of words for `rouge_score`, whose own tokenizer knows English letters and digits alone."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        words = (word for word, _ in _WORD.pre_tokenize_str(unicodedata.normalize("NFC", text).lower()))
        return [self._stem(word) if len(word) > 3 else word for word in words]  # as rouge_score does


def _losses(outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
    """Return the loss of each token of the reference summaries, given the tokens before it, and the labels.

    Both are `(batch, tokens)`. The loss is 0 at padding.
    """
    labels = batch["labels"]
    return token_losses(outputs["logits"], labels), labels
