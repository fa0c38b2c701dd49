"""The study as a deployment: a real Prefect server, a real runner, and the tiny study of one candidate."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Crashed, Failed, Late, Pending, Running, Scheduled, State
from typer.testing import CliRunner

from flows import schedule
from flows.cli import app
from flows.engine.run_options import Options
from flows.environment import settings
from flows.servers import notifications
from flows.study import study as study_flow
from flows.workspace import deployment_owner
from tasks.artifacts.errors import EckartError
from tests.flows import forked
from tests.flows.forked import gone
from tests.flows.servers import free_port, sink, until
from tests.flows.toy import ENVIRONMENT, Study, begun, noted, noting
from tests.workspace import tiny_params, write_params

ELSEWHERE = ["workspace 1 elsewhere:/a"]
"""Tags of a deployment of another folder."""
NOTHING = {"least_speedup": 1e9}
"""A limit that no candidate meets: a promotion is refused at once."""
NAMED = {state: f"study/nightly: {state}" for state in ("Refused", "Failed", "Crashed", "Late")}


@pytest.fixture(scope="module")
def workspace(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of which another number of repetitions makes two stages stale; the benchmark takes notes."""
    root = study.copied(tmp_path_factory.mktemp("scheduled") / "workspace")
    noting(root / "tasks/benchmark.py", "benchmark")
    write_params(root, tiny_params(study={"recipes": ["svd"]}, promotion=NOTHING, benchmark={"repetitions": 7}))
    return root


@pytest.fixture(scope="module")
def served(
    workspace: Path, prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SyncPrefectClient]:
    """`eckart serve` in the workspace, with a server of its own; at the end Ctrl-C stops both."""
    port = free_port()
    places = {
        "PREFECT_HOME": str(prefect_home(tmp_path_factory.mktemp("scheduling"))),
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",  # seconds between two looks for a run
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
    }
    command = [sys.executable, "-m", "flows", "serve", "--cron", "0 2 1 1 *", "--workers", "2"]
    said = (workspace.parent / "said").open("w")
    process = subprocess.Popen(
        command,
        cwd=workspace,
        env=ENVIRONMENT | places,
        stdout=said,
        stderr=said,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores Ctrl-C
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: settings.answers(f"{address}/api/health"))
        own = (Path(places["PREFECT_HOME"]) / "eckart.key").read_text().strip()
        used = {PREFECT_API_URL: f"{address}/api", PREFECT_API_AUTH_STRING: own}
        with temporary_settings(used), get_client(sync_client=True) as client:
            until(client.read_deployments)
            yield client
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(600)
        said.close()
    assert not settings.answers(f"{address}/api/health")


@pytest.fixture(scope="module")
def told(served: SyncPrefectClient) -> Iterator[list[dict[str, str]]]:
    """The notifications of the deployments `nightly`, and `idle`, which has no runs."""
    with sink() as (address, taken):
        block(address)
        notifications.set_up("nightly", ["custom-webhook/sink"], timedelta(hours=26))
        notifications.set_up("idle", ["custom-webhook/sink"], timedelta(seconds=10))
        yield taken


def block(address: str) -> None:
    told = {"subject": "{{subject}}", "body": "{{body}}"}
    CustomWebhookNotificationBlock(name="sink", url=address, json_data=told).save("sink", overwrite=True)


def ended(client: SyncPrefectClient, run: UUID) -> FlowRun:
    def over() -> bool:
        state = client.read_flow_run(run).state
        return state is not None and state.is_final()

    until(over)
    return client.read_flow_run(run)


def began(run: FlowRun) -> datetime:
    assert run.start_time
    return run.start_time


def said(run: FlowRun) -> str | None:
    return run.state.message if run.state else None


def test_runs_come_one_after_the_other_and_do_what_changed(
    served: SyncPrefectClient, told: list[dict[str, str]], workspace: Path
) -> None:
    deployment = served.read_deployment_by_name("study/nightly")
    assert [str(entry.schedule.cron) for entry in deployment.schedules] == ["0 2 1 1 *"]  # type: ignore[union-attr]
    promoting = served.create_flow_run_from_deployment(deployment.id, parameters={"promote": True}).id
    event = {"event": schedule.CHANGED, "resource": {"prefect.resource.id": "eckart.nightly"}}
    event |= {"id": str(uuid4()), "occurred": datetime.now(UTC).isoformat()}
    served.request("POST", "/events", json=[event])  # starts a run, too
    soon = {"before_": datetime.now(UTC) + timedelta(minutes=10)}  # not the run of the schedule
    due = FlowRunFilter.model_validate({"deployment_id": {"any_": [deployment.id]}, "expected_start_time": soon})
    until(lambda: len(served.read_flow_runs(flow_run_filter=due)) == 2)
    first, second = sorted((ended(served, run.id) for run in served.read_flow_runs(flow_run_filter=due)), key=began)
    assert {first.state_name, second.state_name} == {"Completed", "Refused"}
    assert {first.state_type, second.state_type} == {StateType.COMPLETED}
    assert first.end_time
    assert first.end_time <= began(second)
    printed = (workspace.parent / "said").read_text()
    assert first.name in printed
    assert "at capacity" not in printed  # while the second waited
    assert str(said(first)).startswith("12 cached, 3 executed")
    assert "executed" not in str(said(second))
    refused = f"{NOTHING['least_speedup']:g}"  # the limit that no candidate meets
    assert [run.id for run in (first, second) if refused in str(said(run))] == [promoting]
    until(lambda: any(refused in item["body"] for item in told))
    page = f"{str(served.api_url).removesuffix('/').removesuffix('/api')}/runs/flow-run/{promoting}"
    assert any(item["body"].endswith(page) for item in told)
    assert {item["subject"] for item in told if "nightly" in item["subject"]} <= {NAMED["Refused"], NAMED["Late"]}

    comparisons = ArtifactFilter.model_validate({"key": {"any_": ["comparison-tiny"]}})
    tables = served.read_artifacts(artifact_filter=comparisons)
    assert {table.flow_run_id for table in tables} == {first.id, second.id}
    assert all("svd-0.5" in str(table.data) for table in tables)
    assert all("[svd-0.5](http://127.0.0.1:5000/#/experiments/" in str(table.description) for table in tables)


def test_a_canceled_run_and_its_stages_end(served: SyncPrefectClient, workspace: Path) -> None:
    write_params(workspace, tiny_params(study={"recipes": ["svd"]}, benchmark={"repetitions": 8}))
    (workspace / "ran.log").unlink(missing_ok=True)
    hold = workspace / "hold-benchmark"
    hold.touch()
    run = served.create_flow_run_from_deployment(served.read_deployment_by_name("study/nightly").id).id
    until(lambda: begun(workspace, "benchmark"))
    served.set_flow_run_state(run, Cancelling(), force=True)  # as Prefect's page does
    assert ended(served, run).state_type == StateType.CANCELLED
    assert gone([int((workspace / "pid-benchmark").read_text())])
    hold.unlink()
    assert noted(workspace) == ["benchmark begins"]


def test_a_page_of_another_origin_starts_no_run(served: SyncPrefectClient) -> None:
    """Neither does a user without the key, which no browser adds by itself."""
    deployment = served.read_deployment_by_name("study/nightly").id
    address = f"{str(served.api_url).rstrip('/')}/deployments/{deployment}/create_flow_run"
    before = served.count_flow_runs()
    own = httpx.BasicAuth(*str(PREFECT_API_AUTH_STRING.value()).split(":"))
    for headers, auth in (({"Origin": "http://evil.example"}, own), ({"Host": "evil.example"}, own), ({}, None)):
        answer = httpx.post(address, json={"state": {"type": "SCHEDULED"}}, headers=headers, auth=auth)
        assert answer.status_code == 403
        answer = httpx.get(address.removesuffix("/create_flow_run"), headers=headers, auth=auth)
        assert answer.status_code == (403 if auth else 401)
    assert served.count_flow_runs() == before


def test_a_failed_crashed_or_late_run_is_reported(served: SyncPrefectClient, told: list[dict[str, str]]) -> None:
    deployment = served.read_deployment_by_name("study/nightly")
    tomorrow = datetime.now(UTC) + timedelta(1)
    states: list[State] = [Failed(message="a typo"), Crashed(message="killed"), Late(scheduled_time=tomorrow)]
    for state in states:
        run = served.create_flow_run_from_deployment(deployment.id, state=Scheduled(scheduled_time=tomorrow))
        served.set_flow_run_state(run.id, state, force=True)
        wanted = NAMED[str(state.name)], f"{run.name}: {state.message}" if state.message else run.name
        until(lambda wanted=wanted: wanted in [(item["subject"], item["body"].split("\n")[0]) for item in told])  # type: ignore[misc]
        served.delete_flow_run(run.id)
    run = served.create_flow_run_from_deployment(deployment.id, state=Scheduled(scheduled_time=tomorrow))
    served.set_flow_run_state(run.id, Failed(message="too large\n" * 400), force=True)
    until(lambda: any(run.name in item["body"] for item in told))
    body = next(item["body"] for item in told if run.name in item["body"])
    assert len(body) < 2000  # as Discord demands
    assert body.endswith(f"/runs/flow-run/{run.id}")
    served.delete_flow_run(run.id)
    until(lambda: any("study/idle" in item["subject"] for item in told))  # which lacks successes


def test_a_deployment_that_somebody_deleted_is_made_again(served: SyncPrefectClient) -> None:
    before = served.read_deployment_by_name("study/nightly")
    time.sleep(3)  # `serve` looks each second, and must have seen it
    served.delete_deployment(before.id)

    def made_again() -> bool:
        with suppress(ObjectNotFound):
            return served.read_deployment_by_name("study/nightly").id != before.id
        return False

    until(made_again)
    after = served.read_deployment_by_name("study/nightly")
    assert (after.paused, after.schedules[0].schedule) == (False, before.schedules[0].schedule)


@pytest.mark.parametrize(
    ("cron", "hours"), [("0 2 * * *", 24), ("*/5 9-17 * * 1-5", 63 + 5 / 60), ("0 0 1 * *", 31 * 24)]
)
def test_a_success_is_missing_after_the_longest_gap_of_the_schedule(cron: str, hours: float) -> None:
    assert notifications.longest_gap(cron) - timedelta(hours=2) == timedelta(hours=hours)


@pytest.mark.parametrize(
    ("cron", "timezone", "due"),
    [
        ("0 4 * * *", "Europe/Berlin", datetime(2026, 3, 29, 2, tzinfo=UTC)),  # by the summer time that begins then
        ("0 2 * * 1", "America/New_York", datetime(2026, 3, 30, 6, tzinfo=UTC)),
    ],
)
def test_when_the_next_run_is_due(cron: str, timezone: str, due: datetime) -> None:
    assert schedule.next_run(cron, timezone, datetime(2026, 3, 28, 12, tzinfo=UTC)) == due


def test_serve_replaces_the_notifications(
    prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule.study, "serve", lambda **_: None)
    address = {PREFECT_API_URL: prefect["PREFECT_API_URL"]}
    with temporary_settings(address), get_client(sync_client=True) as client:
        block("http://127.0.0.1:9")

        def automations(*notify: str) -> list[str]:
            schedule.serve("unwatched", "0 2 * * 1", "UTC", Options(), notify=notify)
            return sorted(item.name for item in client.read_automations() if "unwatched" in item.name)

        told = automations("custom-webhook/sink")
        assert len(told) == 2
        assert f"PREFECT_API_URL={prefect['PREFECT_API_URL']} prefect " in capsys.readouterr().out
        assert automations("custom-webhook/sink", "custom-webhook/sink") == told
        assert automations() == []
        for wrong in ("custom-webhook/nobody", "nothing/sink", "sink"):
            with pytest.raises(notifications.NotificationError, match=wrong):
                automations(wrong)


@pytest.fixture
def at_server(
    prefect: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SyncPrefectClient, UUID]]:
    """A client and the flow `study`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    address = {PREFECT_API_URL: prefect["PREFECT_API_URL"]}
    with temporary_settings(address), get_client(sync_client=True) as client:
        yield client, client.create_flow_from_name("study")


@pytest.fixture
def elsewhere(at_server: tuple[SyncPrefectClient, UUID], tmp_path: Path) -> Iterator[tuple[SyncPrefectClient, UUID]]:
    """A client, in a folder in which nothing may run, and a deployment `taken` that another folder has made."""
    client, flow = at_server
    yield client, client.create_deployment(flow, "taken", tags=ELSEWHERE)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_another_folder_s_deployment_is_not_taken(elsewhere: tuple[SyncPrefectClient, UUID]) -> None:
    client, taken = elsewhere
    with pytest.raises(deployment_owner.OtherWorkspace, match=r"elsewhere:/a\b.*--name"):
        schedule.serve("taken", "0 3 * * *", "UTC", Options())
    existing = client.read_deployment(taken)
    assert (existing.schedules, existing.tags) == ([], ELSEWHERE)


@pytest.mark.parametrize("name", ["team/nightly", "50%", "a&b", ""])
def test_a_name_that_prefect_does_not_accept_is_refused(name: str) -> None:
    with pytest.raises(EckartError, match="--name"):
        deployment_owner.check_name(name)


def test_a_deployment_belongs_to_its_folder(
    prefect: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that changes its name keeps its deployment; a copy of the folder does not take it."""
    (first := tmp_path / "first").mkdir()
    monkeypatch.chdir(first)
    address = {PREFECT_API_URL: prefect["PREFECT_API_URL"]}
    with temporary_settings(address), get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("study")
        deployment_owner.check_name("ours")
        client.create_deployment(flow, "ours", tags=[deployment_owner.tag()])
        monkeypatch.setattr(deployment_owner, "gethostname", lambda: "another")
        deployment_owner.check_name("ours")
        monkeypatch.chdir(shutil.copytree(first, tmp_path / "second"))
        with pytest.raises(deployment_owner.OtherWorkspace, match=re.escape(str(first))):
            deployment_owner.check_name("ours")
        client.create_deployment(flow, "old")
        with pytest.raises(deployment_owner.OtherWorkspace, match="unknown folder"):
            deployment_owner.check_name("old")


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({}, "elsewhere:/a"),
        ({"root": "/elsewhere"}, "'root'"),  # Prefect lets a client submit these, but the run fails before it starts
        ({"scheduler": "/elsewhere"}, "'scheduler'"),
    ],
)
def test_a_run_of_another_folder_or_with_a_place_as_its_parameter_is_refused(
    elsewhere: tuple[SyncPrefectClient, UUID], parameters: dict[str, Any], named: str
) -> None:
    client, taken = elsewhere
    run = client.create_flow_run_from_deployment(taken, parameters=parameters)
    state = run_flow(study_flow, flow_run=run, parameters=run.parameters, return_type="state")
    assert state.is_failed()
    assert named in str(state.message)


@pytest.mark.parametrize(
    ("cron", "timezone", "named"),
    [
        ("61 2 * * *", "UTC", "^--cron '61 "),
        ("0 0 31 2 *", "UTC", "^--cron '0 0 31 2 "),
        ("0 0 2 * * *", "UTC", "^--cron '0 0 2 "),  # with seconds first, as other programs write it
        ("0 2 * * *", "Mars", "^--timezone Mars: "),
    ],
)
def test_an_invalid_schedule_is_refused(cron: str, timezone: str, named: str) -> None:
    with pytest.raises(schedule.ScheduleError, match=named):
        schedule.serve("nightly", cron, timezone, Options())


def test_a_signal_pauses_the_deployment_though_prefects_runner_does_not(
    at_server: tuple[SyncPrefectClient, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGTERM comes while the runner starts a run, the runner ends at once, and the run is never begun."""
    client, flow = at_server
    runs: list[UUID] = []

    def runner(name: str, tags: list[str], **_: Any) -> None:
        deployment = client.create_deployment(flow, name, tags=tags)
        states = (Pending(name="Submitting"), Running())
        runs.extend(client.create_flow_run_from_deployment(deployment, state=state).id for state in states)
        sys.exit(0)

    monkeypatch.setattr(schedule.study, "serve", runner)
    with pytest.raises(SystemExit):
        schedule.serve("ended", "0 2 * * *", "UTC", Options())
    assert client.read_deployment_by_name("study/ended").paused
    begun = [client.read_flow_run(run).state_type for run in runs]
    assert begun == [StateType.CANCELLED, StateType.RUNNING]


def test_a_deployment_that_another_folder_made_meanwhile_is_not_paused(
    at_server: tuple[SyncPrefectClient, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, flow = at_server

    def runner(name: str, tags: list[str], **_: Any) -> None:
        client.delete_deployment(client.create_deployment(flow, name, tags=tags))
        client.create_deployment(flow, name, tags=ELSEWHERE)

    monkeypatch.setattr(schedule.study, "serve", runner)
    schedule.serve("meanwhile", "0 2 * * *", "UTC", Options())
    assert not client.read_deployment_by_name("study/meanwhile").paused


def test_runs_end_before_the_server_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If SIGTERM ends Prefect's runner, which leaves them alone."""
    runs: list[SpawnProcess] = []
    alive_at_its_end: list[bool] = []

    @contextmanager
    def server() -> Iterator[str]:
        try:
            yield "http://127.0.0.1:1/api"
        finally:
            alive_at_its_end.append(runs[0].is_alive())

    def runner(**_: Any) -> None:
        runs.append(get_context("spawn").Process(target=time.sleep, args=(600,)))
        runs[0].start()
        sys.exit(0)

    monkeypatch.setattr(schedule, "prefect_server", server)
    monkeypatch.setattr(schedule.deployment_owner, "check_name", lambda _: None)
    monkeypatch.setattr(schedule.deployment_owner, "tag", lambda: "tag")
    monkeypatch.setattr(notifications, "set_up", lambda *_: None)
    monkeypatch.setattr(study_flow, "serve", runner)
    with pytest.raises(SystemExit):
        schedule.serve("nightly", "0 2 * * *", "UTC", Options())
    assert alive_at_its_end == [False]


@pytest.mark.parametrize("command", ["run", "serve"])
def test_an_unreachable_server_is_named(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params(tmp_path, tiny_params())
    monkeypatch.chdir(tmp_path)
    address = "http://me:topsecret@127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", address)
    with temporary_settings({PREFECT_API_URL: address}):
        done = CliRunner().invoke(app, [command])
    assert done.exit_code == 1
    assert "http://127.0.0.1:9/api" in done.output
    assert "topsecret" not in done.output


def hold(folder: Path) -> None:
    os.chdir(folder)
    with deployment_owner.held("nightly/x"):
        Path("holds").touch()
        threading.Event().wait()


def test_a_deployment_is_served_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first process to end would pause the schedule of the other."""
    first = forked.start(hold, tmp_path)
    until((tmp_path / "holds").exists)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EckartError, match=rf"\b{first.pid}\b.*--name"), deployment_owner.held("nightly/x"):
        pass
    with deployment_owner.held("another"):
        pass
    first.kill()
    first.join()
    with deployment_owner.held("nightly/x"):
        pass
