"""Causal language modeling: predict the next token in blocks of text.

The rows of a split are joined into one text: with empty lines or other white space between them, or as documents with
a token between them that ends a text (data.separator). The text is cut into blocks of `max_length` tokens, without
other special tokens; an incomplete last block is dropped. With data.first, the beginning-of-text token takes the place
of each block's first token, as in llama.cpp's tool for perplexity.

Each block is scored without the text before it, so perplexity is measured on windows without overlap, as in papers on
compressing language models. With data.stride the windows overlap, and each scores the tokens that the one before it did
not reach: no token is scored twice. An incomplete last window is dropped.

Calibration blocks are a sample of the training blocks, or windows at random places of the training text
(data.calibration_blocks), as those papers draw them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, default_data_collator
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import Loss, causal_loss, token_losses
from eckart.calibration.predictions import Predictions
from eckart.model.batches import IGNORED, Batch
from eckart.model.positions import longest_text
from eckart.text.generation import continued
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split
from tasks.data.hash_sampling import lowest, purpose_of
from tasks.models.device import to_device
from tasks.nlp_tasks._prediction import Collate, Columns, predict
from tasks.nlp_tasks.nlp_task import NUMBER, STRING, Answers, NlpTask, Scored, Tokenizer
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

_SEPARATOR = "\n\n"  # an empty line
_CHARACTERS = 5_000_000  # that are tokenized at a time, which takes some 600 MB


def _next_token_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    # All tokens of a block are text. A mask would copy the logits, and their gradient: twice the time.
    return outputs["logits"][:, :-1].flatten(0, 1)


class LanguageModeling(NlpTask):
    metrics: ClassVar = ("perplexity",)
    text_pair: ClassVar = "refused"
    label: ClassVar = "refused"
    calibration_labels: ClassVar = ("given", "drawn")
    running_text: ClassVar = True
    options: ClassVar = ("calibration_blocks", "first", "separator", "stride")
    may_be_empty: ClassVar = ("text",)  # an empty line of the text
    auto_class: ClassVar = "AutoModelForCausalLM"
    own_loss: ClassVar = False  # BART's decoder compares each token with the prediction of the next one
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
        """Return blocks of `max_length` tokens. The labels equal the blocks: the loss shifts them by one.

        If there are more blocks than data.sizes allows, those with the lowest hashes are taken, which is a random
        sample. Calibration blocks are a sample of the training blocks, or begin at random tokens of the training text.
        Then they may overlap, and there are as many as data.sizes says, the first of which are those of a smaller size.

        Raises:
            StageError: the text is shorter than a block, or the tokenizer lacks the token between documents, or the
                first one of blocks.
        """
        windows = self._windows(frame, tokenizer, split)
        if split == "calibration" and self.spec.calibration_blocks == "random":
            places = np.random.default_rng(self.spec.seed).integers(len(windows), size=self.spec.sizes[split])
            blocks = windows[places]
        else:
            blocks = windows[:: self.spec.max_length]
            blocks = blocks[self._sample(blocks, split)]
        blocks = self._begun(blocks, tokenizer)
        return {"input_ids": blocks, "attention_mask": np.ones_like(blocks), "labels": blocks}

    def _scored(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> dict[str, np.ndarray]:
        """Return the windows that are scored; labels are IGNORED at tokens that only serve as context."""
        length, stride = self.spec.max_length, self.spec.stride
        windows = self._windows(frame, tokenizer, split)[:: stride or length]
        chosen = self._sample(windows, split)
        blocks = self._begun(windows[chosen], tokenizer)
        labels = blocks.copy()
        if stride:
            labels[chosen > 0, : length - stride] = IGNORED
        return {"input_ids": blocks, "attention_mask": np.ones_like(blocks), "labels": labels}

    def _begun(self, blocks: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Put the token that data.first names in the place of each block's first token."""
        first = np.array(self._first(tokenizer), blocks.dtype)
        return np.hstack([np.tile(first, (len(blocks), 1)), blocks[:, len(first) :]])

    def _first(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token with which each block begins, or no token if it begins with the text.

        Raises:
            StageError: the tokenizer has no beginning-of-text token.
        """
        if self.spec.first is None:
            return []
        if tokenizer.bos_token_id is None:
            raise StageError("the tokenizer has no beginning-of-text token: write data.first: null")
        return [tokenizer.bos_token_id]

    def _windows(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> np.ndarray:
        """Return all windows of `max_length` tokens of the joined text, one for each beginning, as a view."""
        length = self.spec.max_length
        ids = np.concatenate([*_pieces(frame["text"].tolist(), tokenizer, self.spec.separator), np.empty(0, np.int64)])
        if len(ids) < length:
            raise StageError(
                f"the {split} split has {len(ids)} tokens, less than a block of data.max_length={length}: give it more "
                "text, or lower data.max_length"
            )
        return sliding_window_view(ids, length)

    def _sample(self, blocks: np.ndarray, split: Split) -> np.ndarray:
        """Return the positions of the blocks that are taken, in the order of the text."""
        rows = self._sample(blocks, "train") if split == "calibration" else np.arange(len(blocks))
        size = self.spec.sizes[split]
        if size >= len(rows):
            return rows
        contents = (block.tolist() for block in blocks[rows])
        return rows[np.sort(lowest(contents, size, self.spec.seed, purpose_of(split)))]

    @property
    def loss(self) -> Loss:
        return causal_loss

    @property
    def predictions(self) -> Predictions:
        return _next_token_logits

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        return default_data_collator

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model with perplexity: the exponential of the mean loss over all predicted tokens."""
        data = self._scored(frame, tokenizer, split)
        (losses,) = predict(
            model,
            data,
            default_data_collator,
            batch,
            lambda outputs, inputs: (_following(outputs["logits"], inputs["labels"]),),
        )
        rows = self._rows(losses.astype(np.float64), data["labels"])
        loss = float(np.average(rows["loss"], weights=_weights(rows)))
        # Capped, so that a very bad model has a finite perplexity.
        return self.scored({"perplexity": math.exp(min(loss, 700.0))}, loss, rows)

    def _rows(self, losses: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
        """Return each window's mean loss over its scored tokens and, if windows score different numbers, the number.

        Args:
            losses: loss of each token but the first, 0 where it is not scored, `(windows, max_length - 1)`.
            labels: `(windows, max_length)`.
        """
        tokens = (labels[:, 1:] != IGNORED).sum(axis=1)
        rows = pd.DataFrame({"loss": losses.sum(axis=1) / tokens})
        return rows.assign(tokens=tokens) if self.spec.stride else rows

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        """Return for each row the mean loss of its tokens and, if `continuation` > 0, the model's continuation.

        Each row is cut into blocks of its own, of which the last may be shorter. With data.first, the blocks and the
        text that is continued begin with that token. The loss is None if a row has no token to predict, and the
        continuation is None if a row has no token at all.
        """
        to_device(model.eval())
        first = self._first(tokenizer)
        answers: list[Answers] = []
        for start in range(0, len(frame), batch):
            texts = frame["text"].iloc[start : start + batch].tolist()
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            losses = self._text_losses(model, ids, batch, first)
            if continuation:
                written = self._continued(model, tokenizer, ids, continuation, first)
                pairs = zip(losses, written, strict=True)
                answers += [{"loss": loss, "continuation": text} for loss, text in pairs]
            else:
                answers += [{"loss": loss} for loss in losses]
        return answers

    @torch.inference_mode()
    def _text_losses(
        self, model: PreTrainedModel, texts: Sequence[Sequence[int]], batch: int, first: Sequence[int]
    ) -> list[float | None]:
        length = self.spec.max_length - len(first)
        blocks = [
            (row, torch.tensor([*first, *ids[start : start + length]]))
            for row, ids in enumerate(texts)
            for start in range(0, len(ids), length)
        ]
        sums, counts = [0.0] * len(texts), [0] * len(texts)
        for start in range(0, len(blocks), batch):
            part = blocks[start : start + batch]
            labels = pad_sequence([block for _, block in part], batch_first=True, padding_value=IGNORED)
            labels = labels.to(to_device(model))
            outputs = model(input_ids=labels.clamp(min=0), attention_mask=(labels != IGNORED).long())
            losses = _following(outputs["logits"], labels).double().sum(1).tolist()
            for (row, block), loss in zip(part, losses, strict=True):
                sums[row] += loss
                counts[row] += len(block) - 1
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    def _continued(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        texts: Sequence[Sequence[int]],
        tokens: int,
        first: Sequence[int],
    ) -> list[str | None]:
        """Return the continuation of each text by greedy decoding, or None for a text without a token."""
        room = self._room(model, tokens) - len(first)
        contexts = [torch.tensor([*first, *ids[max(len(ids) - room, 0) :]]) for ids in texts if ids]
        written: Iterator[str] = iter(())
        if contexts:
            ids = pad_sequence(contexts, batch_first=True, padding_value=IGNORED, padding_side="left").to(
                to_device(model)
            )
            new = continued(model, ids.clamp(min=0), (ids != IGNORED).long(), tokens)
            written = iter(tokenizer.batch_decode(new, skip_special_tokens=True))
        return [next(written) if ids else None for ids in texts]

    def check_room(self, model: PreTrainedModel, continuation: int) -> None:
        self._room(model, continuation)

    def _room(self, model: PreTrainedModel, continuation: int) -> int:
        """Return how many tokens of a text the model may read, so that its positions suffice for the continuation, too.

        Raises:
            ValueError: the continuation alone needs all positions.
        """
        positions = longest_text(model)
        if positions is None:
            return self.spec.max_length
        if continuation >= positions:
            raise ValueError(
                f"promotion.continuation is {continuation}, but the model has {positions} positions: lower it"
            )
        return min(self.spec.max_length, positions - continuation)

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Score a unigram model: a token's probability is its count in the training blocks plus one, normalized."""
        seen = np.array(self.columns(train, tokenizer, "train")["input_ids"])[:, len(self._first(tokenizer)) :]
        labels = self._scored(frame, tokenizer, "test")["labels"]
        counts = np.bincount(seen.ravel(), minlength=max(len(tokenizer), labels.max() + 1)) + 1
        losses = -np.log(counts / counts.sum())
        following = labels[:, 1:]
        return self._rows(np.where(following == IGNORED, 0.0, losses[following.clip(min=0)]), labels)

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        return on_draws.perplexity(rows["loss"], _weights(rows))


def _weights(rows: pd.DataFrame) -> pd.Series[float]:
    """Return the weight of each window in the mean loss: its number of scored tokens, or 1 if that is the same."""
    return rows["tokens"].astype(float) if "tokens" in rows else pd.Series(1.0, index=rows.index)


def _pieces(rows: Sequence[str], tokenizer: Tokenizer, separator: str | None) -> Iterator[np.ndarray]:
    """Yield the token ids of the joined rows in pieces: tokenizing all at once takes 100 times the text's memory."""
    if separator and separator.strip():
        yield from _documents([row for row in rows if row], tokenizer, separator)
        return
    between = _SEPARATOR if separator is None else separator
    portions = [*_portions(rows)]
    for portion in portions:
        piece = between.join(portion) + between * (portion is not portions[-1])
        yield np.array(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def _documents(rows: Sequence[str], tokenizer: Tokenizer, separator: str) -> Iterator[np.ndarray]:
    """Yield the token ids of each row, and the token `separator` between two rows.

    Raises:
        StageError: the tokenizer has no such token.
    """
    if separator not in tokenizer.get_vocab():
        raise StageError(
            f"the tokenizer has no token {separator}, which data.separator, or the separator of another text, names: "
            f"write one of its special tokens ({', '.join(tokenizer.all_special_tokens)}), or white space"
        )
    end = np.array([tokenizer.convert_tokens_to_ids(separator)])
    batches = (tokenizer(portion, add_special_tokens=False, verbose=False) for portion in _portions(rows))
    for position, ids in enumerate(ids for batch in batches for ids in batch["input_ids"]):
        if position:
            yield end
        yield np.array(ids, np.int64)


def _portions(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows in portions of at most `_CHARACTERS`; a longer row is a portion by itself."""
    portion, characters = list[str](), 0
    for row in rows:
        if portion and characters + len(row) > _CHARACTERS:
            yield portion
            portion, characters = [], 0
        portion.append(row)
        characters += len(row)
    if portion:
        yield portion


def _following(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token except the first, given the tokens before it, `(batch, tokens - 1)`."""
    return token_losses(logits[:, :-1], labels[:, 1:])
