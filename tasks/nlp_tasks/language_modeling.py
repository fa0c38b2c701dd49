"""Causal language modelling: predict the next token in blocks of text.

The rows of a split are joined, with empty lines between them, into one text. The text is cut into blocks of
`max_length` tokens, without special tokens; an incomplete last block is dropped. Each block is scored without the text
before it, so perplexity is measured on windows without overlap, as in papers on compressing language models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, default_data_collator
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import IGNORED, Batch, Predictions
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split
from tasks.data.hash_sampling import lowest
from tasks.nlp_tasks._prediction import Collate, Columns, place, predict
from tasks.nlp_tasks.nlp_task import NUMBER, STRING, Answers, NlpTask, Scored, Tokenizer
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

_SEPARATOR = "\n\n"
_ROWS = 10_000  # number of rows that are tokenized at a time


def _next_token_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    return outputs["logits"][:, :-1].flatten(0, 1)


class LanguageModeling(NlpTask):
    metrics: ClassVar = ("perplexity",)
    text_pair: ClassVar = "refused"
    calibration_labels: ClassVar = ("given", "drawn")
    running_text: ClassVar = True
    may_be_empty: ClassVar = ("text",)  # an empty line of the text
    auto_class: ClassVar = "AutoModelForCausalLM"  # its loss is also the mean over blocks, as all have the same length
    pipeline: ClassVar = "text-generation"
    trivial_answer: ClassVar = "the frequencies of tokens in the training text"
    answer_columns: ClassVar = {"loss": {**NUMBER, "required": False}, "continuation": {**STRING, "required": False}}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        return labels is None

    @classmethod
    def prepare(cls, frame: pd.DataFrame, names: Mapping[str, str], source: str) -> pd.DataFrame:
        """Replace missing rows and rows of white space with empty strings: copies of WikiText on the hub have some."""
        text = frame["text"].fillna("")
        text = text.where(text.astype(str).str.strip() != "", "")
        return super().prepare(frame.assign(text=text), names, source)

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return blocks of `max_length` tokens. The labels equal the blocks, since the model itself shifts them by one.

        If there are more blocks than data.sizes allows, those with the lowest hashes are taken, which is a random
        sample. Calibration blocks are a sample of the training blocks.

        Raises:
            StageError: the text is shorter than a block.
        """
        length = self.spec.max_length
        ids = np.concatenate([*_pieces(frame["text"].tolist(), tokenizer), np.empty(0, np.int64)])
        count = len(ids) // length
        if not count:
            raise StageError(
                f"the {split} split has {len(ids)} tokens, less than a block of data.max_length={length}: give it more "
                "text, or lower data.max_length"
            )
        blocks = self._sample(ids[: count * length].reshape(count, length), split)
        return {"input_ids": blocks, "attention_mask": np.ones_like(blocks), "labels": blocks}

    def _sample(self, blocks: np.ndarray, split: Split) -> np.ndarray:
        if split == "calibration":
            blocks = self._sample(blocks, "train")
        size = self.spec.sizes[split]
        if size >= len(blocks):
            return blocks
        purpose = "calibration" if split == "calibration" else "sample"
        return blocks[np.sort(lowest(blocks.tolist(), size, self.spec.seed, purpose))]

    @property
    def predictions(self) -> Predictions:
        return _next_token_logits

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        return default_data_collator

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model with perplexity: the exponential of the mean loss over all predicted tokens."""
        (losses,) = predict(
            model,
            self.columns(frame, tokenizer, split),
            default_data_collator,
            batch,
            lambda outputs, inputs: (_token_losses(outputs["logits"], inputs["labels"]),),
        )
        rows = pd.DataFrame({"loss": losses.astype(np.float64).mean(axis=1)})
        loss = float(rows["loss"].mean())
        # Capped, so that a very bad model has a finite perplexity.
        return self.scored({"perplexity": math.exp(min(loss, 700.0))}, loss, rows)

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        """Return for each row the mean loss of its tokens and, if `continuation` > 0, the model's continuation.

        Each row is cut into blocks of its own, of which the last may be shorter. The loss is None if a row has no token
        to predict, and the continuation is None if a row has no token at all.
        """
        place(model.eval())
        answers: list[Answers] = []
        for start in range(0, len(frame), batch):
            texts = frame["text"].iloc[start : start + batch].tolist()
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            losses = self._text_losses(model, ids, batch)
            if continuation:
                written = self._continued(model, tokenizer, ids, continuation)
                pairs = zip(losses, written, strict=True)
                answers += [{"loss": loss, "continuation": text} for loss, text in pairs]
            else:
                answers += [{"loss": loss} for loss in losses]
        return answers

    @torch.inference_mode()
    def _text_losses(self, model: PreTrainedModel, texts: Sequence[Sequence[int]], batch: int) -> list[float | None]:
        length = self.spec.max_length
        blocks = [
            (row, torch.tensor(ids[start : start + length]))
            for row, ids in enumerate(texts)
            for start in range(0, len(ids), length)
        ]
        sums, counts = [0.0] * len(texts), [0] * len(texts)
        for start in range(0, len(blocks), batch):
            part = blocks[start : start + batch]
            labels = pad_sequence([block for _, block in part], batch_first=True, padding_value=IGNORED)
            labels = labels.to(place(model))
            outputs = model(input_ids=labels.clamp(min=0), attention_mask=(labels != IGNORED).long())
            losses = _token_losses(outputs["logits"], labels).double().sum(1).tolist()
            for (row, block), loss in zip(part, losses, strict=True):
                sums[row] += loss
                counts[row] += len(block) - 1
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    @torch.inference_mode()
    def _continued(
        self, model: PreTrainedModel, tokenizer: Tokenizer, texts: Sequence[Sequence[int]], tokens: int
    ) -> list[str | None]:
        """Return the continuation of each text by greedy decoding, or None for a text without a token."""
        room = self._room(model, tokens)
        contexts = [torch.tensor(ids[-room:]) for ids in texts if ids]
        written: Iterator[str] = iter(())
        if contexts:
            ids = pad_sequence(contexts, batch_first=True, padding_value=IGNORED, padding_side="left").to(place(model))
            new = model.generate(  # type: ignore[operator]
                input_ids=ids.clamp(min=0),
                attention_mask=(ids != IGNORED).long(),
                num_beams=1,
                do_sample=False,
                max_new_tokens=tokens,
            )
            written = iter(tokenizer.batch_decode(new[:, ids.shape[1] :], skip_special_tokens=True))
        return [next(written) if ids else None for ids in texts]

    def check_room(self, model: PreTrainedModel, continuation: int) -> None:
        self._room(model, continuation)

    def _room(self, model: PreTrainedModel, continuation: int) -> int:
        """Return how many tokens of a text the model may read, so that its positions suffice for the continuation, too.

        Raises:
            ValueError: the continuation alone needs all positions.
        """
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is None:
            return self.spec.max_length
        if continuation >= positions:
            raise ValueError(
                f"promotion.continuation is {continuation}, but the model has {positions} positions: lower it"
            )
        return int(min(self.spec.max_length, positions - continuation))

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Score a unigram model: a token's probability is its count in the training blocks plus one, normalized."""
        seen = np.array(self.columns(train, tokenizer, "train")["input_ids"])
        blocks = np.array(self.columns(frame, tokenizer, "test")["input_ids"])
        counts = np.bincount(seen.ravel(), minlength=max(len(tokenizer), blocks.max() + 1)) + 1
        losses = -np.log(counts / counts.sum())
        return pd.DataFrame({"loss": losses[blocks[:, 1:]].mean(axis=1)})

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        return on_draws.perplexity(rows["loss"])


def _pieces(rows: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of the joined rows in pieces: tokenizing all at once takes 100 times the text's memory."""
    for start in range(0, len(rows), _ROWS):
        piece = _SEPARATOR.join(rows[start : start + _ROWS]) + (_SEPARATOR if start + _ROWS < len(rows) else "")
        yield np.array(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token except the first, given the tokens before it, `(batch, tokens - 1)`."""
    return cross_entropy(logits[:, :-1].mT.float(), labels[:, 1:], ignore_index=IGNORED, reduction="none")
