"""Settings with which a model writes the texts that are scored and served."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Generation(BaseModel):
    """Settings of a beam search."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    beams: int = Field(ge=2, description="number of beams: 8 in LoSparse; a batch takes as many times the memory")
    length_penalty: float | None = Field(
        None,
        description="power of the length by which the log-probability of a text is divided; higher: longer texts; "
        "null: that of the model's generation_config.json",
    )
