"""Counting the multiply-accumulates of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel
from transformers.integrations import moe as _moe  # noqa: F401 (registers an operation)

from eckart.model.batches import Batch
from eckart.model.module_context import frozen


@torch.no_grad()
def macs(model: PreTrainedModel, batch: Batch) -> int:
    """Count the multiply-accumulates of a forward pass of `batch`; an expert counts only for the tokens it gets."""
    counter = FlopCounterMode(display=False, custom_mapping=_OTHERS)
    # The counter does not know every fused kernel of attention. Without any, 2,048 tokens take three times as long.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with frozen(model), sdpa_kernel(kernels), counter:  # frozen: the counter would follow gradients
        model(**batch)
    return int(counter.get_total_flops()) // 2


def _grouped_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the number of operations if each token is multiplied by the matrix of one expert.

    Args:
        rows, weights: the shapes of the tokens `(tokens, in)` and of the matrices `(experts, in, out)`.
    """
    return 2 * int(torch.Size(rows).numel()) * int(weights[-1])


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the number of operations of an attention, of which the part that a causal one leaves out counts, too."""
    return int(sdpa_flop_count(query, key, value))


_OTHERS = {
    operation: count
    for library, name, count in (
        (torch.ops.aten, "_grouped_mm", _grouped_flops),
        (torch.ops.transformers, "grouped_mm_fallback", _grouped_flops),
        (torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", _attention_flops),
    )
    if (operation := getattr(library, name, None))
}
"""Torch operations that torch's counter does not know, of experts and attention → function that counts them."""
