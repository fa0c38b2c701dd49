"""Other texts for the calibration of a language model, `data.calibration_texts`."""

from __future__ import annotations

from typing import Any

from tasks.artifacts.errors import StageError
from tasks.config.schema import Data, Text
from tasks.data.reading import load_source, source_of
from tasks.data.splitting import split_source


def read_calibration_texts(params: Data) -> list[dict[str, Any]]:
    """Read the texts: the rows of each, what stands between them, and how many blocks are to be drawn.

    Raises:
        StageError: a text cannot be read.
    """
    texts = []
    for name, text in params.calibration_texts.items():
        try:
            rows = _training_rows(text, params)
        except StageError as error:
            raise StageError(f"data.calibration_texts.{name}: {error}") from error
        texts.append({"rows": rows, "separator": text.separator, "examples": text.examples})
    return texts


def _training_rows(text: Text, params: Data) -> list[str]:
    """Return the rows of a text without those that a study of this text would validate and test with.

    They are chosen as those of data.source are. So no candidate is calibrated with a passage that it is scored on, even
    if the text is the study's own.
    """
    study = source_of(text, params)
    return list(split_source(load_source(study), study)["train"]["text"])
