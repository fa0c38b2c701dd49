"""Calibration text that the original model writes itself, `data.written`."""

from __future__ import annotations

from collections.abc import Iterable

from eckart.progress import Item
from eckart.text.self_written import write_text
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Model, Written
from tasks.data.loading import encoded
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import explained, say


def written_blocks(params: Written) -> list[list[int]]:
    """Return blocks of `data.max_length` token ids that the original model writes.

    Raises:
        StageError: the model cannot write such blocks.
    """
    task = load_task()
    model, tokenizer = load(TEACHER, kind_of(task).auto, device_map=section("model", Model).device_map)
    to_device(model)
    prompts = (
        [block[: params.prompts] for block in encoded("train", tokenizer)["input_ids"]] if params.prompts else None
    )
    with explained():
        batches = write_text(
            model,
            params.examples,
            task.max_length,
            prompts=prompts,
            first=params.first,
            temperature=params.temperature,
            batch_size=params.batch_size,
            seed=task.seed,
            progress=_said,
        )
    return [block for batch in batches for block in batch["input_ids"].tolist()]


def _said(items: Iterable[Item], description: str, unit: str) -> Iterable[Item]:
    """Yield `items`, and print a line after each."""
    todo = list(items)
    for number, item in enumerate(todo, 1):
        yield item
        say(f"{description} written: {unit} {number}/{len(todo)}")
