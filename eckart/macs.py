"""What a forward costs."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from eckart.losses import Batch
from eckart.modes import eval_mode


@torch.no_grad()
def macs(model: PreTrainedModel, batch: Batch) -> int:
    """Multiply-accumulates of a forward of `batch`, attention included."""
    # The counter knows the plain attention products, not every fused kernel of every device.
    with eval_mode(model), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch)
    return int(counter.get_total_flops()) // 2
