"""Stage dense: score the original model, the control and the trivial baseline → reports/dense.json, with the results
of each example in reports/predictions/dense.parquet."""

from __future__ import annotations

from tasks.artifacts.results_schema import DENSE_METRICS, DenseReport
from tasks.artifacts.task_spec import load_split
from tasks.models import model_license, task_head
from tasks.models.model_io import CONTROL, TEACHER, size
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import run, say, warn
from tasks.scoring.splits import load_scorer, same_weights, write_predictions
from tasks.scoring.trivial_baseline import TRIVIAL, compare


def dense() -> None:
    """Score the original model, the control and the trivial baseline. The models are scored as candidates are."""
    scorer, train = load_scorer("test", "validation"), load_split("train")
    task, kind = scorer.task, kind_of(scorer.task)
    model, tokenizer = scorer.load(TEACHER)
    scores, predictions = control, control_predictions = scorer.all_scores(model, tokenizer, "dense")
    trivial_predictions = kind.trivial(train, scorer.splits["test"], tokenizer)
    trivial, warning = compare(task, scores.score.metric, predictions["test"], trivial_predictions)
    say(f"trivial baseline, {kind.trivial_answer}: {task.metric} {trivial:.6g}")
    warn(warning)
    measured = size(model, TEACHER, task.max_length)
    if not same_weights(TEACHER, CONTROL):
        control, control_predictions = scorer.all_scores(*scorer.load(CONTROL), "control")
    write_predictions(
        "dense", {"dense": predictions, "control": control_predictions, TRIVIAL: {"test": trivial_predictions}}
    )
    result = DenseReport(
        **dict(scores),
        size=measured,
        control=control,
        trivial=trivial,
        license=model_license.stated(TEACHER),
        head=task_head.read_note(TEACHER),
    )
    DENSE_METRICS.write_text(result.model_dump_json(indent=2))


if __name__ == "__main__":
    run("dense", dense, threads="candidate")  # as for candidates, whose stages run at the same time
