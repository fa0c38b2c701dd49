"""Embeddings of texts: how they are pooled from an encoder's hidden states, and a calibration loss without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import DrawnLoss, Loss
from eckart.calibration.predictions import Predictions
from eckart.model.batches import Batch, real_tokens
from eckart.model.module_context import frozen
from eckart.precision import at_least_float32

Pooling = Literal["mean", "cls", "max", "lasttoken"]
"""Name of a pooling, as in sentence-transformers: a text's embedding is the mean or maximum of its tokens' states, or
the state of its first or last token."""


def embeddings(pooling: Pooling) -> Predictions:
    """Return the function that returns the embeddings of a batch's texts `(batch, width)`, each of length 1.

    Raises:
        ValueError: there is no such pooling; later, the model returns no `last_hidden_state`.
    """
    if pooling not in _POOLED:
        raise ValueError(f"there is no pooling {pooling!r}: write one of {', '.join(get_args(Pooling))}")

    def embed(outputs: ModelOutput, batch: Batch) -> Tensor:
        states = at_least_float32(_entry(outputs, "last_hidden_state"))
        return normalize(_POOLED[pooling](states, real_tokens(batch, states)), dim=-1)

    return embed


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _cls(states: Tensor, mask: Tensor) -> Tensor:
    return _at(states, mask.int().argmax(1))  # padding may be on the left


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(~mask[..., None], -torch.inf).amax(1)


def _lasttoken(states: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(mask.shape[1], device=mask.device)
    return _at(states, (places * mask).argmax(1))


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Return the state at one place of each example."""
    return states[torch.arange(len(states), device=states.device), places]


_POOLED: Mapping[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _cls,
    "max": _max,
    "lasttoken": _lasttoken,
}


def embedding_loss(model: Any = "mean", seed: int = 0) -> Loss:
    """Return a loss that calibrates a model whose answers are vectors, without labels: `compress(…, loss=…)`.

    An example's loss is −log p(y), up to a constant, for a label y that is drawn from a normal distribution of variance
    1 around the model's answer e. Its gradient by the weights is −Jᵀ (y − e) for the Jacobian J of e. Over draws, the
    second moment of this gradient is Jᵀ J, the Fisher information of the distribution: what weightings by gradients
    measure is the expected squared change of the answer. There is one draw for each example, so take some hundred
    examples. The loss cannot judge a model: its value is the same for all models.

    Args:
        model: a SentenceTransformer, whose embeddings are the answers; a CrossEncoder, whose scores are (with several
            classes, y is a class, drawn by its probability); or, for a model of transformers without a head, the name
            of a pooling: `mean`, `cls`, `max` or `lasttoken`. Embeddings that it gives have length 1.
        seed: seed of the draws. A draw also depends on the example's tokens, but not on the rest of the batch.

    Raises:
        ValueError: `model` is none of these. On use: batches have no `input_ids`; the compressed model returns other
            outputs than the one in `model`.
    """
    if isinstance(model, str):
        return DrawnLoss(embeddings(model), seed, classes=False)  # type: ignore[arg-type]  # which it checks
    return DrawnLoss(_answers_of(model), seed, classes=getattr(model, "num_labels", 1) > 1)


def _answers_of(model: Any) -> Predictions:
    """Return the function that returns the answers of a SentenceTransformer or CrossEncoder to a batch's texts."""
    if not is_sentence_transformer(model):
        raise ValueError(
            f"embedding_loss({type(model).__name__}): give a SentenceTransformer or a CrossEncoder; or, for a model of "
            f"transformers without a head, the pooling of its embeddings: {', '.join(get_args(Pooling))}"
        )
    transformer, *modules = model
    run = getattr(transformer, "modality_config", {}).get("text", {})
    taken = run.get("method_output_name")
    if run.get("method") != "forward" or not isinstance(taken, str):
        raise ValueError(
            f"the first module of the {type(model).__name__}, a {type(transformer).__name__}, does not run texts "
            "only through the forward of a transformers model: write a loss of your own, as embedding_loss is"
        )

    after = nn.Sequential(*modules)

    def answers(outputs: ModelOutput, batch: Batch) -> Tensor:
        with frozen(after):
            features = after({**batch, transformer.module_output_name: _entry(outputs, taken)})
        found: Tensor = features["scores" if "scores" in features else "sentence_embedding"]
        return found

    return answers


def is_sentence_transformer(model: Any) -> bool:
    """Whether `model` is a SentenceTransformer or a CrossEncoder, of a package that need not be installed."""
    kinds = {kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("sentence_transformers.")}
    return not kinds.isdisjoint({"SentenceTransformer", "CrossEncoder"})


def _entry(outputs: ModelOutput, name: str) -> Tensor:
    if name not in outputs:
        raise ValueError(
            f"the model returns {', '.join(outputs)}, but its answers are made from {name}: compress the transformers "
            "model that the embeddings come from"
        )
    found: Tensor = outputs[name]
    return found
