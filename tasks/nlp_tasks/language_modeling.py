"""Causal language modelling: the next token of blocks that a text is cut into.

A split is one text, its rows joined by an empty line. It is cut into blocks of `max_length` tokens, without special
tokens between them; what is left at its end is dropped. Every block is scored on its own: perplexity is that of windows
that do not overlap, as in the tables of papers on compressing language models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, default_data_collator
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import Batch, mean_loss_times_batch
from tasks.artifacts.task_spec import Split, Task
from tasks.data.hash_sampling import lowest
from tasks.models.model_io import inputs_device
from tasks.nlp_tasks.nlp_task import Answers, Scored, TaskKind, plain_head, predict, scored
from tasks.runtime.stage_runner import StageError

_SEPARATOR = "\n\n"
_ROWS = 10_000  # that are tokenized at a time


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    """Blocks `(max_length,)` with themselves as labels, which models shift; as many as data.sizes asks for, by lot.

    The calibration blocks are some of the training blocks.

    Raises:
        StageError: the text is shorter than a block.
    """
    ids = np.concatenate([*_pieces(frame["text"].tolist(), tokenizer), np.empty(0, np.int64)])
    count = len(ids) // task.max_length
    if not count:
        raise StageError(
            f"the {split} split has {len(ids)} tokens, less than a block of data.max_length={task.max_length}: "
            "give it more text, or lower data.max_length"
        )
    blocks = ids[: count * task.max_length].reshape(count, task.max_length)
    blocks = _some(blocks, task, split)
    return Dataset.from_dict({"input_ids": blocks, "attention_mask": np.ones_like(blocks), "labels": blocks})


def _pieces(rows: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """The tokens of the text, some rows at a time: as one string a large text would take a hundredfold of its size."""
    for start in range(0, len(rows), _ROWS):
        piece = _SEPARATOR.join(rows[start : start + _ROWS]) + (_SEPARATOR if start + _ROWS < len(rows) else "")
        yield np.array(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def _some(blocks: np.ndarray, task: Task, split: Split) -> np.ndarray:
    if split == "calibration":  # of those that training sees
        blocks = _some(blocks, task, "train")
    if task.sizes[split] >= len(blocks):
        return blocks
    purpose = "calibration" if split == "calibration" else "sample"
    return blocks[np.sort(lowest(blocks.tolist(), task.sizes[split], task.seed, purpose))]


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frame: pd.DataFrame,
    task: Task,
    batch_size: int,
    split: Split,
) -> Scored:
    """Perplexity is the exponential of the mean loss over all predicted tokens."""
    data = encode(frame, task, tokenizer, split)
    losses, _ = predict(model, data, default_data_collator, batch_size, _losses)
    each = pd.DataFrame({"loss": losses.astype(np.float64).mean(axis=1)})
    loss = float(each["loss"].mean())
    return scored(task, {"perplexity": math.exp(min(loss, 700.0))}, loss, each)  # finite, however bad


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> list[Answers]:
    """The mean loss of each row's own blocks, the last of which may be shorter; None where no token is predicted."""
    every = tokenizer(frame["text"].tolist(), add_special_tokens=False, verbose=False)["input_ids"]
    return [{"loss": _mean_loss(model.eval(), ids, task.max_length)} for ids in every]


def trivial(train: pd.DataFrame, frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """How often each token of the vocabulary is in the training blocks, plus one: a model without a context."""
    seen = np.array(encode(train, task, tokenizer, "train")["input_ids"])
    blocks = np.array(encode(frame, task, tokenizer, "test")["input_ids"])
    counts = np.bincount(seen.ravel(), minlength=max(len(tokenizer), blocks.max() + 1)) + 1
    losses = -np.log(counts / counts.sum())
    return pd.DataFrame({"loss": losses[blocks[:, 1:]].mean(axis=1)})


@torch.inference_mode()
def _mean_loss(model: PreTrainedModel, ids: list[int], length: int) -> float | None:
    total, count = 0.0, 0
    for block in torch.tensor(ids, dtype=torch.long, device=inputs_device(model)).split(length):
        if len(block) > 1:
            total += (len(block) - 1) * float(model(input_ids=block[None], labels=block[None]).loss)
            count += len(block) - 1
    return total / count if count else None


def _losses(outputs: Any, labels: Tensor) -> Tensor:
    """`(batch, tokens - 1)`: of each token but the first, given those before it."""
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return cross_entropy(logits[:, :-1].mT.float(), labels[:, 1:], reduction="none")


def _logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    return outputs["logits"][:, :-1].flatten(0, 1)


def _collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Any:
    return default_data_collator


LANGUAGE = TaskKind(
    auto=AutoModelForCausalLM,
    head=plain_head,
    encode=encode,
    collate=_collate,
    loss=mean_loss_times_batch,  # blocks are of one length, so each counts alike
    own_loss=True,
    logits=_logits,
    score=score,
    answers=answers,
    trivial=trivial,
)
