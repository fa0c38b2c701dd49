"""Time forward passes in turn, and compare the times of two models."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import torch
from scipy.stats import quantile_test
from transformers import PreTrainedModel

from eckart.model.batches import Batch
from tasks.artifacts.results_schema import Times

Forward = Callable[[Batch], Any]
Key = TypeVar("Key", bound=Hashable)

_WARMUP = 2  # number of first rounds whose times are dropped


def in_rounds(forwards: Mapping[Key, Forward], inputs: Batch, rounds: int) -> dict[Key, list[float]]:
    """Time several forward passes in turn: in each round, every one of them runs once.

    Returns:
        Key of `forwards` → seconds that this forward pass took in each round, without the warm-up rounds.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in forwards}
    for _ in range(_WARMUP + rounds):
        for key, forward in forwards.items():
            start = time.perf_counter()
            forward(inputs)
            seconds[key].append(time.perf_counter() - start)
    return {key: own[_WARMUP:] for key, own in seconds.items()}


def ratio(others: Sequence[float], seconds: Sequence[float]) -> Times:
    """Return the median speedup of a model over another model, with its 95 % confidence interval.

    Args:
        others: seconds of the other model in each round; at least 6 rounds.
        seconds: seconds of the model in the same rounds.
    """
    ratios = [other / own for other, own in zip(others, seconds, strict=True)]
    interval = quantile_test(ratios, q=1, p=0.5).confidence_interval()
    return Times(median=median(ratios), low=interval.low, high=interval.high)


@torch.inference_mode()
def in_torch(model: PreTrainedModel, inputs: Batch) -> None:
    model(**inputs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
