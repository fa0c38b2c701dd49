"""The promotion flow of Prefect: it makes a candidate the champion of the model registry if it passes the gates."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from mlflow.entities.model_registry import ModelVersion
from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.display import prefect_artifacts
from flows.engine import nothing_to_do, stages
from flows.engine.stages import Outcome
from flows.environment import crashed_runs, settings
from flows.environment.redaction import redact
from flows.promotion import gates
from flows.promotion.gates import Champion, Recorded, Refused, Terms
from flows.registry import model_package, versions
from flows.registry.smoke_test import SmokeFailed, ask
from flows.registry.versions import Registry, clock
from flows.tracking import mirror
from flows.workspace import deployment_owner
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import FIGURES_STAGE, candidate_of, stage_name
from tasks.artifacts.paths import FINETUNED, ONNX
from tasks.artifacts.task_spec import Task, columns_of
from tasks.config import validation
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import Answers
from tasks.report.choose_candidate import Gate
from tasks.report.numbers import counted
from tasks.report.result_files import load_results
from tasks.report.results import CandidateResults, Results

_TEST = "eckart.test"
"""Tag: DVC's digest of the test examples on which a version went through the gates."""


@dataclass(frozen=True)
class PromotionResult:
    """Result of a promotion that was not refused."""

    message: str
    gates: tuple[Gate, ...]
    """The gates, all passed; empty if the candidate already was the champion."""


@flow(name="promotion", persist_result=False)
def promotion(again: bool = False, first: bool = False, candidate: str | None = None) -> PromotionResult:
    """Promote a candidate of the finished study in the working directory, if it passes the gates.

    Args:
        candidate: name of the candidate; None: the candidate that the report names, which has the best metric on
            validation examples of all candidates within the limits of params.yaml.
        again: whether to promote the candidate even if it was rolled back before.
        first: whether to accept a registry without a champion, although this workspace has had a champion.

    Raises:
        Refused: the candidate was not promoted; the champion has not changed.
        OtherWorkspace: the run's deployment belongs to another folder.
        RegistryError: the registry failed. The next promotion finishes or undoes an unfinished change.
        ParamsError: params.yaml has mistakes.
    """
    settings.apply()  # the run of a deployment starts here, not in the command line
    try:
        deployment_owner.check()
        stages.check_workspace()
        with crashed_runs.lock_run(str(flow_run.id)):
            terms = _terms()
            try:
                result = _promote(terms, again, first, candidate)
            except Refused as refusal:
                _show(terms.wanted.model, str(refusal), refusal.gates)
                raise
            _show(terms.wanted.model, result.message, result.gates)
    except EckartError as error:  # without a traceback, because a refusal is not a fault
        name = "Refused" if isinstance(error, Refused) else "Failed"
        message = redact(str(error))
        return Failed(name=name, message=message, data=error)  # type: ignore[return-value]  # Prefect raises it
    return Completed(message=result.message, data=result)  # type: ignore[return-value]


def rollback() -> str:
    """Make the predecessor of the champion the champion again, and return a message for the user.

    If the champion's version was deleted, its predecessor is the version that was promoted last.

    Raises:
        NothingBefore: there is no champion, or it has no predecessor; the champion stays.
        RegistryError: there is no champion and none to return to, although there has been one.
        SmokeFailed: the predecessor does not answer; or an interrupted promotion had set a champion that does not
            answer, and was undone.
    """
    with versions.connected(validation.typed_section("promotion").model, first=True) as models:
        models.settle()
        before, after = models.roll_back()
    rolled_back = f" Version {before} is rolled back: only `promote --again` promotes it again." if before else ""
    return f"Version {after} of {models.name} is the champion again.{rolled_back}"


def _terms() -> Terms:
    typed = validation.check()
    return Terms(
        study=typed["study"].name,
        metric=typed["data"].metric,
        threads=typed["threads"].candidate,
        batch_size=typed["evaluate"].batch_size,
        wanted=typed["promotion"],
    )


def _show(model: str, decision: str, checked: Sequence[Gate]) -> None:
    """Show the gates and the decision on the page of this run in Prefect."""
    try:
        if checked:
            prefect_artifacts.gates(model, decision, checked)
    except httpx.HTTPError as error:  # the gates are also in the registry
        get_run_logger().warning("Prefect's server fails (%s): its page of this run is not complete", error)


def _promote(terms: Terms, again: bool, first: bool, name: str | None) -> PromotionResult:
    log = get_run_logger()
    candidate = choose(name)  # before the lock: it waits for a running stage, and a rollback must not
    if not name:
        log.info("%s is the best on validation examples within the limits of promotion", candidate.name)
    with versions.connected(terms.wanted.model, first) as models:
        try:
            models.settle()
        except SmokeFailed as error:
            log.warning("left by an earlier promotion: %s", error)
        if result := _champion_already(candidate, models.champion()):
            return result
        log.info("registering %s", candidate.name)
        version = register(models, terms, candidate, again)
        log.info("version %s of %s: checking the gates on test examples", version, models.name)
        return _challenge(models, terms, candidate, version)


def _champion_already(candidate: Recorded, champion: ModelVersion | None) -> PromotionResult | None:
    if not champion or champion.tags.get(versions.CONTENT) != candidate.content or not _answers(champion, candidate):
        return None
    return PromotionResult(f"{candidate.name} is the champion already (version {champion.version})", ())


def _answers(version: ModelVersion, candidate: Recorded) -> bool:
    """Whether a version with the candidate's files answers with the settings of the candidate's task."""
    return version.tags.get(versions.ANSWERING) == model_package.answering(candidate.task, candidate.pairs)


def _challenge(models: Registry, terms: Terms, candidate: Recorded, version: str) -> PromotionResult:
    """Check the gates of a version, make it the champion if it passes, and store the outcome in the registry."""
    passed: tuple[Gate, ...] = ()
    try:
        while True:
            champion = models.champion()
            if result := _champion_already(candidate, champion):
                return result
            passed = gate(models, terms, candidate, version, champion)
            _write_down(models, terms, candidate, version, passed, "All gates are passed.")
            try:
                if models.promote(version, champion):
                    break
            except SmokeFailed as error:
                back = f"version {champion.version} is the champion again" if champion else "there is no champion"
                raise Refused(f"{error}; {back}") from error
            get_run_logger().warning("someone else changed the champion meanwhile: going through the gates again")
    except Refused as refusal:
        _write_down(models, terms, candidate, version, refusal.gates or passed, f"Refused: {refusal}")
        raise
    message = f"{candidate.name} is the champion now: version {version} of {models.name}"
    message += f", in place of version {champion.version}" if champion else ""
    return PromotionResult(message, passed)


def choose(name: str | None = None) -> Recorded:
    """Return the candidate `name`; if None, the candidate that `tasks.report.choose_candidate.choose` chose.

    This choice uses the validation examples only. The test examples are first used by the gates.

    Raises:
        Refused: stages are not up to date, there is no such candidate, or no candidate is within the limits.
    """
    planned = nothing_to_do.plan()
    # Report and figures may be stale: they only show the choice, and new limits apply without them.
    shown = ("compare", f"{FIGURES_STAGE}@")
    if stale := [stage.name for stage in planned if not stage.cached and not stage.name.startswith(shown)]:
        listed = ", ".join(stale[:3]) + (", …" if len(stale) > 3 else "")
        raise Refused(f"{counted(len(stale), 'stage')} not up to date ({listed}): run `eckart run` first")
    results = load_results()
    names = [candidate.name for candidate in results.candidates]
    if name and name not in names:
        raise Refused(f"there is no candidate {name}: write one of {', '.join(names)}")
    if not (chosen := name or results.choice.chosen):
        closed = results.choice.closed
        lines = "\n".join(
            f"  {other}: {'; '.join(gate.refusal for gate in refused)}" for other, refused in closed.items()
        )
        raise Refused(
            f"No candidate is within the limits of promotion in params.yaml on validation examples:\n{lines}\n"
            f"The nearest is {results.choice.nearest}; `eckart promote NAME` takes any candidate to the gates"
        )
    return _recorded(results, results.named(chosen), {stage.name: stage.cached for stage in planned if stage.cached})


def _recorded(results: Results, candidate: CandidateResults, outcomes: Mapping[str, Outcome]) -> Recorded:
    name, task = candidate.name, results.task
    own = tuple(outcome for stage, outcome in outcomes.items() if candidate_of(stage) == name)
    read = [item for outcome in (outcomes["extract"], outcomes["teacher"], *own) for item in outcome.deps.items()]
    return Recorded(
        name=name,
        content=outcomes[stage_name("finetune", name)].outs[str(FINETUNED / name)],
        task=task,
        pairs=kind_of(task).answers_pairs and "text_pair" in columns_of("test"),
        test=outcomes[stage_name("evaluate", name)].deps[str(gates.TEST)],
        metric=candidate.recovered,
        dense=results.dense.score.metric,
        validation=results.measured[name],
        outcomes=own,
        inputs={path: md5 for path, md5 in read if path.startswith(("data/", "models/"))},
    )


def register(models: Registry, terms: Terms, candidate: Recorded, again: bool) -> str:
    """Give the candidate's version the alias `challenger`; create the version if it does not exist yet.

    Returns:
        The number of the version.

    Raises:
        Refused: the version was rolled back, and `again` is False.
    """
    experiment = mirror.experiment(models.client, terms.study)
    run = mirror.find(models.client, experiment, mirror.key_of(candidate.outcomes))
    same = models.with_content(candidate.content)
    version = next((other for other in same if _answers(other, candidate)), None)
    last = version or next(reversed(same), None)
    if last and versions.ROLLED_BACK in last.tags and not again:
        options = "--again" if models.champion() else "--first --again"
        raise Refused(
            f"{candidate.name} is version {last.version} of {models.name}, which was "
            f"rolled back at {last.tags[versions.ROLLED_BACK]}: `promote {options}` promotes it nevertheless"
        )
    if not version:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "saved"
            files, continuation = FINETUNED / candidate.name, terms.wanted.continuation
            exported = stage_name("export", candidate.name) in [outcome.stage for outcome in candidate.outcomes]
            onnx = ONNX / candidate.name if exported else None
            model_package.save(files, saved, candidate.task, candidate.pairs, terms.batch_size, continuation, onnx)
            lineage = {
                versions.ANSWERING: model_package.answering(candidate.task, candidate.pairs),
                "eckart.study": terms.study,
                "eckart.candidate": candidate.name,
                "eckart.run": run or "",
                "dvc.inputs": json.dumps(candidate.inputs),
                **mirror.trace(candidate.outcomes),
                **mirror.git(),
            }
            version = models.add(saved, candidate.name, candidate.content, experiment, run, lineage)
    number = str(version.version)
    models.client.set_registered_model_alias(models.name, versions.CHALLENGER, number)
    return number


def gate(
    models: Registry, terms: Terms, candidate: Recorded, version: str, champion: ModelVersion | None
) -> tuple[Gate, ...]:
    """Download the new version and the champion from the registry, score both, and return the result of each gate.

    Raises:
        Refused: a gate is not passed, the champion cannot be scored, or the new version answers wrongly when served.
    """
    name = f"{candidate.name} (version {version})"
    with tempfile.TemporaryDirectory() as folder:
        files = models.fetch(version, Path(folder) / "challenger")
        theirs = None
        if champion and champion.tags.get(versions.CONTENT) != candidate.content:  # with other settings, it has no gain
            place, label = models.fetch(str(champion.version), Path(folder) / "champion"), f"version {champion.version}"
            if champion.tags.get(_TEST) != candidate.test:
                label += ", which was tested on other examples and may have been trained on some of these"
            theirs = Champion(place, label)
        checked, answers = gates.measure(files, candidate, theirs, terms)
        if closed := [gate.refusal for gate in checked if not gate.passed]:
            raise Refused("\n  ".join([f"{name} is refused:", *closed]), checked)
        try:
            _smoke(files.parents[1], candidate.task, answers)
        except SmokeFailed as error:
            raise Refused(f"{name} cannot be served: {error}", checked) from error
    return tuple(checked)


def _smoke(version: Path, task: Task, expected: Sequence[Answers]) -> None:
    """Check that the served version gives the same answers as the model that was scored.

    (choice) Of the answers of tasks that generate text, more than half must be the same: rounding may decide between
    two equally likely tokens, and another token changes all later tokens.

    Args:
        version: folder of the version's files.
        expected: the answers of the scored model to `gates.questions`.
    """
    answers = ask(str(version), gates.questions(task))
    differing = [pair for pair in zip(answers, expected, strict=True) if not _same(*pair)]
    allowed = (len(expected) - 1) // 2 if kind_of(task).answers_may_differ else 0
    if len(differing) > allowed:
        raise SmokeFailed(f"it answers {answers}, but the scored model answers {list(expected)}")


def _same(answer: Mapping[str, Any], wanted: Answers) -> bool:
    """Whether an answer has all wanted columns with almost equal values; it may have further columns."""
    return all(_alike(answer[column], value) for column, value in wanted.items())


def _alike(answer: Any, wanted: Any) -> bool:
    """Whether two values are equal, or two numbers almost equal.

    (choice) A difference of a hundredth is allowed: with other padding, a loss in bfloat16 differs by some thousandths.
    """
    if isinstance(wanted, float) and isinstance(answer, float):
        return math.isclose(answer, wanted, rel_tol=1e-2, abs_tol=1e-2)
    if isinstance(wanted, list) and isinstance(answer, list):
        return len(answer) == len(wanted) and all(map(_alike, answer, wanted))
    return bool(answer == wanted)


def _write_down(
    models: Registry, terms: Terms, candidate: Recorded, version: str, checked: Sequence[Gate], decision: str
) -> None:
    """Store the gates and the decision with the version: in its tags for programs, in its description for people."""
    numbers = {
        "metric": terms.metric,
        "recorded": candidate.metric,
        "validation": candidate.validation.metric,
        "dense": candidate.dense,
        "target_parameters": candidate.validation.parameters,
        "keep": candidate.validation.keep,
        "speedup": candidate.validation.speedup,
    }
    tags = {
        versions.DECISION: decision,
        _TEST: candidate.test,
        "eckart.numbers": json.dumps(numbers),
        "eckart.gates": json.dumps([gate.plain for gate in checked]),
        "prefect.flow_run": str(flow_run.id),
    }
    models.mark(version, tags)
    table = prefect_artifacts.gate_table(checked)
    models.describe(version, f"**{candidate.name}**, {clock()}\n\n{decision}\n\n{table}")
