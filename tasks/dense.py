"""Stage dense: score the original model, the control and the trivial baseline → reports/dense.json, with the results
of each example in reports/predictions/dense.parquet."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.artifacts.results_schema import DENSE_METRICS, DenseReport
from tasks.artifacts.task_spec import load_split, load_task
from tasks.config.schema import Model, section
from tasks.models import licence, task_head
from tasks.models.model_io import CONTROL, TEACHER, load, size
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks._prediction import place
from tasks.runtime.stage_runner import run, say, warn
from tasks.scoring.bootstrap import interval, metric_of_all, resampled
from tasks.scoring.splits import all_scores, same_weights, write_predictions
from tasks.scoring.trivial_baseline import TRIVIAL, warning


def dense() -> None:
    """Score the original model, the control and the trivial baseline. The models are scored as candidates are."""
    task = load_task()
    model, tokenizer = _load(TEACHER)
    scores, predictions = control, control_predictions = all_scores(model, tokenizer, "dense")
    trivial_predictions = kind_of(task).trivial(load_split("train"), load_split("test"), tokenizer)
    trivial = metric_of_all(task, trivial_predictions)
    say(f"trivial baseline, {kind_of(task).trivial_answer}: {task.metric} {trivial:.4f}")
    drawn = resampled(task, {"dense": predictions["test"], TRIVIAL: trivial_predictions})
    difference = interval(drawn["dense"] - drawn[TRIVIAL])
    warn(warning(task, scores.score.metric, trivial, difference, len(trivial_predictions)))
    measured = size(model, TEACHER, task.max_length)
    if not same_weights(TEACHER, CONTROL):
        control, control_predictions = all_scores(*_load(CONTROL), "control")
    write_predictions(
        "dense", {"dense": predictions, "control": control_predictions, TRIVIAL: {"test": trivial_predictions}}
    )
    result = DenseReport(
        **dict(scores),
        size=measured,
        control=control,
        trivial=trivial,
        licence=licence.stated(TEACHER),
        head=task_head.read_note(TEACHER),
    )
    DENSE_METRICS.write_text(result.model_dump_json(indent=2))


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load(folder, kind_of(load_task()).auto, device_map=section("model", Model).device_map)
    place(model)
    return model, tokenizer


if __name__ == "__main__":
    run("dense", dense, threads="candidate")  # as for candidates, whose stages run at the same time
