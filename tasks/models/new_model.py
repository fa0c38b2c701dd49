"""Make a new model with random weights, and a tokenizer whose vocabulary is the words of the training text.

Such are the language models of Penn Treebank (Zaremba et al. 2014), one of which DRONE compresses in table 4: their
tokens are whole words, `<unk>` for all rare words, and the end of a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import PreTokenizer, Punctuation, Sequence, WhitespaceSplit
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.config.schema import NewModel
from tasks.models.base_model import Base
from tasks.nlp_tasks import kind_of

_PAD, _UNKNOWN, _END = "<pad>", "<unk>", "\n"
_SPLITTERS: Mapping[str, PreTokenizer] = {
    "spaces": WhitespaceSplit(),
    "punctuation": Sequence([WhitespaceSplit(), Punctuation()]),
}


def make(new: NewModel, dtype: str, task: Task, train: pd.DataFrame) -> Base:
    """Make a model for `task` with random weights, from torch's present random state, and its tokenizer.

    Args:
        dtype: type of the weights, as in model.dtype.
        train: the training split.

    Raises:
        StageError: transformers has no such model for the task, or refuses its config.
    """
    tokenizer = word_tokenizer(new, _texts(train))
    kind = kind_of(task)
    try:
        config = _config(new, tokenizer, **kind.head())
        model = kind.auto.from_config(config, dtype=getattr(torch, dtype))
    except (TypeError, ValueError) as error:
        raise StageError(f"model.new cannot be made for this task: {error}") from error
    return Base(model, tokenizer, {}, "random", "")


def word_tokenizer(new: NewModel, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the most frequent words of `texts`; of words that are equally frequent, the first by name.

    Three tokens come before the words: padding, unknown words, and the line break, which white space otherwise is not.
    """
    splitter, special = _SPLITTERS[new.words], (_PAD, _UNKNOWN, _END)
    counts = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(text.replace(_UNKNOWN, " ")))
    for name in special:
        counts.pop(name, None)
    words = sorted(counts, key=lambda word: (-counts[word], word))[: new.vocabulary]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate((*special, *words))}, _UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, unk_token=_UNKNOWN, eos_token=_END, padding_side="right"
    )


def _texts(train: pd.DataFrame) -> Iterable[str]:
    for name in ("text", "text_pair"):
        for cell in train.get(name, ()):
            yield cell if isinstance(cell, str) else " ".join(cell)  # a list of words


def _config(new: NewModel, tokenizer: PreTrainedTokenizerFast, **head: Any) -> PreTrainedConfig:
    """Return the config of the model; model.new may name other tokens that begin and end texts than the tokenizer.

    Raises:
        ValueError: model.new names a type or a value that does not exist; transformers would keep an unknown value.
    """
    default = AutoConfig.for_model(new.model_type)
    given = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **head}
    if unknown := [name for name in new.config if name in given or not hasattr(default, name)]:
        raise ValueError(f"a {new.model_type} has no {', '.join(unknown)} that could be set: correct model.new.config")
    ends = {name: new.config.get(name, getattr(tokenizer, name)) for name in ("bos_token_id", "eos_token_id")}
    words = range(len(tokenizer))
    for name, value in ends.items():
        if not all(token is None or token in words for token in (value if isinstance(value, list) else [value])):
            raise ValueError(f"model.new.config.{name} is {value}: write a number in 0 … {words[-1]}, or leave it out")
    return AutoConfig.for_model(new.model_type, **{**new.config, **ends, **given})
