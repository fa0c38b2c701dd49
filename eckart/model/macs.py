"""What a forward costs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.integrations import moe as _moe  # noqa: F401 (registers an operation)

from eckart.calibration.losses import Batch
from eckart.model.module_context import frozen


@torch.no_grad()
def macs(model: PreTrainedModel, batch: Batch) -> int:
    """Multiply-accumulates of a forward of `batch`, attention included; of experts those of the tokens they get."""
    # The counter knows the plain attention products, not every fused kernel of every device.
    counter = FlopCounterMode(display=False, custom_mapping=_EXPERTS)
    with frozen(model), sdpa_kernel(SDPBackend.MATH), counter:  # which follows what has gradients
        model(**batch)
    return int(counter.get_total_flops()) // 2


def _grouped_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Of the shapes `(tokens, in)` and `(experts, in, out)`: each token is multiplied with one expert's matrix."""
    return 2 * int(torch.Size(rows).numel()) * int(weights[-1])


_EXPERTS = {
    operation: _grouped_flops
    for library, name in ((torch.ops.aten, "_grouped_mm"), (torch.ops.transformers, "grouped_mm_fallback"))
    if (operation := getattr(library, name, None))
}
"""What transformers runs experts with, which torch's counter does not know."""
