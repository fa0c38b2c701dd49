"""Gathering of calibration statistics with warnings about misleading calibration data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from transformers import PreTrainedModel

from eckart.calibration.losses import Loss
from eckart.calibration.passes import Pass
from eckart.calibration.robust_gradients import UNCHANGED, RobustGradients
from eckart.calibration.statistics import NO_GRADIENT, OF_GRADIENTS, StatisticKind, Statistics, collect
from eckart.calibration.warnings import (
    few_tokens_warning,
    hidden_sounds_warning,
    no_gradient_warning,
    padding_warning,
    underflow_warning,
)
from eckart.model.batches import Batch, first_examples


def calibrate(
    model: PreTrainedModel,
    batches: Callable[[], Iterable[Batch]],
    groups: Sequence[Pass],
    kinds: Collection[StatisticKind],
    loss: Loss,
    *,
    examples: int,
    checked: Sequence[Batch],
    warn: Callable[[str | None], None],
    offload_activations: bool = False,
    robust: RobustGradients = UNCHANGED,
) -> Iterator[Statistics]:
    """Yield the statistics of each group of targets, and warn about misleading calibration data.

    Each group has a pass of its own over the calibration data.

    Args:
        batches: function that returns the calibration data; it is called for each pass.
        groups: groups of targets, as `passes` returns them.
        examples: number of all calibration examples, also if `batches` gives only a part of them.
        checked: batches that are searched for padding that changes outputs; the first two examples are tested for
            underflow of gradients.
        warn: function that is called with each warning, and with None where there is nothing to warn about.

    Raises:
        ValueError: statistics of gradients are asked for, and no target has a gradient; or an error of `collect`.
    """
    warn(padding_warning(model, checked))
    warn(hidden_sounds_warning(checked))
    reads_gradients = bool({*kinds} & {*OF_GRADIENTS})
    without_gradient = reads_gradients  # if it stays true, every error would weigh nothing
    underflow = None
    for number, group in enumerate(groups, 1):
        if reads_gradients and underflow is None:  # one group at a time, as all moments may not fit in memory
            underflow = underflow_warning(model, first_examples(checked[0], 2), group.targets, kinds, loss)
            warn(underflow)
        statistics = collect(model, batches(), group.targets, kinds, loss, group.then, offload_activations, robust)
        gradients = (value for kind in OF_GRADIENTS for value in statistics.get(kind, {}).values())
        without_gradient = without_gradient and not any(bool(value.any()) for value in gradients)
        if without_gradient and number == len(groups):
            raise ValueError(NO_GRADIENT)
        warn(few_tokens_warning(group.targets, statistics, examples))
        warn(no_gradient_warning(model, first_examples(checked[0], 2), group.targets, statistics))
        yield statistics
        del statistics  # frees them before the next pass
