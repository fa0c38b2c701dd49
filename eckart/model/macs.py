"""Counting the multiply-accumulates of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.integrations import moe as _moe  # noqa: F401 (registers an operation)

from eckart.model.batches import Batch
from eckart.model.module_context import frozen


@torch.no_grad()
def macs(model: PreTrainedModel, batch: Batch) -> int:
    """Count the multiply-accumulates of a forward pass of `batch`; an expert counts only for the tokens it gets."""
    # The math backend is chosen because torch's counter does not know every fused attention kernel.
    counter = FlopCounterMode(display=False, custom_mapping=_EXPERTS)
    with frozen(model), sdpa_kernel(SDPBackend.MATH), counter:  # frozen: the counter would follow gradients
        model(**batch)
    return int(counter.get_total_flops()) // 2


def _grouped_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the number of operations if each token is multiplied by the matrix of one expert.

    Args:
        rows, weights: the shapes of the tokens `(tokens, in)` and of the matrices `(experts, in, out)`.
    """
    return 2 * int(torch.Size(rows).numel()) * int(weights[-1])


_EXPERTS = {
    operation: _grouped_flops
    for library, name in ((torch.ops.aten, "_grouped_mm"), (torch.ops.transformers, "grouped_mm_fallback"))
    if (operation := getattr(library, name, None))
}
"""Torch operations that run experts in transformers → function that counts them; torch's counter does not know them."""
