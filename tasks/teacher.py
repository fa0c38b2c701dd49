"""Stage teacher: train the base or a new model on the task → models/teacher, the original model; its training curve.

The model before this training is saved in models/untaught, since recipes with `source: base` compress it instead.
"""

from __future__ import annotations

import math

from transformers import set_seed

from eckart.training.optimizer_settings import Optimization
from eckart.training.schedules import steps_in
from tasks.artifacts.errors import StageError
from tasks.artifacts.results_schema import TEACHER_CURVE
from tasks.artifacts.task_spec import Task, load_split, load_task
from tasks.config.params_file import section
from tasks.config.schema import Model, Seed, Trainer, Training
from tasks.data.loading import encoded
from tasks.models import model_license, new_model, sentence_files, task_head
from tasks.models.base_model import Base, load_base
from tasks.models.causality import check_causal
from tasks.models.model_io import TEACHER, UNTAUGHT, check_length, load_tokenizer
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import output, run, say, warn
from tasks.training.loop import train


def teacher() -> None:
    """Fine-tune the base model on the task, or train a new one. Zero epochs leave a base model unchanged."""
    settings, model, task, seed = (
        section("teacher", Training),
        section("model", Model),
        load_task(),
        section("seed", Seed),
    )
    kind = kind_of(task)
    set_seed(seed)
    base = new_model.make(model.new, model.dtype, task, load_split("train")) if model.new else load_base(model, task)
    if kind.running_text:
        check_causal(base.model)
    _check(base, settings, task)
    with output(UNTAUGHT) as folder:
        base.model.save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)
    data = encoded("train", base.tokenizer) if settings.epochs else []
    steps = steps_in(settings.epochs, math.ceil(len(data) / settings.batch_size))
    with output(TEACHER) as folder:
        train(
            base.model,
            kind.collate(base.tokenizer, base.model),
            data,
            TEACHER_CURVE,
            Optimization(steps=steps, **settings.model_dump(exclude={"epochs"})),
            section("trainer", Trainer),
            seed=seed,
            loss=kind.training_loss,
        )
        base.model.save_pretrained(folder)
        load_tokenizer(UNTAUGHT).save_pretrained(folder)  # the other one now cuts texts
        model_license.write(folder, base.license)
        task_head.write_note(folder, base.head)
        sentence_files.write(folder, base.files)


def _check(base: Base, settings: Training, task: Task) -> None:
    """Raise StageError if the head would stay untrained or positions are too few; print what became of the head."""
    if base.fit == "random" and not settings.epochs:
        raise StageError("with teacher.epochs: 0 the new model would keep its random weights: raise teacher.epochs")
    if base.fit == "other" and not settings.epochs:
        raise StageError(
            f"{base.head} With teacher.epochs: 0 it would stay untrained: raise teacher.epochs, or give the old head's "
            "outputs the names of the labels, in id2label and label2id of its config.json"
        )
    if not base.has_head and not settings.epochs:  # allowed: recipes may teach the head, as in studies/drone-glue.yaml
        warn(
            "model.base has no head for the task. With teacher.epochs: 0 the original model keeps one with random "
            "weights, and scores as one that guesses: raise teacher.epochs"
        )
    if base.head:
        say(base.head)
    check_length(base.model, task.max_length, "data.max_length")
    check_length(base.model, task.target_length or 0, "data.target_length")


if __name__ == "__main__":
    run("teacher", teacher, trains=True)
