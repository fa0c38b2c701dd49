"""The device of a model and of its inputs."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def to_device(model: PreTrainedModel) -> str:
    """Move the model to the GPU if there is one and it has no device map; return the device for its inputs."""
    if torch.cuda.is_available() and getattr(model, "hf_device_map", None) is None:
        model.to("cuda")  # type: ignore[arg-type]
    return inputs_device(model)


def inputs_device(model: PreTrainedModel) -> str:
    """Return the device for the model's inputs. If accelerate offloads weights, it moves inputs, so this is the CPU."""
    return "cpu" if model.device.type == "meta" else str(model.device)
