"""Teacher: fine-tune the base model on the task → models/teacher and its training curve.

Beside it stands models/untaught: the same model before that training, which some recipes begin with.
"""

from __future__ import annotations

import math

from transformers import set_seed

from tasks.artifacts.results_schema import TEACHER_CURVE
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Model, Seed, Trainer, Training, section
from tasks.data.loading import encoded
from tasks.models import licence, task_head
from tasks.models.base_model import load_base
from tasks.models.model_io import TEACHER, UNTAUGHT, check_length
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import StageError, output, run, say
from tasks.training.loop import train


def teacher() -> None:
    """Fine-tune the base model (zero epochs take it as it is)."""
    settings, task = section("teacher", Training), load_task()
    kind = kind_of(task)
    seed = section("seed", Seed)
    set_seed(seed)
    model, tokenizer, terms, fit, said = load_base(section("model", Model), task)
    if fit == "other" and not settings.epochs:
        raise StageError(
            f"{said} With teacher.epochs: 0 nothing would teach it: raise them, or give the outputs the names of the "
            "labels, in id2label and label2id of its config.json"
        )
    if said:
        say(said)
    check_length(model, task.max_length, "data.max_length")
    check_length(model, task.target_length or 0, "data.target_length")
    data = encoded("train", tokenizer)
    options = settings.model_dump(exclude={"epochs"}) | section("trainer", Trainer).options()
    steps = math.ceil(settings.epochs * math.ceil(len(data) / settings.batch_size))
    with output(UNTAUGHT) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    with output(TEACHER) as folder:
        train(
            model,
            kind.collate(tokenizer, model),
            data,
            TEACHER_CURVE,
            steps=steps,
            seed=seed,
            loss=kind.training_loss,
            **options,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        licence.write(folder, terms)
        task_head.note(folder, said)


if __name__ == "__main__":
    run("teacher", teacher, trains=True)
