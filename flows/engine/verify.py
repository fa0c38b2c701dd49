"""Find false entries of dvc.lock and of the run cache: their outputs were made from other parameters or other code.

An entry claims that certain outputs were made from certain inputs. One of the outputs is a record that the stage itself
writes of its parameters and of its code's digest (tasks/artifacts/stage_inputs.py). If this record differs from the
entry, the entry is false.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvc.schema import COMPILED_LOCK_FILE_STAGE_SCHEMA, COMPILED_LOCKFILE_SCHEMA
from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from voluptuous import Invalid

from flows.engine import cached_objects, dvc_transport, lock_file, stages
from flows.engine.lock_file import LOCK
from tasks.artifacts import stage_inputs
from tasks.artifacts.names import stage_name
from tasks.artifacts.stage_inputs import Inputs
from tasks.config.params_file import PARAMS

_MISSING = "nothing"


@dataclass(frozen=True)
class Entry:
    """An entry of dvc.lock or of the run cache: the inputs and outputs of a stage."""

    place: str
    """Path of the file with the entry."""
    stage: str
    """Name of the stage; its command if the name is unknown, as in a run cache entry without a record."""
    content: Mapping[str, Any]

    @property
    def outs(self) -> dict[str, str]:
        """Path → digest."""
        return lock_file.digests(self.content, "outs")

    @property
    def record(self) -> str | None:
        """Digest of the stage's own record; None if it is not among the outputs."""
        return next((md5 for path, md5 in self.outs.items() if Path(path).is_relative_to(stage_inputs.FOLDER)), None)

    def differences(self, record: Inputs) -> list[str]:
        """Return a description of each difference between the parameters in the entry and in the stage's record."""
        files = self.content.get("params", {}).values()
        parameters = {
            stage_inputs.without_recipe_name(path, self.stage): value
            for values in files
            for path, value in values.items()
        }
        source = {path: md5 for path, md5 in lock_file.digests(self.content, "deps").items() if path == str(PARAMS)}
        entered, ran_with = parameters | source, record.parameters
        return [
            f"{name} is {_short(entered.get(name, _MISSING))}, and the stage was run with "
            f"{_short(ran_with.get(name, _MISSING))}"
            for name in sorted({*entered, *ran_with})
            if entered.get(name, _MISSING) != ran_with.get(name, _MISSING)
        ]


@dataclass(frozen=True)
class Findings:
    """Result of `verify`: all entries, sorted by the outcome of the check."""

    agree: list[Entry]
    """Entries that agree with the record of the stage."""
    false: dict[str, list[Entry]]
    """Description of a mistake → the entries that have it."""
    unrecorded: list[Entry]
    """Entries without a record, or with a record that neither the cache nor the remote has."""
    doubtful: list[Entry]
    """Entries that are not false, but name the same outputs as another entry with other inputs.

    Records show false parameters and code, but not false data.
    """
    damaged: list[str]
    """Paths of files that cannot be read as entries."""


def verify() -> Findings:
    """Compare each entry of dvc.lock and of the run cache, here and in the remote, with the record of its stage."""
    damaged: list[str] = []
    entries = list(_entries(damaged))
    records = _records({entry.record for entry in entries if entry.record})
    findings = Findings([], defaultdict(list), [], [], damaged)
    for entry in entries:
        if not (record := records.get(entry.record or "")):
            findings.unrecorded.append(entry)
        elif differing := entry.differences(record):
            findings.false[f"{entry.stage}: {'; '.join(differing)}"].append(entry)
        else:
            findings.agree.append(entry)
    findings.doubtful.extend(_doubtful([*findings.agree, *findings.unrecorded]))
    return findings


def _entries(damaged: list[str]) -> Iterator[Entry]:
    if LOCK.exists():
        text = LOCK.read_text(errors="replace")
        for name, content in _loaded(text, str(LOCK), COMPILED_LOCKFILE_SCHEMA, damaged).get("stages", {}).items():
            yield Entry(str(LOCK), name, content)
    for place, text in dvc_transport.run_entries():
        if not (content := _loaded(text, place, COMPILED_LOCK_FILE_STAGE_SCHEMA, damaged)):
            continue
        files = [Path(out["path"]) for out in content.get("outs", [])]
        own = [file.relative_to(stage_inputs.FOLDER) for file in files if file.is_relative_to(stage_inputs.FOLDER)]
        names = [stage_name(*file.with_suffix("").parts) if len(file.parts) == 2 else file.stem for file in own]
        yield Entry(place, names[0] if names else str(content["cmd"]), content)


def _loaded(text: str, place: str, schema: Callable[[Any], dict[str, Any]], damaged: list[str]) -> dict[str, Any]:
    """Parse YAML with this schema. If that fails, add `place` to `damaged` and return {}."""
    try:
        return schema(YAML(typ="safe").load(text))
    except (YAMLError, ValueError, Invalid):
        damaged.append(place)
        return {}


def _records(digests: set[str]) -> dict[str, Inputs]:
    """Return digest → record of a stage, for those records that can be fetched and read."""
    cache_dir = stages.cache_dir()
    dvc_transport.fetch_outputs(digests)
    records: dict[str, Inputs] = {}
    for digest in digests:
        path = cached_objects.object_path(cache_dir, digest)
        if path.exists():
            try:
                records[digest] = Inputs.model_validate_json(path.read_text())
            except (ValidationError, UnicodeDecodeError):  # a record of another version, or no record at all
                continue
    return records


def _doubtful(entries: Sequence[Entry]) -> list[Entry]:
    alike: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        alike[json.dumps(entry.outs, sort_keys=True)].append(entry)
    return [entry for group in alike.values() if len(set(map(_inputs, group))) > 1 for entry in group]


def _inputs(entry: Entry) -> str:
    inputs = [lock_file.digests(entry.content, "deps"), entry.content.get("params")]
    return json.dumps(inputs, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
