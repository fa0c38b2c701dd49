"""Dense: score and measure the teacher, its control and the trivial baseline → reports/dense.json, and what each row
contributed, reports/rows/dense.parquet."""

from __future__ import annotations

from tasks.artifacts.results_schema import DENSE_METRICS, DenseReport
from tasks.artifacts.task_spec import load_split, load_task
from tasks.config.schema import Model, section
from tasks.models import licence, task_head
from tasks.models.model_io import CONTROL, TEACHER, load, place, size
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import run, say, warn
from tasks.scoring.bootstrap import interval, metric_of_all, resampled
from tasks.scoring.splits import all_scores, same_weights, write_rows
from tasks.scoring.trivial_baseline import TRIVIAL, warning


def dense() -> None:
    """Score the teacher, and the teacher with a candidate's recovery, in the way in which candidates are."""
    task, device_map = load_task(), section("model", Model).device_map
    kind = kind_of(task)
    model, tokenizer = load(TEACHER, kind.auto, device_map=device_map)
    place(model)
    scores, rows = control, control_rows = all_scores(model, tokenizer, "dense")
    trivial_rows = kind.trivial(load_split("train"), load_split("test"), tokenizer)
    trivial = metric_of_all(task, trivial_rows)
    say(f"trivial baseline, {kind.trivial_answer}: {task.metric} {trivial:.4f}")
    drawn = resampled(task, {"dense": rows["test"], TRIVIAL: trivial_rows})
    warn(warning(task, scores.score.metric, trivial, interval(drawn["dense"] - drawn[TRIVIAL]), len(trivial_rows)))
    measured = size(model, TEACHER, task.max_length)
    if not same_weights(TEACHER, CONTROL):
        model, tokenizer = load(CONTROL, kind.auto, device_map=device_map)
        place(model)
        control, control_rows = all_scores(model, tokenizer, "control")
    write_rows("dense", {"dense": rows, "control": control_rows, TRIVIAL: {"test": trivial_rows}})
    result = DenseReport(
        **dict(scores),
        size=measured,
        control=control,
        trivial=trivial,
        licence=licence.stated(TEACHER),
        head=task_head.noted(TEACHER),
    )
    DENSE_METRICS.write_text(result.model_dump_json(indent=2))


if __name__ == "__main__":
    run("dense", dense, threads="candidate")  # it runs beside the candidates, and is compared with them
