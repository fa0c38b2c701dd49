"""The teacher's logits on the training examples, computed once for all candidates that distill them.

They are stored beside the checkpoints, and not by a stage of their own: each recipe decides which examples its training
draws, how many classes it compares and at which temperature, and the files are larger than the models. They can safely
be deleted: the next training computes the same again. `eckart gc` removes those that no recipe asks for. A computation
that was killed goes on where it stopped. Files for another teacher, other data or other code are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from eckart.model.batches import Batch
from eckart.model.module_context import frozen
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.recovery.teacher_logits import TeacherLogits, keys, teach
from eckart.training.optimizer_settings import Optimization
from tasks.artifacts import atomic_files
from tasks.artifacts.paths import LOGITS
from tasks.config.schema import Trainer
from tasks.nlp_tasks._prediction import Collate, by_length
from tasks.runtime.code_folders import all_code
from tasks.runtime.stage_runner import say
from tasks.training.checkpoints import digest
from tasks.training.loop import drawn

_ARRAYS = ("classes", "logs", "rest")
_DONE = "examples"  # file with the number of examples whose logits are saved
_LINES = 10  # of progress


def saved_logits(
    problem: RecoveryProblem,
    data: Dataset,
    collate: Collate,
    training: Optimization,
    trainer: Trainer,
    top: int,
    temperature: float,
) -> TeacherLogits:
    """Return the teacher's `top` most probable classes on all examples that a training draws, after computing them.

    Another process that needs some waits until they are there.

    Raises:
        ValueError: examples differ in their number of predictions.
    """
    teacher = problem.teacher()
    rows = drawn(data, training.steps, training.batch_size, problem.seed)
    examples = data.select(rows)
    examples = examples.select(by_length(examples))
    size = trainer.micro_batch or training.batch_size
    settings = {"top": top, "temperature": temperature, "size": size, "precision": trainer.precision, "rows": rows}
    study = LOGITS / digest(teacher, data, (), {})[:32]
    folder = study / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]

    def batches(first: int) -> Iterator[Batch]:
        for start in range(first, len(examples), size):
            batch = collate([examples[row] for row in range(start, min(start + size, len(examples)))])
            yield {name: values.to(teacher.device) for name, values in batch.items()}

    with _locked(), frozen(teacher):
        for other in (path for path in LOGITS.iterdir() if path.is_dir() and path != study):
            shutil.rmtree(other)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / settings_name(training, trainer, top, temperature, problem.seed)).touch()
        if done := _done(folder):
            say(f"the teacher's logits of {done} of {len(examples)} examples are saved")
        for batch in batches(done):
            with torch.autocast(teacher.device.type, torch.bfloat16, enabled=trainer.precision == "bf16"):
                parts = teach(teacher, batch, problem.objective.predictions, top, temperature)
            done = _append(folder, parts, done, len(examples))
            if (done * _LINES // len(examples)) > ((done - len(parts[0])) * _LINES // len(examples)):
                say(f"the teacher's logits  {done}/{len(examples)} examples")
    found = [key for batch in batches(0) for key in keys(batch)]
    # copied on write, which never happens: torch warns of arrays that are read-only
    classes, logs, rest = (np.load(_file(folder, name), mmap_mode="c") for name in _ARRAYS)
    return TeacherLogits({key: row for row, key in enumerate(found)}, classes, logs, rest)


def settings_name(training: Optimization, trainer: Trainer, top: int, temperature: float, seed: int) -> str:
    """Return the name of an empty file beside the logits that a training reads, by which `eckart gc` knows them.

    It stands for all that decides which logits these are, but for the teacher and the data.
    """
    size = trainer.micro_batch or training.batch_size
    settings = [top, temperature, training.steps, training.batch_size, size, trainer.precision, seed, all_code()]
    return f"for-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]}"


def _append(folder: Path, parts: Sequence[np.ndarray], done: int, total: int) -> int:
    """Write the arrays of a batch behind those of `done` examples, and return how many are done then."""
    for name, part in zip(_ARRAYS, parts, strict=True):
        file, shape = _file(folder, name), (total, *part.shape[1:])
        options: dict[str, Any] = {"mode": "r+"} if done else {"mode": "w+", "dtype": part.dtype, "shape": shape}
        array = np.lib.format.open_memmap(file, **options)
        if array.shape != shape:
            raise ValueError("examples differ in their number of predictions: set distillation.top to null")
        array[done : done + len(part)] = part
        array.flush()
    atomic_files.write(folder / _DONE, str(done + len(parts[0])))
    return done + len(parts[0])


def _done(folder: Path) -> int:
    return int((folder / _DONE).read_text()) if (folder / _DONE).exists() else 0


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


@contextmanager
def _locked() -> Iterator[None]:
    LOGITS.mkdir(parents=True, exist_ok=True)
    with (LOGITS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
