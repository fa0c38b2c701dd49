"""Summarization by an encoder and a decoder: the document is read, the summary is written token by token.

Scores are ROUGE (Lin, 2004) as `rouge_score` computes it, with words stemmed: F-measures of each row's written summary
against its whole reference, as a mean over rows. Its words are those of English letters and digits.

(choice) ROUGE-L is that of the whole summary as one sequence. The tables of papers on CNN/DailyMail often have
ROUGE-Lsum, the union over sentences, which is larger; of a summary of one sentence, as in XSum, the two are the same.
(choice) Summaries are written greedily, so that a score is cheap and no setting decides it; papers use beams, which
score somewhat higher. What else the model's own generation config asks for (tokens it is forced to write, n-grams it
may not repeat) holds.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM, DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from eckart.calibration.batches import decoder_inputs
from eckart.calibration.losses import IGNORED, token_loss
from tasks.artifacts.metrics import BY_KIND, MetricName
from tasks.artifacts.task_spec import Split, Task
from tasks.nlp_tasks.nlp_task import Answers, Collate, Scored, TaskKind, labelled, plain_head, predict, scored
from tasks.runtime.stage_runner import StageError


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    """Documents of at most `max_length` tokens behind the task's prefix, and summaries of at most `target_length`."""
    documents = [(task.prefix or "") + text for text in frame["text"]]
    inputs = tokenizer(documents, truncation=True, max_length=task.max_length)
    targets = tokenizer(text_target=frame["label"].tolist(), truncation=True, max_length=task.target_length)
    return Dataset.from_dict(
        {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            "labels": targets["input_ids"],
        }
    )


def collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
    """Rows → a batch with what the decoder reads, and which of it is no padding, spelled out.

    Raises:
        StageError: the model does not say with which token a summary begins.
    """
    try:
        decoder_inputs(model, torch.zeros(1, 1, dtype=torch.long))
    except (AttributeError, TypeError, ValueError) as error:  # each family has its own
        raise StageError(
            "the model does not say with which token a summary begins: add decoder_start_token_id to its config.json"
        ) from error
    pad = DataCollatorWithPadding(tokenizer)

    def batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = pad([{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows])
        labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=IGNORED)
        return {
            **inputs,
            "labels": labels,
            **decoder_inputs(model, labels),
        }

    return batch


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frame: pd.DataFrame,
    task: Task,
    batch_size: int,
    split: Split,
) -> Scored:
    """ROUGE of what the model writes, in `target_length` tokens at most; the loss is the mean over all tokens of the
    summaries, each given those before it."""
    data, batch = encode(frame, task, tokenizer, split), collate(tokenizer, model)
    losses, labels = predict(model, data, batch, batch_size, _losses)
    summaries = _written(model, tokenizer, data, task, batch_size)
    loss = float(losses[labels != IGNORED].astype(np.float64).mean())
    each = each_summary(frame["label"].tolist(), summaries)
    return scored(task, rouge(each), loss, each)


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> list[Answers]:
    data = encode(frame, task, tokenizer, "test")
    return [{"summary": text} for text in _written(model, tokenizer, data, task, batch_size)]


def trivial(train: pd.DataFrame, frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """The first tokens of each document, as many as a summary may have: the lead, of which nothing is learned."""
    documents = frame["text"].tolist()
    ids = tokenizer(documents, add_special_tokens=False, truncation=True, max_length=task.target_length)["input_ids"]
    return each_summary(frame["label"].tolist(), list(tokenizer.batch_decode(ids, skip_special_tokens=True)))


def _written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, task: Task, batch_size: int
) -> list[str]:
    ids, _ = predict(
        model,
        data,
        collate(tokenizer, model),
        batch_size,
        num_beams=1,
        do_sample=False,
        max_new_tokens=task.target_length,
    )
    ids = np.where(ids == IGNORED, tokenizer.pad_token_id, ids)[:, 1:]  # behind the token it starts from
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True))


def each_summary(references: list[str], summaries: list[str]) -> pd.DataFrame:
    """F-measures, in [0, 1]."""
    from rouge_score.rouge_scorer import RougeScorer  # its absl would close stderr where logging is set up after it

    names = BY_KIND["summarization"]
    scorer = RougeScorer(names, use_stemmer=True)
    rows = [scorer.score(*pair) for pair in zip(references, summaries, strict=True)]
    return pd.DataFrame({name: [row[name].fmeasure for row in rows] for name in names})


def rouge(each: pd.DataFrame) -> dict[MetricName, float]:
    """Means over summaries."""
    return {name: fmean(each[name]) for name in BY_KIND["summarization"]}


def _losses(outputs: Any, labels: Tensor) -> Tensor:
    """`(batch, tokens)`: of each token of a summary, given those before it; 0 where there is none."""
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return cross_entropy(logits.mT.float(), labels, ignore_index=IGNORED, reduction="none")


SUMMARIES = TaskKind(
    auto=AutoModelForSeq2SeqLM,
    head=plain_head,
    encode=encode,
    collate=collate,
    loss=token_loss,
    own_loss=False,
    logits=labelled,
    score=score,
    answers=answers,
    trivial=trivial,
)
