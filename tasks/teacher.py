"""Teacher: fine-tune the base model on the task → models/teacher, its metrics and training curve."""

from __future__ import annotations

import math

from transformers import set_seed

from tasks.base_model import load_base
from tasks.batches import encoded
from tasks.dataset import load_split, load_task
from tasks.kinds import kind_of
from tasks.kinds.kind import loss_of_training
from tasks.models import TEACHER, check_length, size
from tasks.params import Evaluate, Model, Seed, Trainer, Training, section
from tasks.records import TEACHER_CURVE, TEACHER_METRICS, TeacherReport
from tasks.stage import leads, output, run, say
from tasks.training import train
from tasks.zero_shot import zero_shot


def teacher() -> None:
    """Fine-tune the base model (zero epochs take it as it is) and score it on the test split."""
    settings, task = section("teacher", Training), load_task()
    kind = kind_of(task)
    seed = section("seed", Seed)
    set_seed(seed)
    model, tokenizer = load_base(section("model", Model), task)
    check_length(model, task.max_length, "data.max_length")
    check_length(model, task.target_length or 0, "data.target_length")
    data = encoded("train", tokenizer)
    options = settings.model_dump(exclude={"epochs"}) | section("trainer", Trainer).options()
    steps = math.ceil(settings.epochs * math.ceil(len(data) / settings.batch_size))
    evaluation = section("evaluate", Evaluate)
    with output(TEACHER) as folder:
        train(
            model,
            kind.collate(tokenizer, model),
            data,
            TEACHER_CURVE,
            steps=steps,
            seed=seed,
            loss=loss_of_training(kind),
            **options,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        result = TeacherReport(
            score=kind.score(model, tokenizer, load_split("test"), task, evaluation.batch_size),
            size=size(model, folder, task.max_length),
            zero_shot=zero_shot(model, tokenizer, evaluation.zero_shot, evaluation.batch_size),
        )
    if leads():
        TEACHER_METRICS.write_text(result.model_dump_json(indent=2))
    say(f"{task.metric} {result.score.metric:.4f} on {result.score.rows} test rows")


if __name__ == "__main__":
    run("teacher", teacher, trains=True)
