"""What calibration data cannot tell of a model, or tell wrongly: found before it decides anything, and said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Loss, row_of
from eckart.calibration.statistics import Statistics, collect
from eckart.model.module_context import eval_mode
from eckart.model.probing import ATTENTION, columns
from eckart.model.targets import Target

_NEGLIGIBLE = 0.05  # share of parameters
_SCALE = 256.0  # of a loss, by which gradients in float16 keep digits
_UNDERFLOW = 0.01  # of what a statistic may change by that
_TOLERATED = {True: 0.01, False: 0.1}  # of what a row is answered without its padding; in float32 or more, or less


def few_tokens(targets: Iterable[Target], statistics: Statistics, samples: int) -> str | None:
    """What to do where targets read fewer tokens than they have inputs, so that some directions were never seen.

    (choice) Only where these are more than a twentieth of all parameters: a pooler has one token of each sample.

    Args:
        samples: of which the statistics are.
    """
    known = statistics.get("tokens", {})
    maps = [each for target in targets for each in target.maps if each.input_of in known and not each.looks_up]
    seen = {each.name: round(float(known[each.input_of]) * samples) for each in maps}
    few = [each for each in maps if seen[each.name] < each.in_features]
    if sum(each.parameters for each in few) <= _NEGLIGIBLE * sum(each.parameters for each in maps):
        return None
    worst = min(few, key=lambda each: seen[each.name] / each.in_features)
    return (
        f"{len(few)} of {len(maps)} linear maps read fewer tokens than they have inputs, such as {worst.name} "
        f"{seen[worst.name]:,} for {worst.in_features:,}: give more calibration rows"
    )


def padding_warning(model: PreTrainedModel, batches: Iterable[Batch]) -> str | None:
    """What to do where a padded row of `batches` is answered otherwise than the same row alone; None where it is not.

    So it is where positions are counted from the first column, as GPT-2 does, and rows are padded on the left.
    """
    row = next((found for batch in batches if (found := _padded_row(batch)) is not None), None)
    if row is None:
        return None
    mask = row[ATTENTION]
    places = mask[0].nonzero().flatten()
    try:
        with torch.no_grad(), eval_mode(model):
            padded, alone = (model(**columns(row, ATTENTION, some)) for some in (torch.arange(mask.shape[1]), places))
        change = _change(_at(_answers(padded), places, _answers(alone)), _answers(alone))
    except Exception:  # the model takes no such length, or gives nothing to compare
        return None
    if change <= _TOLERATED[model.dtype in (torch.float32, torch.float64)]:
        return None
    left = mask[0, 0] == 0 and "position_ids" not in row
    advice = "pad on the right, or give position_ids" if left else "give batches of rows of one length"
    return f"padding changes what {type(model).__name__} answers, by {change:.0%} for one row: {advice}"


def underflow_warning(model: PreTrainedModel, batch: Batch, targets: Sequence[Target], loss: Loss) -> str | None:
    """What to do where gradients in float16 are too small for it: where statistics of a larger loss are not as much
    larger. None where they are, and for models in other types.

    Args:
        targets: of which statistics of gradients are to be gathered.
    """
    if model.dtype != torch.float16:
        return None

    def gathered(factor: float) -> Mapping[str, Tensor]:
        times = collect(model, [batch], targets, ["output_gradients"], lambda *given: factor * loss(*given))
        return times["output_gradients"]

    small = gathered(1.0)
    try:
        large = gathered(_SCALE)
    except ValueError:  # it overflows: then nothing underflows
        return None
    changes = {name: _change(values, large[name] / _SCALE**2) for name, values in small.items() if large[name].any()}
    name = max(changes, key=lambda name: changes[name], default=None)
    if name is None or changes[name] <= _UNDERFLOW:
        return None
    return (
        f"gradients underflow in float16, so that statistics of them are off, those of {name} by {changes[name]:.0%}: "
        "load the model in bfloat16 or float32"
    )


def _padded_row(batch: Batch) -> Batch | None:
    mask = batch.get(ATTENTION)
    if mask is None or mask.dim() != 2:
        return None
    counts = mask.ne(0).sum(1)
    padded = ((counts > 0) & (counts < mask.shape[1])).nonzero().flatten()
    return row_of(batch, int(padded[0])) if len(padded) else None


def _answers(outputs: Any) -> Tensor:
    """The first that is as large as a batch."""
    every = [value for value in outputs.values() if isinstance(value, Tensor) and value.dim() > 1]
    return every[0].float()


def _at(answers: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Those to the tokens at `places`, where there is one for each token."""
    return answers if answers.shape == like.shape else answers.index_select(1, places)


def _change(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())
