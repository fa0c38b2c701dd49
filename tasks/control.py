"""Stage control: give the original model the fine-tuning of a recipe → models/control and its training curve.

A candidate may be better than the original model only because it was trained for longer. The control has had the same
further training as a candidate, so a comparison of the two shows the effect of the compression alone.
"""

from __future__ import annotations

from functools import partial

from transformers import set_seed

from eckart.recovery import Recovery
from eckart.recovery.finetune import Finetune
from eckart.recovery.recovery_problem import RecoveryProblem
from tasks.artifacts.results_schema import CONTROL_CURVE
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Seed, Trainer
from tasks.data.loading import encoded
from tasks.models.device import to_device
from tasks.models.model_io import CONTROL, TEACHER, load, save
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import explained, output, run
from tasks.training.recovery import load_teacher, recover


def control() -> None:
    """Fine-tune the original model as the recipe `study.control` fine-tunes its candidates.

    If that recipe has zero steps, or the model's own answers are the labels, the model stays unchanged.
    """
    recovery = section(f"recipes.{section('study.control', str)}.recovery", Recovery)
    seed, trainer, kind = section("seed", Seed), section("trainer", Trainer), kind_of(load_task())
    if kind.from_original:  # the loss is 0, and Adam would make steps of its rounding
        recovery = Finetune(steps=0)
    set_seed(seed)
    model, tokenizer = load(TEACHER, kind.auto)
    to_device(model)

    problem = RecoveryProblem(
        model=model,
        targets=(),
        keep=1.0,
        seed=seed,
        objective=kind.objective(),
        teacher=lambda: load_teacher(kind.auto),
        source=lambda: load(TEACHER, kind.auto)[0],
    )
    with explained(), output(CONTROL) as folder:
        data, collate = partial(encoded, "train", tokenizer), kind.collate(tokenizer, model)
        recover(problem, recovery, data, collate, CONTROL_CURVE, trainer)
        save(model, folder)


if __name__ == "__main__":
    run("control", control, trains=True, threads="candidate")  # as for the fine-tuning of candidates
