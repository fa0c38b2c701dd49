"""A run that is canceled on Prefect's page is ended, unless it has ended or a runner of Prefect does it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.states import Cancelling, Running, State

from flows.environment import canceled_runs

Answers = Callable[[Callable[[], State[Any]]], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return a function that sets what a server answers when it is asked for a run's state."""
    monkeypatch.setattr(canceled_runs, "_POLL", 0.01)
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)

    def answer(state: Callable[[], State[Any]]) -> None:
        client = MagicMock()
        client.__enter__.return_value.read_flow_run = lambda run: SimpleNamespace(state=state())
        monkeypatch.setattr(canceled_runs, "get_client", lambda **_: client)

    return answer


def test_it_is_ended_once_even_if_the_server_failed_before(answers: Answers) -> None:
    states = iter([Running(), httpx.ConnectError("gone"), httpx.ReadTimeout("slow"), Cancelling(), Cancelling()])

    def state() -> State[Any]:
        answer = next(states)
        if isinstance(answer, Exception):
            raise answer
        return answer

    answers(state)
    ends: list[str] = []
    with canceled_runs.watch(uuid4(), lambda: ends.append("ended")) as canceled:
        assert canceled.wait(60)
    assert ends == ["ended"]


def test_a_run_that_ended_while_the_server_was_asked_is_left_alone(answers: Answers) -> None:
    asked, over = threading.Event(), threading.Event()

    def state() -> State[Any]:
        asked.set()
        over.wait(60)
        return Cancelling()

    answers(state)
    before = set(threading.enumerate())
    with canceled_runs.watch(uuid4(), lambda: pytest.fail("ended after its end")) as canceled:
        assert asked.wait(60)
        (thread,) = set(threading.enumerate()) - before
    over.set()
    thread.join(60)
    assert not canceled.is_set()


def test_the_runner_ends_the_run_of_a_deployment(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    run: UUID = uuid4()
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(run))
    answers(Cancelling)
    before = set(threading.enumerate())
    with canceled_runs.watch(run, lambda: pytest.fail("two would end it")):
        assert set(threading.enumerate()) == before
