"""Other texts for the calibration of a language model, `data.calibration_texts`."""

from __future__ import annotations

import pandas as pd

from tasks.artifacts.errors import StageError
from tasks.config.schema import CalibrationText, Columns, Data, Splits
from tasks.data.reading import load_source
from tasks.data.splitting import split_source


def read_calibration_texts(params: Data) -> pd.DataFrame:
    """Read the texts.

    Returns:
        their rows: `text`, the position of the text in `data.calibration_texts` as `place`, and as `examples` the
        number of blocks that are to be drawn from this text.

    Raises:
        StageError: a text cannot be read.
    """
    parts = [
        pd.DataFrame({"text": pd.Series(dtype=str), "place": pd.Series(dtype=int), "examples": pd.Series(dtype=int)})
    ]
    for place, text in enumerate(params.calibration_texts):
        try:
            rows = _training_part(text, params)
        except StageError as error:
            raise StageError(f"data.calibration_texts.{place}: {error}") from error
        parts.append(rows.assign(place=place, examples=text.examples))
    return pd.concat(parts[1:] or parts, ignore_index=True)


def _training_part(text: CalibrationText, params: Data) -> pd.DataFrame:
    """Return the rows of a text without those that a study of this text would validate and test with.

    They are chosen as those of data.source are. So no candidate is calibrated with a passage that it is scored on, even
    if the text is the study's own.
    """
    splits = Splits(train=text.split, validation=None, test=None)
    columns = Columns(text=text.column, text_pair=None, label=None)
    place = {"source": text.source, "config": text.config, "revision": text.revision}
    study = params.model_copy(update={**place, "splits": splits, "columns": columns})
    return split_source(load_source(study), study)["train"]
