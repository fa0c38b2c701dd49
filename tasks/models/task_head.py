"""Keep the head of a base model if it fits the labels of the task; otherwise make a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class

_HEADS_OF_LABELS = ("ForMultipleChoice", "ForSequenceClassification", "ForTokenClassification")
_SHOWN = 5  # most names of labels in a message
_FILE = "head.txt"

Fit = Literal["none", "known", "by position", "other", "random"]
"""Fit of a base model's head to the task.

none: the model has no head of the task's kind. known: the outputs are the labels, in any order. by position: there is
one output for each label, and either the outputs or the labels have only numbers as names. other: none of these, so a
new head is made. random: the whole model is new.
"""


def fit(config: PreTrainedConfig, kind: TaskName, labels: Sequence[str]) -> Fit:
    """Return the fit of a base model's head to the task, from the config of the base model.

    The comparison of names ignores case. Outputs with transformers' default names LABEL_0, LABEL_1, … count as outputs
    for the labels 0, 1, ….
    """
    task, names = task_class(kind), outputs(config)
    unnamed = names == [f"LABEL_{number}" for number in range(len(names))]
    # If the config names no model class, but names the outputs, there is a head, and it may be one for the task.
    name = (config.architectures or ["" if unnamed else task.head_class])[0]
    if not name.endswith(task.head_class):
        # "other" if it is a head for labels: weights of equal name and shape were loaded, but must not be kept.
        return "other" if task.problem_type and name.endswith(_HEADS_OF_LABELS) else "none"
    if not task.problem_type:
        return "known"
    if config.problem_type not in (None, task.problem_type):
        return "other"
    if task.numeric_labels:
        return "known" if config.num_labels == 1 else "other"
    if _order(names, labels):
        return "known"
    if len(names) != len(labels):
        return "other"
    if list(labels) == [str(number) for number in range(len(labels))]:
        return "known" if unnamed else "by position"
    return "by position" if unnamed else "other"


def in_words(config: PreTrainedConfig, kind: TaskName, labels: Sequence[str]) -> str:
    """Return a sentence on what is done with the head; "" if there is no head or its outputs are the task's labels."""
    wanted = _named(labels) if labels else "a number"
    match fit(config, kind, labels):
        case "by position":
            names = _named(outputs(config))
            return f"The base model's head is kept: its outputs ({names}) are taken for {wanted}, in this order."
        case "other":
            head = ", ".join([*(config.architectures or [])[:1], _named(outputs(config))])
            sentence = f"The base model's head ({head}) does not fit {wanted}: a new head takes its place."
            return sentence + _other_task(config, kind, labels)
    return ""


def _other_task(config: PreTrainedConfig, kind: TaskName, labels: Sequence[str]) -> str:
    """Return a hint to change data.task if the head fits another task; otherwise an empty string."""
    for name in TASK_NAMES if config.problem_type else ():
        if (
            name != kind
            and task_class(name).problem_type == config.problem_type
            and fit(config, name, labels) == "known"
        ):
            return f" Its problem_type is {config.problem_type}: to keep the head, write {name} for data.task."
    return ""


def adapt(model: PreTrainedModel, config: PreTrainedConfig, task: Task, loading: Mapping[str, Any]) -> str:
    """Reorder the outputs of the head in the order of the labels, or initialize the head anew if it does not fit.

    Args:
        model: the base model, loaded with a head for the task.
        config: the config that the base model was saved with.
        loading: transformers' report on the loading, with the weights that it skipped because of their shape.

    Returns:
        A sentence on what was done with the head, or "".

    Raises:
        StageError: the shape of a weight outside the head contradicts the config.
    """
    head = fit(config, task.kind, task.labels)
    mismatched = {key: shapes for key, *shapes in loading["mismatched_keys"]}
    if wrong := sorted(key for key in mismatched if head not in ("none", "other") or not _is_of_head(model, key)):
        shapes = " and ".join(" × ".join(map(str, shape)) for shape in mismatched[wrong[0]])
        raise StageError(
            f"{len(wrong)} weights of model.base have another shape than its config.json says ({wrong[0]}: {shapes}): "
            "take the config.json that was saved with them"
        )
    last_layer = _last_layer(model, len(task.labels) or 1)
    if head == "known" and task.labels and (order := _order(outputs(config), task.labels)):
        with torch.no_grad():
            for parameter in last_layer.values():
                parameter.copy_(parameter[order])
    if head == "other":
        loaded = (
            parameter for name, parameter in last_layer.items() if name not in {*mismatched, *loading["missing_keys"]}
        )
        spread = getattr(model.config, "initializer_range", None) or 0.02
        with torch.no_grad():
            for parameter in loaded:  # as transformers initializes them
                parameter.normal_(0, spread) if parameter.ndim > 1 else parameter.zero_()
    if head == "none" and mismatched:  # the config does not name the class of the head
        return f"The base model's head has other outputs than {_named(task.labels)}: a new head takes its place."
    return in_words(config, task.kind, task.labels)


def may_be_new(model: PreTrainedModel, name: str, head: Fit) -> bool:
    """Whether a weight need not be in the files of a base model: it is of a head that the base model does not have.

    A pooler counts as a part of the head, since models for masked words have none.
    """
    if model.base_model is model:  # the model of a task without a head
        return "pooler" in name
    return head in ("none", "other") and (_is_of_head(model, name) or "pooler" in name)


def is_new(model: PreTrainedModel, loading: Mapping[str, Any]) -> bool:
    """Whether transformers has drawn weights of the head at random, according to its report on the loading."""
    drawn = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    return model.base_model is not model and any(_is_of_head(model, name) for name in drawn)


def write_note(folder: Path, sentence: str) -> None:
    """Write a sentence on what was done with the head into the folder of the model, unless it is empty."""
    if sentence:
        (folder / _FILE).write_text(f"{sentence}\n")


def read_note(folder: Path) -> str:
    """Return the sentence that `write_note` wrote into `folder`; "" if there is none."""
    file = folder / _FILE
    return file.read_text().strip() if file.exists() else ""


def _order(outputs: Sequence[str], labels: Sequence[str]) -> list[int] | None:
    """Return, for each label, the index of the output with the same name; None if the names differ."""
    theirs, ours = ([name.casefold() for name in names] for names in (outputs, labels))
    same = sorted(theirs) == sorted(ours) and len(set(ours)) == len(ours)
    return [theirs.index(name) for name in ours] if same else None


def outputs(config: PreTrainedConfig) -> list[str]:
    """Return the names of the head's outputs, in their order, which config.json may not have: 10 before 2, say."""
    return [str(name) for _, name in sorted((config.id2label or {}).items())]


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if names[_SHOWN:] else "")


def _last_layer(model: PreTrainedModel, size: int) -> dict[str, nn.Parameter]:
    """Return the parameters of the head's last linear layer with `size` outputs; layers before it may be as wide."""
    of_head = {name: parameter for name, parameter in model.named_parameters() if _is_of_head(model, name)}
    weights = [name for name, parameter in of_head.items() if parameter.ndim == 2 and parameter.shape[0] == size]
    layer = weights[-1].rpartition(".")[0] if weights else None
    return {name: parameter for name, parameter in of_head.items() if name.rpartition(".")[0] == layer}


def _is_of_head(model: PreTrainedModel, name: str) -> bool:
    return not name.startswith(f"{model.base_model_prefix}.")
