"""Dense: score and measure the teacher as it is → reports/dense.json, with which every candidate is compared."""

from __future__ import annotations

from tasks.dataset import load_split, load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, load, place, size
from tasks.params import Evaluate, Model, section
from tasks.records import DENSE_METRICS, DenseReport
from tasks.stage import run, say
from tasks.zero_shot import zero_shot


def dense() -> None:
    """Score the teacher on the test split, and measure it, in the way in which candidates are."""
    settings, task = section("evaluate", Evaluate), load_task()
    kind = kind_of(task)
    model, tokenizer = load(TEACHER, kind.auto, device_map=section("model", Model).device_map)
    place(model)
    result = DenseReport(
        score=kind.score(model, tokenizer, load_split("test"), task, settings.batch_size),
        size=size(model, TEACHER, task.max_length),
        zero_shot=zero_shot(model, tokenizer, settings.zero_shot, settings.batch_size),
    )
    DENSE_METRICS.parent.mkdir(parents=True, exist_ok=True)
    DENSE_METRICS.write_text(result.model_dump_json(indent=2))
    say(f"{task.metric} {result.score.metric:.4f} on {result.score.rows} test rows")


if __name__ == "__main__":
    run("dense", dense, threads="candidate")  # it runs beside the candidates, and is compared with them
