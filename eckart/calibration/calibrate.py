"""Gathering of calibration statistics with warnings about misleading calibration data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Loss, first_examples
from eckart.calibration.robust_gradients import UNCHANGED, RobustGradients
from eckart.calibration.statistics import OF_GRADIENTS, Pass, StatisticKind, Statistics, gather
from eckart.calibration.warnings import few_tokens_warning, padding_warning, underflow_warning


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
    """Yield the statistics of each group of targets, like `gather`, and warn about misleading calibration data.

    Args:
        examples: number of all calibration examples, also if `batches` gives only a part of them.
        checked: batches that are searched for padding that changes outputs; the first two examples are tested for
            underflow of gradients.
        warn: function that is called with each warning, and with None where there is nothing to warn about.

    Raises:
        ValueError: an error of `gather`.
    """
    warn(padding_warning(model, checked))
    if {*kinds} & {*OF_GRADIENTS}:
        targets = [target for group in groups for target in group.targets]
        warn(underflow_warning(model, first_examples(checked[0], 2), targets, loss))
    remaining = iter(groups)  # not by zip, which would keep the statistics in memory during the next pass
    for statistics in gather(model, batches, groups, kinds, loss, offload_activations, robust):
        warn(few_tokens_warning(next(remaining).targets, statistics, examples))
        yield statistics
        del statistics
