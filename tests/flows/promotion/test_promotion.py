"""Promotion from end to end: a finished tiny study, the command line, Prefect, and a registry in a database."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import State
from ruamel.yaml import YAML

import eckart
from flows import study as study_module
from flows.engine import nothing_to_do, stage_processes
from flows.engine import stages as engine
from flows.promotion import flow as promotion
from flows.promotion.gates import Refused
from flows.registry import champion_data
from flows.registry.smoke_test import SmokeFailed
from flows.registry.versions import Registry
from flows.servers import notifications
from flows.study import study as run_study
from tasks.artifacts.task_spec import REFERENCE, SPLITS
from tasks.artifacts.task_spec import REFERENCE_PARTS as PARTS
from tasks.report.choose_candidate import CHOICE, Chosen
from tests.flows import forked
from tests.flows.servers import pages, until
from tests.flows.toy import BARE, Study, call
from tests.workspace import a_task, tiny_params, write_params

MODEL = "tiny-reviews"
ANYTHING = {"model": MODEL, "largest_drop": 0.99, "keep": None, "least_speedup": None, "least_gain": -0.99}


@pytest.fixture(scope="module")
def finished(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both recipes were run; the study that params.yaml describes is svd's."""
    root = study.copied(tmp_path_factory.mktemp("finished") / "workspace")
    write_params(root, tiny_params(promotion=ANYTHING))
    choose(root, "svd")
    return root


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Path:
    """A copy that has promoted nothing yet."""
    return Path(shutil.copytree(finished, tmp_path / "workspace", symlinks=True))


def change(root: Path, section: str, **values: object) -> None:
    yaml = YAML(typ="safe")
    content = yaml.load((root / "params.yaml").read_text())
    content[section].update(values)
    with (root / "params.yaml").open("w") as file:
        yaml.dump(content, file)


def choose(root: Path, *recipes: str) -> None:
    """Make the study one of these recipes alone; kfac is exported."""
    change(root, "study", recipes=list(recipes))
    change(root, "export", recipes=[name for name in recipes if name == "kfac"])
    with chdir(root):
        planned = engine.plan()
        with stage_processes.reaping():
            for stage in planned:
                engine.run(stage, lambda command: stage_processes.run(command, root, print, {}))


def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'mlflow.db'}")


def aliases(root: Path) -> dict[str, str]:
    try:
        result = client(root).get_registered_model(MODEL).aliases
    except MlflowException:  # there is no database yet, or no model in it
        return {}
    return {alias: str(number) for alias, number in result.items()}


def versions(root: Path) -> list[ModelVersion]:
    return list(client(root).search_model_versions(f"name = '{MODEL}'"))


def entry(root: Path, stage: str) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load((root / "dvc.lock").read_text())["stages"][stage]
    return content


def promote(root: Path, prefect: dict[str, str], again: bool = False) -> str:
    """Run `eckart promote` in this process and return its message."""
    with chdir(root), temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
        return promotion.promotion(again).message


def scheduled(root: Path, prefect: dict[str, str]) -> State[Any]:
    """Return the state of a scheduled run that promotes."""
    with chdir(root), temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
        return run_study(promote=True, return_state=True)


def referred(root: Path) -> None:
    """The reference is what the champion learned from, for its own study alone, and with it the check is made again."""
    with chdir(root):
        champion_data.refresh("another", MODEL)
        assert not (REFERENCE / "train.parquet").exists()
        champion_data.refresh("tiny", MODEL)
        for part in PARTS:
            assert (REFERENCE / part).read_bytes() == (SPLITS / part).read_bytes()
        stages = [item.name for item in engine.plan() if not item.cached]
        assert "check" in stages
        shutil.rmtree(REFERENCE)
        champion_data.refresh("another", MODEL)
        assert all(item.cached for item in engine.plan())


def test_the_life_of_a_champion(workspace: Path, prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The promotion of the second is killed, a third is refused, and someone goes back by hand."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Registry, "smoke", lambda *_: None)  # the test of the quick start waits for its many seconds
    monkeypatch.setattr(promotion, "_smoke", lambda *_: None)
    assert promote(workspace, prefect) == f"svd-0.5 is the champion now: version 1 of {MODEL}"
    assert aliases(workspace) == {"champion": "1"}
    written(workspace)
    referred(workspace)

    choose(workspace, "kfac")
    process = forked.start(promote_and_hang, str(workspace), BARE | prefect)
    until(lambda: aliases(workspace)["champion"] == "2" or process.exitcode is not None)
    assert process.exitcode is None
    process.kill()
    process.join()
    assert str(scheduled(workspace, prefect).message).endswith(" kfac-0.5 is the champion already (version 2)")
    assert aliases(workspace) == {"champion": "2", "previous": "1"}
    (exported,) = (workspace / "mlruns").rglob("artifacts/onnx/int8.onnx")  # of version 2 alone
    assert exported.read_bytes() == (workspace / "models/onnx/kfac-0.5/int8.onnx").read_bytes()
    assert decision(workspace, "2").endswith(", in place of version 1.")

    choose(workspace, "svd")
    change(workspace, "promotion", least_gain=0.99)
    with pytest.raises(Refused, match=r"^svd-0\.5 \(version 1\) .*\n  .*\bversion 2\b.* 0\.99 [^\n]*$"):
        promote(workspace, prefect)
    assert aliases(workspace) == {"champion": "2", "previous": "1", "challenger": "1"}
    assert decision(workspace, "1").startswith("Refused: svd-0.5 (version 1)")
    page = pages(prefect, f"promotion-{MODEL}", "svd-0.5 (version 1)")[0]
    assert re.search(r"^\| gain over the champion .* at least 0\.99 ", page, re.MULTILINE)

    with chdir(workspace):
        assert f"Version 1 of {MODEL} is the champion again" in promotion.rollback()
    choose(workspace, "kfac")
    change(workspace, "promotion", least_gain=-0.99)
    with pytest.raises(Refused, match="`promote --again`"):
        promote(workspace, prefect)
    assert aliases(workspace)["champion"] == "1"
    assert promote(workspace, prefect, again=True).startswith("kfac-0.5 is the champion now: version 2")
    assert aliases(workspace) == {"champion": "2", "previous": "1"}
    assert len(versions(workspace)) == 2
    monkeypatch.setattr(eckart, "__version__", "another")  # so that the same files may answer otherwise
    assert promote(workspace, prefect).startswith("kfac-0.5 is the champion now: version 3")
    assert promote(workspace, prefect) == "kfac-0.5 is the champion already (version 3)"


def test_what_changes_during_a_run_is_the_next_one_s_and_told_to_nobody(
    workspace: Path, prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the study nothing is promoted; before a stage that is to run, that one fails."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    rows = workspace / "data/raw/reviews.csv"
    before = rows.read_bytes()

    def followed(module: Any, name: str, act: Callable[[], object]) -> None:
        """Have something else happen behind a function of a module, once."""
        whole = getattr(module, name)

        def both(*arguments: Any, **options: Any) -> Any:
            result = whole(*arguments, **options)
            monkeypatch.setattr(module, name, whole)
            act()
            return result

        monkeypatch.setattr(module, name, both)

    followed(study_module, "_run", lambda: rows.write_text(f"{rows.read_text()}a warm and clever film,positive\n"))
    late = scheduled(workspace, prefect)
    assert late.is_completed()
    assert "data/raw" in str(late.message)
    assert not versions(workspace)

    rows.write_bytes(before)
    change(workspace, "benchmark", repetitions=7)
    followed(nothing_to_do, "plan", lambda: change(workspace, "benchmark", repetitions=8))
    amid = scheduled(workspace, prefect)
    assert amid.is_completed()
    assert "benchmark.repetitions" in str(amid.message)
    assert not versions(workspace)
    assert late.name == amid.name
    assert late.name not in notifications._REPORTED + notifications._SUCCESSES


def decision(root: Path, number: str) -> str:
    return next(item.tags["eckart.decision"] for item in versions(root) if str(item.version) == number)


def promote_and_hang(root: str, environment: Mapping[str, str]) -> None:
    """Promote in a process of its own, in which the smoke test after the move of the alias never ends."""
    forked.become(root, environment, os.devnull)
    Registry.smoke = lambda *_: threading.Event().wait()  # type: ignore[assignment,method-assign,misc]
    promotion.promotion()


def written(root: Path) -> None:
    """The gates and the origin are on the version, for programs and for people."""
    (version,) = versions(root)
    tags = version.tags
    finetune, evaluate = entry(root, "finetune@svd-0.5"), entry(root, "evaluate@svd-0.5")
    assert tags["dvc.md5"] == finetune["outs"][0]["md5"]
    assert tags["eckart.test"] in {dep["md5"] for dep in evaluate["deps"]}
    inputs = json.loads(tags["dvc.inputs"])
    assert {"data/raw", "models/base", "models/teacher"} <= set(inputs)
    assert tags["eckart.test"] in inputs.values()
    assert tags[MLFLOW_GIT_COMMIT] == call(root, "git", "rev-parse", "HEAD").strip()
    assert tags["eckart.study"] == "tiny"
    assert len(tags["prefect.flow_run"]) == 36
    recorded = json.loads((root / "reports/evaluate/svd-0.5.json").read_text())["recovered"]["metric"]
    assert json.loads(tags["eckart.numbers"])["recorded"] == recorded
    gates = {gate["name"]: gate for gate in json.loads(tags["eckart.gates"])}
    assert set(gates) == {"files other than measured", "difference from the record", "drop from the original"}
    assert gates["difference from the record"]["value"] == 0.0
    assert tags["eckart.smoke"].startswith("passed")
    assert "| drop from the original " in version.description
    assert tags["eckart.decision"].startswith("Promoted at ")
    assert tags["eckart.decision"] in version.description


@pytest.mark.parametrize(
    ("wanted", "answer", "differing", "same"),
    [
        ({"label": "good"}, {"label": "good", "score": 0.9}, 8, True),
        ({"label": "good"}, {"label": "bad", "score": 0.9}, 1, False),
        ({"summary": "good"}, {"summary": "bad"}, 3, True),  # of summaries most must be the same
        ({"summary": "good"}, {"summary": "bad"}, 4, False),
        ({"value": 2.0}, {"value": 2.01}, 8, True),
        ({"value": 2.0}, {"value": 2.1}, 1, False),
        ({"loss": None}, {"loss": None, "continuation": "x"}, 8, True),
        ({"loss": None}, {"loss": 1.0, "continuation": "x"}, 1, False),
        ({"tags": ["O", None]}, {"tags": ["O", "O"]}, 1, False),
    ],
)
def test_what_is_served_must_say_what_was_scored(
    wanted: dict[str, Any], answer: dict[str, Any], differing: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.promotion.gates.questions", lambda _: None)
    monkeypatch.setattr("flows.promotion.flow.ask", lambda *_: [answer] * differing + [wanted] * (8 - differing))
    task = a_task("summarization" if "summary" in wanted else "classification", (), "accuracy")
    with nullcontext() if same else pytest.raises(SmokeFailed):
        promotion._smoke(Path(), task, [wanted] * 8)


def test_the_choice(workspace: Path) -> None:
    """The one that the report names; a named one whatever the limits say; else each with its number."""
    choose(workspace, "svd", "kfac")
    with chdir(workspace):
        assert promotion.choose().name == Chosen.model_validate_json(CHOICE.read_text()).candidate
        change(workspace, "promotion", keep=0.25)
        assert {promotion.choose(name).name for name in ("svd-0.5", "kfac-0.5")} == {"svd-0.5", "kfac-0.5"}
        with pytest.raises(Refused, match=r"svd-0\.4\b.*\bsvd-0\.5, kfac-0\.5$"):
            promotion.choose("svd-0.4")
        with pytest.raises(Refused) as refused:
            promotion.choose()
        for name in ("svd-0.5", "kfac-0.5"):
            limit = rf"^  {name}: .*parameter ratio .* 0\.[45]\d*\b.* 0\.25 "
            assert re.search(limit, str(refused.value), re.MULTILINE)
        change(workspace, "benchmark", repetitions=7)
        with pytest.raises(Refused, match=r"^\d .*`eckart run`"):  # it is not up to date
            promotion.choose()
