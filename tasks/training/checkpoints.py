"""Checkpoints, from which a killed training resumes.

They are stored outside the outputs of stages, since DVC deletes outputs before it runs a stage. A checkpoint belongs to
one combination of model, data, settings and code; other trainings ignore it. Checkpoints can safely be deleted: a
killed training then starts from the beginning and gives the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import transformers
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from eckart.training.rules import Rule
from tasks.runtime.code_folders import all_code
from tasks.runtime.stage_runner import leads, say

CHECKPOINTS = Path(".eckart/checkpoints")
SECONDS = "ECKART_CHECKPOINT_SECONDS"
"""Environment variable with the least number of seconds between two checkpoints. It does not change results."""

_DEFAULT_SECONDS = 60.0
_DIGEST = "digest"  # this file is written last: a checkpoint without it is incomplete
_RULE = "rule-{}.safetensors"


class Checkpoints(TrainerCallback):
    """Callback that saves a checkpoint at a logged step if enough time has passed, and finds the last one to resume."""

    def __init__(
        self, name: Path, model: PreTrainedModel, data: Dataset, rules: Sequence[Rule], settings: Mapping[str, Any]
    ) -> None:
        self.folder = CHECKPOINTS / name
        self.rules = rules
        self.digest = digest(model, data, rules, settings)
        self.seconds = float(os.environ.get(SECONDS, _DEFAULT_SECONDS))
        self.saved = time.monotonic()

    def resume(self) -> str | None:
        """Return the folder of this training's last complete checkpoint, and restore the state of the rules from it.

        If there is none, remove other trainings' checkpoints from the folder and return None.
        """
        complete = [file.parent for file in self.folder.glob(f"*/{_DIGEST}") if file.read_text() == self.digest]
        last = max(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
        if last is None:
            self.remove()
            return None
        for number, rule in enumerate(self.rules):
            if (file := last / _RULE.format(number)).exists():
                rule.load_state(load_file(file))
        say(f"goes on from step {last.name.rpartition('-')[2]}")
        return str(last)

    def remove(self) -> None:
        if leads():
            shutil.rmtree(self.folder, ignore_errors=True)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Request a checkpoint if enough time has passed.

        This happens only at logged steps: between them the Trainer keeps sums for the log that no checkpoint contains.
        """
        over = control.should_training_stop or state.global_step == state.max_steps
        due = [time.monotonic() - self.saved >= self.seconds and not over]
        if args.world_size > 1:
            broadcast_object_list(due)  # all processes save at the same step, or none
        if due[0]:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.saved = time.monotonic()
        if not leads():
            return
        folder = self.folder / f"checkpoint-{state.global_step}"
        for number, rule in enumerate(self.rules):
            if tensors := rule.state():
                save_file({name: value.contiguous() for name, value in tensors.items()}, folder / _RULE.format(number))
        (folder / _DIGEST).write_text(self.digest)


def environment() -> str:
    """Return what the result of a computation depends on beside its inputs: versions, threads and code."""
    return f"{torch.__version__} {transformers.__version__} {torch.get_num_threads()} {all_code()}"


def digest(model: PreTrainedModel, data: Dataset, rules: Sequence[Rule], settings: Mapping[str, Any]) -> str:
    """Return a digest of everything that decides the result of the training."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(environment().encode())
    digest.update(model.config.to_json_string().encode())
    for rule in rules:
        digest.update(f"{type(rule).__name__} {rule.settings!r}".encode())
    for tensors in (model.state_dict(), *(rule.reads() for rule in rules)):
        for name, value in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    table = data.data.table
    with pa.ipc.new_stream(pa.PythonFile(_Hashed(digest), "w"), table.schema.remove_metadata()) as stream:
        stream.write_table(table.replace_schema_metadata())
    return digest.hexdigest()


class _Hashed:
    """File that only adds what is written to a hash: the bytes of a large table are never in memory together."""

    closed = False

    def __init__(self, digest: hashlib._Hash) -> None:
        self.digest = digest

    def write(self, part: bytes) -> int:
        self.digest.update(part)
        return len(part)
