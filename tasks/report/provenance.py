"""The settings behind the numbers, from params.yaml, without date and machine: equal inputs give equal pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config import schema
from tasks.nlp_tasks import task_class
from tasks.report.results import Results


@dataclass(frozen=True)
class Parts:
    """A recipe and its parts in params.yaml."""

    name: str
    parts: dict[str, str]
    """Part → its settings in words; empty where the recipe has none."""


@dataclass(frozen=True)
class Provenance:
    """Facts by name, and the recipes."""

    facts: dict[str, str]
    recipes: tuple[Parts, ...]

    @property
    def columns(self) -> list[str]:
        """Names of the parts that any recipe has, in the order in which recipes state them."""
        names = dict.fromkeys(part for recipe in self.recipes for part in recipe.parts)
        return [name for name in names if any(recipe.parts.get(name) for recipe in self.recipes)]


def provenance(results: Results) -> Provenance:
    return Provenance(_facts(results), tuple(_recipe(name) for name in results.recipes))


def _facts(results: Results) -> dict[str, str]:
    data, model = schema.section("data", schema.Data), schema.section("model", schema.Model)
    teacher, timing = schema.section("teacher", schema.Training), schema.section("benchmark", schema.Benchmark)
    rows, tokens = timing.shapes[0]
    seed, trainer = schema.section("seed", schema.Seed), schema.section("trainer", schema.Trainer)
    search = "; shaping and learned ranks train before it, with the same seed" if results.searches_trained else ""
    return {
        "Data": f"{source(data)}, split and sampled with seed {data.seed}; {results.dense.score.rows:,} test examples, "
        f"the same for every model; {cut(data)}.",
        "Base model": base(model) + _in(model.dtype),
        "Original model": _training(teacher, seed),
        **_machines(trainer),
        "Recovery": f"Each factorized model is fine-tuned on the task with seed {seed} as its recipe says{search}.",
        "Control": f"The original model, fine-tuned like the candidates of {results.control}, with the same seed.",
        "Speed": f"Median over {timing.repetitions} rounds of forwards of {rows} examples × {tokens} tokens, in which "
        "the original model and the candidate alternate in one process, and its 95 % interval; candidates of the same "
        "shapes are timed once.",
    }


def source(data: schema.Data) -> str:
    """Name the data set with its configuration and revision."""
    return " ".join(filter(None, (data.source, data.config, data.revision and f"at {data.revision}")))


def base(model: schema.Model) -> str:
    """Name the base model with its revision."""
    return " at ".join(filter(None, (model.base, model.revision)))


def cut(data: schema.Data) -> str:
    """Say which part of a text an example has."""
    if task_class(data.task).running_text:
        return f"each a block of {data.max_length} tokens of the text"
    return f"texts are cut to {data.max_length} tokens"


def _in(dtype: str) -> str:
    return "" if dtype == "float32" else f", in {dtype}"


def _machines(trainer: schema.Trainer) -> dict[str, str]:
    """Say how trainings ran, where it is not in float32 in one process."""
    precision = "in mixed precision (bf16)" if trainer.precision else ""
    processes = f"in {trainer.processes} processes" if trainer.processes > 1 else ""
    ways = ", ".join(filter(None, (precision, processes)))
    return {"Trainings": f"All {ways}."} if ways else {}


def _training(teacher: schema.Training, seed: int) -> str:
    if not teacher.epochs:
        return "The base model as it is."
    return (
        f"The base model fine-tuned on the task: {teacher.epochs:g} × the training split, batches of "
        f"{teacher.batch_size} examples, peak learning rate {teacher.learning_rate:g}, seed {seed}."
    )


def _recipe(name: str) -> Parts:
    parts: dict[str, Any] = schema.section(f"recipes.{name}", dict[str, Any])
    return Parts(name, {part: _in_words(value) for part, value in parts.items()})


def _in_words(value: Any) -> str:
    """Format a part: its kind, then its numbers; empty for null."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if not isinstance(value, Mapping):
        return str(value)
    kind = [str(value["kind"])] if "kind" in value else []
    rest = [(key.replace("_", " "), part) for key, part in value.items() if key != "kind" and part is not None]
    inner = (
        f"{name} ({_in_words(part)})" if isinstance(part, Mapping) else f"{name} {_in_words(part)}"
        for name, part in rest
    )
    return ", ".join([*kind, *inner])
