"""Contradictions in params.yaml: values that are right by themselves and do not fit together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tasks.artifacts.input_folders import FORMATS
from tasks.artifacts.metrics import METRICS
from tasks.config import schema
from tasks.data.hub_inputs import hub_inputs
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class

if TYPE_CHECKING:
    from eckart.recipe import Recipe

_Rows = tuple[str, str | None, str]


def contradictions(typed: Mapping[str, Any], content: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each contradiction between sections, or between parts of a recipe.

    Args:
        typed: section → typed object, or None if the section has mistakes.
        content: sections as plain data, with defaults. They are read instead of `typed` where possible, so that another
            mistake in a section does not hide a contradiction.
        stated: params.yaml as plain data, without defaults. Only recipes that it defines or uses are checked, since the
            common `recovery` may contradict an unused built-in recipe.
    """
    recipes = typed["recipes"]
    used = _strings(_at(content, "study", "recipes"))
    used_recipes = {name: recipe for name in used if (recipe := recipes.get(name))}
    yield from _study_mistakes(recipes, used_recipes, content, stated)
    yield from _export_mistakes(typed, content, used)
    if typed["data"]:
        yield from _text_mistakes(typed["data"], typed["evaluate"].texts if typed["evaluate"] else {})
    yield from _wrong_revisions(typed)
    task = _at(content, "data", "task")
    if task in TASK_NAMES:
        yield from _task_mistakes(task, typed, content["data"])
        yield from _meaningless_limits(task, typed, content["data"].get("metric"))
        if task_class(task).from_original:
            yield from _ranks_by_loss(task, used_recipes)
        if not task_class(task).running_text:
            yield from _saved_logits(task, used_recipes)
    if (teacher := typed["teacher"]) and teacher.schedule == "constant" and teacher.last_rate:
        yield "teacher.last_rate: has no effect, because the schedule is constant; write 0.0, or linear or cosine there"
    if typed["trainer"]:
        yield from _trainer_mistakes(typed["trainer"], recipes, used_recipes, content)
    if typed["targets"]:
        yield from _unsupported_pairs(typed["targets"], used_recipes)
    if typed["importance"]:
        labels = task_class(task).calibration_labels if task in TASK_NAMES else ("given",)
        yield from _missing_statistics(typed["importance"], used_recipes, labels)
        yield from _without_effect(typed["importance"], used_recipes, labels[0])


def _study_mistakes(
    recipes: Mapping[str, Recipe | None],
    used_recipes: Mapping[str, Recipe],
    content: Mapping[str, Any],
    stated: Mapping[str, Any],
) -> Iterator[str]:
    from eckart.recipe import contradictions as within_recipe

    used, control, own = _at(content, "study", "recipes"), _at(content, "study", "control"), stated.get("recipes")
    yield from _repeated("study.recipes", used)
    yield from _repeated("study.keeps", _at(content, "study", "keeps"))
    for name in _strings(used):
        if name not in recipes:
            yield f"study.recipes: there is no recipe {name}; write one of {', '.join(map(str, recipes))}"
    yield from _control_mistakes(control, recipes, used_recipes)
    for name in dict.fromkeys([*_strings(used), *_strings([control]), *(own if isinstance(own, dict) else ())]):
        if recipe := recipes.get(name):
            for part, mistake in within_recipe(recipe):
                yield f"recipes.{name}.{part}: {mistake}"


def _control_mistakes(
    control: Any, recipes: Mapping[str, Recipe | None], used_recipes: Mapping[str, Recipe]
) -> Iterator[str]:
    suited = [name for name, recipe in recipes.items() if recipe and recipe.recovery.for_dense]
    advice = f"write one of {', '.join(suited)}"
    if isinstance(control, str) and control not in recipes:
        yield f"study.control: there is no recipe {control}; {advice}"
    elif isinstance(control, str) and recipes[control] and control not in suited:
        yield f"study.control: the original model cannot be fine-tuned as {control} is; {advice}"
    elif control is None and used_recipes and not {*used_recipes} & {*suited}:
        yield f"study.control: the original model cannot be fine-tuned as any of study.recipes is; {advice}"


def _export_mistakes(typed: Mapping[str, Any], content: Mapping[str, Any], used: Sequence[str]) -> Iterator[str]:
    exported, task = _strings(_at(content, "export", "recipes")), _at(content, "data", "task")
    yield from _repeated("export.recipes", exported)
    for name in exported:
        if name not in used:
            yield f"export.recipes: has {name}, which is not in study.recipes; remove it, or write []"
    if exported and task in TASK_NAMES and not task_class(task).one_graph:
        yield f"export.recipes: a model for {task} cannot be exported as one ONNX graph; write []"
    if typed["study"] and typed["export"] and not typed["export"].recipes:
        for number, goal in enumerate(typed["study"].goals):
            if goal.runtime != "torch":
                yield f"study.goals.{number}.runtime: no recipe is exported; remove runtime, or fill export.recipes"


def _saved_logits(task: TaskName, recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield a line for each training that distills saved logits, which need as many predictions in all examples."""
    for name, recipe in recipes.items():
        for place, training in recipe.recovery.trainings.items():
            if (distillation := getattr(training, "distillation", None)) and distillation.top is not None:
                path = ".".join(filter(None, ("recipes", name, "recovery", place, "distillation.top")))
                yield f"{path}: is only for language models, and data.task is {task}; write null"


def _ranks_by_loss(task: TaskName, recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield a line for each rank search by the increase of a loss that is 0 for the original model."""
    for name, recipe in recipes.items():
        if recipe.ranks.judges_by_loss:
            yield (
                f"recipes.{name}.ranks: {recipe.ranks.kind} allows an increase relative to the original model's loss, "
                f"which is 0 for {task}; write other ranks, such as waterfill"
            )


def _meaningless_limits(task: TaskName, typed: Mapping[str, Any], metric: Any) -> Iterator[str]:
    """Yield a line for each limit that no model can miss or meet, because the metric lies between -1 and 1."""
    if metric not in task_class(task).metrics or not METRICS[metric].bounded:
        return
    title, promotion, study = METRICS[metric].title, typed["promotion"], typed["study"]
    if promotion and not -1 < promotion.least_gain < 1:
        gain = f"{promotion.least_gain:g}"
        yield f"promotion.least_gain: is {gain}, beyond any gain of {title}; write a number above -1 and below 1"
    drops = {"promotion": promotion.largest_drop} if promotion else {}
    if study:
        drops |= {f"study.goals.{number}": goal.largest_drop for number, goal in enumerate(study.goals)}
    for path, drop in drops.items():
        if drop is not None and drop >= 1:
            yield f"{path}.largest_drop: is {drop:g}, too much for a drop of {title}; write 0.01 for one point"


def _trainer_mistakes(
    trainer: schema.Trainer,
    recipes: Mapping[str, Recipe | None],
    used_recipes: Mapping[str, Recipe],
    content: Mapping[str, Any],
) -> Iterator[str]:
    control = _at(content, "study", "control")
    if trainer.processes > 1:
        trained = dict(used_recipes)
        if isinstance(control, str) and (recipe := recipes.get(control)):
            trained[control] = recipe
        yield from _unshared_batches(trainer.processes, trained, content)
    for name, recipe in used_recipes.items() if trainer.micro_batch else ():
        for method in (method for method in recipe.methods if method.trains and method.one_pass):
            yield (
                f"trainer.micro_batch: is {trainer.micro_batch}, but {method.kind} in recipes.{name} needs all "
                "examples of a step in one pass; write null"
            )


def _unshared_batches(processes: int, recipes: Mapping[str, Recipe], content: Mapping[str, Any]) -> Iterator[str]:
    from eckart.recipe_parts import train_together

    sizes = {"teacher": _at(content, "teacher", "batch_size")}
    for name, recipe in recipes.items():
        for stage in (("shaping", "ranks"), ("recovery",)):
            parts = {part: method for part in stage if (method := getattr(recipe, part)) is not None}
            if train_together(parts.values()):
                sizes |= {
                    ".".join(filter(None, ("recipes", name, part, place))): training.batch_size
                    for part, method in parts.items()
                    for place, training in method.trainings.items()
                }
    for path, size in sizes.items():
        if isinstance(size, int) and size % processes:
            yield f"{path}.batch_size: is {size}, which {processes} processes cannot share; write a multiple"


def _task_mistakes(task: TaskName, typed: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value, in the section data or in another one, that does not fit the task."""
    kind, metric = task_class(task), data.get("metric")
    if isinstance(metric, str) and metric not in kind.metrics:
        yield f"data.metric: {metric} is not a metric of {task}; write one of {', '.join(kind.metrics)}"
    yield from column_mistakes(task, data.get("columns"))
    for key in sorted({option for name in TASK_NAMES for option in task_class(name).options} - {*kind.options}):
        if data.get(key) is not None:
            owners = [name for name in TASK_NAMES if key in task_class(name).options]
            yield f"data.{key}: is only for {' and '.join(owners)}; write null"
    stride, length = data.get("stride"), data.get("max_length")
    if kind.running_text and isinstance(stride, int) and isinstance(length, int) and stride >= length:
        yield f"data.stride: is {stride}, so that windows do not overlap; write less than max_length, {length}, or null"
    for key, meaning in kind.required_options.items():
        if key in data and data[key] is None:
            yield f"data.{key}: is null; write {meaning}"
    yield from _mistakes_of_other_sections(task, typed)


def _mistakes_of_other_sections(task: TaskName, typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value in a section other than data that does not fit the task."""
    kind = task_class(task)
    evaluate, check, importance = typed["evaluate"], typed["check"], typed["importance"]
    if not kind.running_text and evaluate:
        for key, given, none in (("zero_shot", evaluate.zero_shot, "[]"), ("texts", evaluate.texts, "{}")):
            if given:
                yield f"evaluate.{key}: is only for language models, and data.task is {task}; write {none}"
    if evaluate and evaluate.zero_shot and not find_spec("lm_eval"):
        yield "evaluate.zero_shot: needs lm-eval; `pip install 'eckart[lm-eval]'`, or write []"
    if not kind.numeric_labels and check and check.label_range:
        yield f"check.label_range: is only for labels that are numbers, and data.task is {task}; write null"
    if importance and importance.labels not in kind.calibration_labels:
        labels = importance.labels
        owners = [name for name in TASK_NAMES if labels in task_class(name).calibration_labels]
        yield f"importance.labels: {labels} is only for {' and '.join(owners)}; write {kind.calibration_labels[0]}"
    if kind.from_original:
        yield from _changed_originals(task, typed["teacher"], typed["model"])


def _changed_originals(task: TaskName, teacher: Any, model: Any) -> Iterator[str]:
    """Yield a line for each way in which the original model would not be the base model, which the task compresses."""
    if teacher and teacher.epochs:
        yield f"teacher.epochs: must be 0, since {task} compresses the base model as it is"
    if model and model.new:
        yield f"model.new: {task} compresses a base model; write null, and a model for model.base"


def _text_mistakes(data: schema.Data, scored: Mapping[str, schema.Text]) -> Iterator[str]:
    given = data.splits.named()
    yield from _repeated("data.splits", list(given.values()))
    if sum(share for name, share in data.shares if name not in given) >= 1:
        yield "data.shares: leave nothing for train; write shares whose sum is below 1"
    yield from _calibration_mistakes(data, scored)
    yield from _seen_texts(data, scored)


def _wrong_revisions(typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each commit of a model or data set that is not on the hub: reports would name it."""
    inputs = hub_inputs(typed["model"], typed["data"], typed["evaluate"])
    for place, (stated, name) in inputs.items():
        if stated.revision and not name:
            yield f"{place}.revision: names a commit of the hub, and {place} is not on the hub; write null"


def _calibration_mistakes(data: schema.Data, scored: Mapping[str, schema.Text]) -> Iterator[str]:
    """Yield a line for each text to calibrate with that the task cannot read, or that candidates are scored on.

    Args:
        scored: evaluate.texts.
    """
    written, texts = data.written, data.calibration_texts
    if not task_class(data.task).running_text:
        for key, stated, none in (("written.examples", written.examples, 0), ("calibration_texts", texts, "{}")):
            if stated:
                yield f"data.{key}: is only for language models, and data.task is {data.task}; write {none}"
    if not (data.sizes.calibration or written.examples or texts):
        yield "data.sizes.calibration: is 0, and there is no other text to calibrate with; write a number"
    if written.examples and written.prompts >= data.max_length:
        yield f"data.written.prompts: is {written.prompts}, a whole block; write less than {data.max_length}"
    source = os.path.relpath(data.source)
    held_out = set[str]() if _is_file(source) else {*data.splits.named().values()} - {data.splits.train}
    for name, text in texts.items():
        rows = text.source, text.config, text.split
        if os.path.relpath(text.source).startswith(f"{source}{os.sep}"):
            yield (
                f"data.calibration_texts.{name}.source: is in data.source, where candidates are scored; write "
                f"{data.source} and its split {data.splits.train}"
            )
        elif any(_same_rows(rows, (data.source, data.config, split)) for split in held_out):
            yield (
                f"data.calibration_texts.{name}.split: is {text.split}, on which candidates are scored; write "
                f"{data.splits.train}"
            )
        for own, same in scored.items():
            if _same_rows(rows, (same.source, same.config, same.split)):
                yield f"data.calibration_texts.{name}: is what evaluate.texts.{own} scores; remove one of them"


def _seen_texts(data: schema.Data, scored: Mapping[str, schema.Text]) -> Iterator[str]:
    """Yield a line for each of evaluate.texts that is the training split itself."""
    train = data.source, data.config, data.splits.train
    for name, text in scored.items():
        if _same_rows(train, (text.source, text.config, text.split)):
            yield f"evaluate.texts.{name}: is what candidates are trained and calibrated with; write another text"


def _same_rows(one: _Rows, other: _Rows) -> bool:
    """Whether two splits are the same. A file is a single split; in its folder, it is the split of its own name.

    Args:
        one, other: source, configuration and name of a split.
    """
    (path, config, split), (other_path, other_config, other_split) = one, other
    path, other_path = os.path.relpath(path), os.path.relpath(other_path)
    if _is_file(path) == _is_file(other_path):
        return path == other_path and (_is_file(path) or (config, split) == (other_config, other_split))
    file, folder, name = (path, other_path, other_split) if _is_file(path) else (other_path, path, split)
    return os.path.splitext(file)[0] == os.path.join(folder, name)


def _is_file(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in FORMATS


def column_mistakes(task: TaskName, columns: Any) -> Iterator[str]:
    """Yield a line for each column that is null although the task needs it, or named although the task refuses it."""
    if not isinstance(columns, dict):
        return
    kind = task_class(task)
    named = {role: name for role, name in columns.items() if isinstance(name, str)}
    null = [role for role, name in columns.items() if name is None]
    for role in ("text_pair", "label"):
        if role in named and named[role] == named.get("text"):
            yield f"data.columns.{role}: is {named[role]}, the column of the text; write the name of another column"
    if kind.label == "refused" and "label" in named:
        yield f"data.columns.label: is {named['label']}, but {task} learns from the text alone; write null"
    if kind.label == "required" and "label" in null:
        yield f"data.columns.label: is null, but {task} learns from it; write the name of a column"
    if kind.text_pair == "required" and "text_pair" in null:
        yield f"data.columns.text_pair: is null, but {task} needs a second text; write the name of its column"
    if kind.text_pair == "refused" and "text_pair" in named:
        yield f"data.columns.text_pair: is {named['text_pair']}, but {task} reads one text; write null"


def _unsupported_pairs(targets: schema.TargetPatterns, recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield a line for each method that cannot compress a pair of linear layers, if `targets` asks for such pairs."""
    for option in ("products", "tied"):
        for name, recipe in recipes.items() if getattr(targets, option) else ():
            for method in recipe.methods:
                if not method.pairs:
                    yield (
                        f"targets.{option}: is true, but {method.kind} in recipes.{name} cannot compress targets of "
                        "two linear layers; write false"
                    )


def _missing_statistics(
    importance: schema.Importance, recipes: Mapping[str, Recipe], labels: Sequence[schema.Labels]
) -> Iterator[str]:
    """Yield a line for each statistic that a recipe reads and that is not gathered, or says nothing.

    Args:
        labels: values of importance.labels that the task allows.
    """
    from eckart.recipe import PARTS

    for name, recipe in recipes.items():
        for part in PARTS:
            for kind in getattr(getattr(recipe, part), "statistics", ()):
                if kind not in importance.statistics:
                    yield f"importance.statistics: lacks {kind}, which recipes.{name}.{part} reads; add it"
                if kind == "gradients" and importance.labels != "given":
                    yield (
                        f"importance.labels: are {importance.labels}, whose mean gradient tends to zero, but "
                        f"recipes.{name}.{part} reads it; write {'given' if 'given' in labels else 'another recipe'}"
                    )


def _without_effect(
    importance: schema.Importance, recipes: Mapping[str, Recipe], labels: schema.Labels
) -> Iterator[str]:
    """Yield a line for each setting of the gradients that changes nothing which a recipe reads.

    Args:
        labels: the value of importance.labels that stands where none has an effect.
    """
    refined = [recipe.sequential.refine for recipe in recipes.values() if recipe.sequential]
    read = {kind for recipe in recipes.values() for method in recipe.methods for kind in method.statistics}
    read |= {"gradients" for refine in refined if refine and refine.error == "gradients"}
    for name, neutral, changed in (
        ("labels", labels, ("output_gradients", "fisher", "taylor", "gradients")),
        ("clip", None, ("output_gradients",)),
        ("edges", 0.0, ("output_gradients",)),
    ):
        if recipes and getattr(importance, name) != neutral and not read & {*changed}:
            yield (
                f"importance.{name}: has no effect, because no recipe of study.recipes reads {' or '.join(changed)}; "
                f"write {'null' if neutral is None else neutral}"
            )


def _at(content: Mapping[str, Any], section: str, key: str) -> Any:
    return content[section].get(key) if isinstance(content.get(section), dict) else None


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _repeated(path: str, values: Any) -> Iterator[str]:
    plain = [value for value in values if isinstance(value, str | int | float)] if isinstance(values, list) else []
    for value, count in Counter(plain).items():
        if count > 1:
            yield f"{path}: has {value} {count} times; remove the repetition"
