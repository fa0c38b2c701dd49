"""Dense: score and measure the teacher, its control and the trivial baseline → reports/dense.json, and what each row
contributed, reports/rows/dense.parquet."""

from __future__ import annotations

from tasks import heads, licence
from tasks.bootstrap import interval, metric_of_all, resampled
from tasks.dataset import load_split, load_task
from tasks.kinds import kind_of
from tasks.models import CONTROL, TEACHER, load, place, size
from tasks.params import Model, section
from tasks.records import DENSE_METRICS, DenseReport
from tasks.scoring import all_scores, same_weights, write_rows
from tasks.stage import run, say, warn
from tasks.trivial import ANSWERS, TRIVIAL, warning


def dense() -> None:
    """Score the teacher, and the teacher with a candidate's recovery, in the way in which candidates are."""
    task, device_map = load_task(), section("model", Model).device_map
    kind = kind_of(task)
    model, tokenizer = load(TEACHER, kind.auto, device_map=device_map)
    place(model)
    scores, rows = control, control_rows = all_scores(model, tokenizer, "dense")
    trivial_rows = kind.trivial(load_split("train"), load_split("test"), task, tokenizer)
    trivial = metric_of_all(task, trivial_rows)
    say(f"trivial baseline, {ANSWERS[task.kind]}: {task.metric} {trivial:.4f}")
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
        head=heads.noted(TEACHER),
    )
    DENSE_METRICS.write_text(result.model_dump_json(indent=2))


if __name__ == "__main__":
    run("dense", dense, threads="candidate")  # it runs beside the candidates, and is compared with them
