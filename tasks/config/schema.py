"""The sections of params.yaml, typed. The file has every number; the types have no defaults.

`recipes` is typed where it is used (eckart/recipe.py), so that stages that know no recipe do not depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, overload

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from ruamel.yaml import YAML

from tasks.artifacts.errors import EckartError
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.names import candidate_name
from tasks.artifacts.results_schema import Runtime
from tasks.nlp_tasks import TaskName

PARAMS = Path("params.yaml")

_LONGEST = 200  # characters of a value that a message quotes

T = TypeVar("T")
Name = Annotated[str, Field(pattern=r"^[\w-]+$", max_length=50)]
"""Becomes part of names elsewhere, of files and of what MLflow and Prefect keep."""
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Labels = Literal["given", "expected", "drawn"]
"""By which labels gradients are gathered."""
Given = Literal["train", "validation", "test"]
"""A split that a source may bring."""
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PartialShare = Annotated[float, Field(gt=0, lt=1)]


def _without_password(address: str) -> str:
    if re.search(r"://[^\s/]*@", address):
        raise PydanticCustomError(
            "password", "holds a user name or password, and this file is shared; give it by the environment instead"
        )
    return address


Address = Annotated[str, AfterValidator(_without_password)]


def _rising(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise PydanticCustomError("range", "is no range; write the least first")
    return ends


Range = Annotated[tuple[float, float], AfterValidator(_rising)]


class ParamsError(EckartError):
    """params.yaml is not as it should be; the message names every mistake."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Goal(Section):
    """What a candidate is to be, in a user's own units: exactly one of three; and what runs it."""

    largest_drop: Annotated[float, Field(ge=0)] | None = None
    speedup: Annotated[float, Field(gt=0)] | None = None
    bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    runtime: Runtime = "torch"

    @model_validator(mode="after")
    def _one(self) -> Goal:
        told = self.model_fields_set - {"runtime"}
        if len(told) != 1 or None in (getattr(self, name) for name in told):
            raise PydanticCustomError("goal", "is not one goal; write largest_drop, speedup or bytes with a number")
        if self.runtime != "torch" and self.largest_drop is not None:
            raise PydanticCustomError(
                "goal",
                "is of validation rows, on which torch alone is scored; leave out runtime, or write speedup or bytes",
            )
        return self


class Study(Section):
    name: Name
    recipes: Annotated[tuple[str, ...], Field(min_length=1)]
    keeps: Annotated[tuple[Share, ...], Field(min_length=1)]
    goals: tuple[Goal, ...]
    control: str


class Columns(Section):
    text: str
    text_pair: str | None
    label: str | None


class Splits(Section):
    train: str
    validation: str | None
    test: str | None

    def named(self) -> dict[Given, str]:
        """Split → its name in the source; without those that are carved out."""
        every: dict[Given, str | None] = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: name for split, name in every.items() if name is not None}


class Shares(Section):
    validation: PartialShare
    test: PartialShare

    def by_split(self) -> dict[Literal["validation", "test"], float]:
        return {"validation": self.validation, "test": self.test}


class Sizes(Section):
    train: Count
    validation: Count
    test: Count
    calibration: Count


class Data(Section):
    source: Address
    config: str | None
    revision: str | None
    splits: Splits
    shares: Shares
    columns: Columns
    task: TaskName
    metric: MetricName
    sizes: Sizes
    max_length: Count
    target_length: Count | None
    prefix: str | None
    stride: Count | None
    seed: Seed


class Check(Section):
    fewest_rows: Count | None
    fewest_of_class: Count | None
    label_range: Range | None
    largest_doubled: Fraction | None
    largest_leaked: Fraction | None
    largest_lost: Fraction | None
    largest_shift: Fraction | None
    largest_drift: Annotated[float, Field(ge=0.5, le=1)] | None
    drift_rows: Count


class Model(Section):
    base: Address
    revision: str | None
    dtype: Literal["float32", "bfloat16"]
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None


class Training(Section):
    epochs: Annotated[float, Field(ge=0)]
    batch_size: Count
    learning_rate: Annotated[float, Field(gt=0)]
    warmup: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: Annotated[float, Field(ge=0)]


class Trainer(Section):
    precision: Literal["bf16"] | None
    checkpoint_activations: bool
    processes: Count

    def options(self) -> dict[str, Any]:
        """What a training is called with."""
        return self.model_dump(exclude={"processes"})


class TargetPatterns(Section):
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    heads: bool
    embeddings: bool
    tied: bool
    unsampled: bool
    products: bool


class Importance(Section):
    statistics: Annotated[tuple[Literal["inputs", "output_gradients", "fisher", "taylor"], ...], Field(min_length=1)]
    labels: Labels
    batch_size: Count
    layers_at_once: Count | None
    offload_activations: bool


class Evaluate(Section):
    batch_size: Count
    zero_shot: tuple[str, ...]
    probes: Annotated[int, Field(ge=0)]
    continuation: Annotated[int, Field(ge=0)]


class Export(Section):
    recipes: tuple[str, ...]


class Benchmark(Section):
    shapes: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]
    repetitions: Annotated[int, Field(ge=6)]  # fewer have no interval


class Threads(Section):
    shared: Count
    candidate: Count


def keeps() -> tuple[str, ...]:
    """As written (1, not 1.0): the files of candidates are named so."""
    return tuple(map(str, section("study.keeps", tuple[int | float, ...])))


def exported() -> tuple[str, ...]:
    """The candidates that are exported."""
    return tuple(candidate_name(recipe, keep) for recipe in section("export", Export).recipes for keep in keeps())


def read(path: Path = PARAMS) -> dict[str, Any]:
    """params.yaml as plain data.

    Raises:
        ParamsError: there is no such file, or it is no YAML mapping.
    """
    try:
        content = YAML(typ="safe").load(path.read_text())
    except FileNotFoundError as error:
        raise ParamsError(
            f"{path} does not exist: run this in the root of a workspace; `eckart init FOLDER` makes one"
        ) from error
    except OSError:
        raise
    except Exception as error:  # of a tag or a date that YAML has, whatever Python says of its value
        raise ParamsError(f"{path} is no valid YAML: {error or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ParamsError(f"{path} must be a mapping of sections, not {type(content).__name__}")
    if lines := list(_nameless(content)):
        raise ParamsError(report(path, lines))
    return content


def _nameless(content: Any, above: tuple[Any, ...] = (), within: tuple[int, ...] = ()) -> Iterator[str]:
    """Keys that are no names, by which nothing else could be reported; and what holds itself, as YAML allows."""
    if id(content) in within:
        yield f"{'.'.join(map(str, above))}: holds itself; write out what it is"
        return
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        place = (*above, key)
        if isinstance(content, dict) and not (isinstance(key, str) and key.isprintable() and key.strip()):
            yield f"{'.'.join(map(str, place))}: is no name of a key; write a word, and in quotes if it is a number"
        else:
            yield from _nameless(value, place, (*within, id(content)))


@overload
def section(name: str, kind: type[T]) -> T: ...
@overload
def section(name: str, kind: Any) -> Any: ...
def section(name: str, kind: Any) -> Any:
    """The part of params.yaml at the dotted `name`, as a `kind`.

    Raises:
        ParamsError: with all mistakes of this section.
    """
    content: Any = read()
    for key in name.split("."):
        if not isinstance(content, dict) or key not in content:
            raise ParamsError(report(PARAMS, [f"{name}: is missing; add it"]))
        content = content[key]
    return parse(content, kind, PARAMS, name)


@overload
def parse(content: Any, kind: type[T], path: Path, prefix: str = "") -> T: ...
@overload
def parse(content: Any, kind: Any, path: Path, prefix: str = "") -> Any: ...
def parse(content: Any, kind: Any, path: Path, prefix: str = "") -> Any:
    """`content` as a `kind`, strictly: no string is taken for a number.

    Raises:
        ParamsError: every mistake on a line of its own, with its path and what to write instead.
    """
    try:
        return TypeAdapter(kind).validate_json(as_json(content), strict=True)
    except ValidationError as error:
        raise ParamsError(report(path, mistakes(error, content, prefix))) from error


def as_json(content: Any) -> str:
    """YAML content for a strict type: JSON accepts a list for a tuple; every other type must match.

    What YAML has and JSON has not (a date, say) becomes something that no section takes, to be refused by its path.
    """
    return json.dumps(content, default=lambda value: {"neither text nor number": str(value)})


def report(path: Path, lines: Iterable[str]) -> str:
    """The message of a ParamsError: one mistake a line, whatever it quotes."""
    return f"{path} has mistakes:\n" + "\n".join(f"  {_on_one_line(line)}" for line in lines)


def _on_one_line(text: str) -> str:
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def mistakes(error: ValidationError, content: Any, prefix: str = "") -> list[str]:
    """Every mistake of `content` as `path: what is wrong; what to write`."""
    # A list that is too short only because its items are wrong is no mistake of its own.
    wrong = {details["loc"][:end] for details in error.errors() for end in range(len(details["loc"]))}
    errors = [details for details in error.errors() if details["type"] != "too_short" or details["loc"] not in wrong]
    missing: dict[tuple[int | str, ...], list[str]] = {}
    for details in errors:
        if details["type"] == "missing":
            missing.setdefault(details["loc"][:-1], []).append(str(details["loc"][-1]))
    return [
        f"{_path(details['loc'], content, prefix)}: {_advice(details, missing.get(details['loc'][:-1], []))}"
        for details in errors
    ]


def _path(loc: tuple[int | str, ...], content: Any, prefix: str) -> str:
    """The dotted path of a mistake, without the tags that pydantic adds for the members of a union."""
    keys = [prefix] if prefix else []
    tagged: Any = None
    for position, key in enumerate(loc):
        if isinstance(content, dict) and content.get("kind") == key and content is not tagged:
            tagged = content  # the tag comes first, even where a key has the same name
            continue
        keys_there = content if isinstance(content, dict) else range(len(content) if isinstance(content, list) else 0)
        there = key in keys_there
        if there or position == len(loc) - 1:
            keys.append(str(key))
        if there:
            content = content[key]
    return ".".join(keys)


def _advice(details: ErrorDetails, missing: list[str]) -> str:
    kind, message = details["type"], details["msg"]
    if kind == "missing":
        return "is missing; add it"
    if kind == "extra_forbidden":
        meant = get_close_matches(str(details["loc"][-1]), missing, n=1)
        return f"is unknown; write {meant[0]}" if meant else "is unknown; remove it"
    if kind == "union_tag_invalid":
        return f"kind is {details['ctx']['tag']!r}; write one of {details['ctx']['expected_tags']}"
    if kind == "union_tag_not_found":
        return "has no kind; add it"
    if kind == "too_short":
        return "is empty; add an item"
    if kind in ("password", "goal"):
        return message  # without what stands there
    there = json.dumps(details["input"], default=str, ensure_ascii=False)
    shown = there if len(there) <= _LONGEST else f"{there[:_LONGEST]}…"
    return f"is {shown}; write {message.removeprefix('Input should be ')}"
