"""Stage extract: load the data set, split it, and draw the calibration sample → data/splits."""

from __future__ import annotations

import datasets

from tasks.artifacts.task_spec import CALIBRATION_TEXTS, SPLITS, Task
from tasks.config.schema import Data, section
from tasks.data.calibration_texts import read_calibration_texts
from tasks.data.reading import load_source
from tasks.data.splitting import split_and_convert
from tasks.runtime.stage_runner import output, run, say


def extract() -> None:
    """Write the splits train, validation, test and calibration as Parquet files, and the task as task.json."""
    datasets.disable_progress_bars()
    params = section("data", Data)
    say(f"loading {params.source}")
    splits, labels = split_and_convert(load_source(params), params)
    other_texts = read_calibration_texts(params)
    with output(SPLITS) as folder:
        other_texts.to_parquet(folder / CALIBRATION_TEXTS, index=False)
        for name, frame in splits.items():
            frame.reset_index(drop=True).to_parquet(folder / f"{name}.parquet", index=False)
            say(f"{name}: {len(frame)} examples")
        names = ("metric", "max_length", "target_length", "prefix", "stride", "seed")
        settings = {name: getattr(params, name) for name in names}
        task = Task(kind=params.task, labels=labels, sizes=params.sizes.model_dump(), **settings)
        (folder / "task.json").write_text(task.model_dump_json(indent=2))


if __name__ == "__main__":
    run("extract", extract)
