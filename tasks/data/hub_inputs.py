"""The inputs of a study that may be on the Hugging Face hub: the base model, the data, and further texts."""

from __future__ import annotations

from tasks.config import schema
from tasks.data.hub_ids import hub_id
from tasks.data.packaged_datasets import PACKAGED


def hub_inputs(
    model: schema.Model | None, data: schema.Data | None, evaluate: schema.Evaluate | None
) -> dict[str, tuple[schema.Model | schema.Data | schema.Text, str | None]]:
    """Return place in params.yaml → the part there, which has a revision, and its id on the hub; None: not there.

    Args:
        model, data, evaluate: sections of params.yaml; None leaves one out.
    """
    inputs: dict[str, tuple[schema.Model | schema.Data | schema.Text, str | None]] = {}
    if model:
        inputs["model"] = model, hub_id(model.base)
    if data:
        inputs["data"] = data, hub_id(data.source, PACKAGED)
    texts = {"evaluate.texts": evaluate.texts if evaluate else {}}
    texts["data.calibration_texts"] = data.calibration_texts if data else {}
    for place, named in texts.items():
        inputs |= {f"{place}.{name}": (text, hub_id(text.source, PACKAGED)) for name, text in named.items()}
    return inputs
