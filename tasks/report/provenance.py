"""Describe a study's settings. No date is named, so equal studies have equal pages."""

from __future__ import annotations

import io
from collections.abc import Iterable

from tasks.config import schema, yaml_edit
from tasks.nlp_tasks import task_class
from tasks.report.numbers import count
from tasks.report.results import Results


def provenance(results: Results) -> dict[str, str]:
    """Return a description of the settings: topic → sentences."""
    settings = results.settings
    data, model, teacher, trainer = settings.data, settings.model, settings.teacher, settings.trainer
    seed, timing = settings.seed, settings.benchmark
    rows, tokens = timing.shapes[0]
    search = "; shaping and learned ranks train before it, with the same seed" if results.searches_trained else ""
    parts = ", ".join(f"{count(amount)} in {name}" for name, amount in results.census.rows)
    dtype = "" if model.dtype == "float32" else f", in {model.dtype}"
    original = (
        f"The base model fine-tuned on the task: {teacher.epochs:g} × the training split, batches of "
        f"{teacher.batch_size} examples, peak learning rate {teacher.learning_rate:g}, seed {seed}."
        if teacher.epochs
        else "The base model as it is."
    )
    precision = "All in mixed precision (bf16)." if trainer.precision else ""
    shared = f"In {trainer.processes} processes, where a method can share its training."
    processes = shared if trainer.processes > 1 else ""
    ways = " ".join(filter(None, (precision, processes)))
    untrained = f"the recovery of {results.control} takes no step"
    if task_class(data.task).from_original:
        untrained = "its own answers are the labels, so it has nothing to learn"
    prefix = f"; {data.prefix!r} is put before each text" if data.prefix else ""
    return {
        "Data": f"{source(data)}, split and sampled with seed {data.seed}; {results.dense.score.examples:,} test "
        f"examples, the same for every model; {cut(data)}{prefix}.",
        **calibration(data),
        **generation(data),
        "Base model": base(model) + dtype,
        "Original model": original,
        **({"Trainings": ways} if ways else {}),
        "Recovery": f"Each factorized model is fine-tuned on the task with seed {seed} as its recipe says{search}.",
        "Parameters": f"The original model has {results.dense.size.model_parameters:,}: {parts}.",
        "Control": f"The original model, fine-tuned like the candidates of {results.control}, with the same seed."
        if results.control_curve
        else f"The original model itself, because {untrained}.",
        "Speed": f"Median and 95 % interval over {timing.repetitions} rounds of forward passes, of {rows} "
        f"examples × {tokens} tokens. The original model and the candidate alternate in one process. Candidates of the "
        f"same shapes are timed once. {f'Timed on {results.machines}.' if results.machines else ''}".strip(),
    }


def source(data: schema.Data | schema.Text) -> str:
    """Return the name of the data set, with its configuration and revision."""
    return " ".join(filter(None, (data.source, data.config, data.revision and f"at {data.revision}")))


def base(model: schema.Model) -> str:
    """Return the name of the base model, with its revision; of a new model, its type."""
    if model.new:
        return f"a new {model.new.model_type}, with random weights"
    return " at ".join(filter(None, (model.base, model.revision)))


def cut(data: schema.Data) -> str:
    """Describe how long the text of an example is and how a longer one is read."""
    kind = task_class(data.task)
    if not kind.running_text and "stride" in kind.options:
        return f"contexts are read in windows of {data.max_length} tokens, which share {data.stride or 0}"
    if not kind.running_text:
        return f"texts are cut to {data.max_length} tokens"
    begins = "; its first token is the beginning-of-text token" if data.first else ""
    return (
        f"each a window of {data.max_length} tokens that scores its last {data.stride}, so that no token is scored "
        f"twice, and each, except in the first window, after at least {data.max_length - data.stride} others{begins}"
        if data.stride
        else f"each a block of {data.max_length} tokens of the text, scored without overlap{begins}"
    )


def calibration(data: schema.Data) -> dict[str, str]:
    """Describe the text that a language model is calibrated with: topic → sentence; empty for other tasks."""
    if not task_class(data.task).running_text:
        return {}
    begins = ", which begin at random tokens" if data.calibration_blocks else ""
    parts = {f"of the training text{begins}": data.sizes.calibration}
    parts |= {f"of {name} ({source(text)})": text.examples for name, text in data.calibration_texts.items()}
    parts["that the original model wrote"] = data.written.examples
    blocks = "; ".join(f"{amount:,} {of}" for of, amount in parts.items() if amount)
    return {"Calibration": f"At most these blocks of {data.max_length} tokens: {blocks}."}


def generation(data: schema.Data) -> dict[str, str]:
    """Describe the beam search that writes summaries: topic → sentence; empty if there is none."""
    if not data.generation:
        return {}
    options = {
        "num_beams": data.generation.beams,
        "length_penalty": data.generation.length_penalty,
        "max_new_tokens": data.target_length,
    }
    stated = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return {"Summaries": f"Written by beam search: model.generate(**inputs, do_sample=False, {stated})."}


def recipes_yaml(results: Results, names: Iterable[str]) -> str:
    """Return recipes as YAML, in the format of params.yaml."""
    text = io.StringIO()
    yaml_edit.yaml().dump({name: results.settings.recipes[name] for name in names}, text)
    return text.getvalue()
