"""Stage extract: load the data set, split it, and draw the calibration sample; load other texts → data/splits."""

from __future__ import annotations

import json
import sys

import datasets

from tasks.artifacts.task_spec import CALIBRATION_TEXTS, SPLITS, TEXTS, Task
from tasks.config.params_file import section
from tasks.config.schema import Data, Name, Text
from tasks.data.calibration_texts import read_calibration_texts
from tasks.data.label_encoding import alike
from tasks.data.reading import load_source, load_text
from tasks.data.splitting import split_and_convert
from tasks.runtime.stage_runner import output, run, say, warn


def extract() -> None:
    """Write the splits train, validation, test and calibration as Parquet files, the task and other texts as JSON."""
    datasets.disable_progress_bars()
    params = section("data", Data)
    say(f"loading {params.source}")
    splits, labels = split_and_convert(load_source(params), params)
    for classes in alike(labels):
        warn(f"classes differ only in case, spaces or .0: {classes}. If they are one, spell them alike")
    texts = {name: load_text(name, text, params) for name, text in section("evaluate.texts", dict[Name, Text]).items()}
    calibration_texts = read_calibration_texts(params)
    with output(SPLITS) as folder:
        for name, frame in splits.items():
            frame.reset_index(drop=True).to_parquet(folder / f"{name}.parquet", index=False)
            say(f"{name}: {len(frame)} examples")
        (folder / TEXTS).write_text(json.dumps(texts))
        (folder / CALIBRATION_TEXTS).write_text(json.dumps(calibration_texts))
        names = (
            *("metric", "max_length", "target_length", "generation", "prefix"),
            *("stride", "seed", "separator", "calibration_blocks", "first", "pooling"),
        )
        settings = {name: getattr(params, name) for name in names}
        sizes = {**params.sizes.model_dump(), "train": params.sizes.train or sys.maxsize}
        task = Task(kind=params.task, labels=labels, sizes=sizes, **settings)
        (folder / "task.json").write_text(task.model_dump_json(indent=2))


if __name__ == "__main__":
    run("extract", extract)
