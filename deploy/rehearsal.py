"""Rehearse a team's study on the services of services.py, cause failures on purpose, and print a table of results.

    python -m deploy.rehearsal              # a tiny study; some minutes
    python -m deploy.rehearsal --default    # the study of params.yaml

Run it in the repository after you have committed all changes, because each machine of the team is a clone. The table
has a row for each act of the rehearsal. The last line says how many acts did not end as they should.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from ruamel.yaml import YAML

from deploy import services
from deploy.services import Service, Team
from tests.workspace import tiny_workspace

_GONE = 60  # seconds for which the object store does not answer
_LOOK = 0.2
_MODEL = "rehearsed"
_ANYTHING = {"model": _MODEL, "largest_drop": 0.99, "keep": None, "least_speedup": None, "least_gain": -0.99}


@dataclass
class Machine:
    """A machine of the team: a clone of the repository with a DVC cache of its own."""

    root: Path
    environment: Mapping[str, str]

    def call(self, *words: str) -> None:
        """Run a command, and raise a RuntimeError if it fails."""
        code, output = self._begin(*words).end()
        if code:
            raise RuntimeError(f"{' '.join(words)}: {output}")

    def begin(self, *words: str) -> Running:
        """Start `eckart WORDS`, and return without waiting for its end."""
        return self._begin(sys.executable, "-m", "flows", *words)

    def eckart(self, *words: str) -> tuple[int, str]:
        """Run `eckart WORDS`, and return its exit code and output."""
        return self.begin(*words).end()

    def prefect(self, *words: str) -> tuple[int, str]:
        """Run `prefect WORDS`, and return its exit code and output."""
        return self._begin("prefect", *words).end()

    def _begin(self, *words: str) -> Running:
        descriptor, log = tempfile.mkstemp(suffix=".log")
        with open(descriptor, "w") as file:
            process = subprocess.Popen(words, cwd=self.root, env=self._all(), stdout=file, stderr=file)
        return Running(process, Path(log))

    def commit(self, message: str) -> None:
        self.call("git", "add", "-A")
        self.call("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", message)

    def service(self, words: Sequence[str], log: Path, **variables: str) -> Service:
        """Return a service for a command that runs until it is stopped; the caller must start it."""
        command = ["env", "-C", str(self.root), *words]
        return Service(" ".join(words), command, 0, {**self._all(), **variables}, log)

    def _all(self) -> dict[str, str]:
        scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": scripts} | dict(self.environment)


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str) -> re.Match[str] | None:
        """Wait until the output matches the pattern; return the match, or None if the command ends without a match."""
        while True:
            ended = self.process.poll() is not None
            if (match := re.search(pattern, self.output())) or ended:
                return match
            time.sleep(_LOOK)

    def end(self) -> tuple[int, str]:
        code = self.process.wait()
        output = self.output()
        self.log.unlink()
        return code, output


@dataclass
class Workers:
    """The Dask workers of the team. Each is a process `eckart worker` on a machine of its own."""

    scheduler: str
    machines: list[Machine]
    folder: Path
    running: dict[int, Service] = field(default_factory=dict)

    def start(self, number: int) -> None:
        words = [sys.executable, "-m", "flows", "worker", self.scheduler]
        self.running[number] = self.machines[number].service(words, self.folder / f"worker-{number}.log")
        self.running[number].start()

    def kill(self, number: int) -> None:
        self.running[number].send(signal.SIGKILL)
        self.running[number].stop()

    def stop(self) -> None:
        for worker in self.running.values():
            worker.stop()


class Rehearsal:
    """The rehearsal: its machines, and its acts, which run one after the other."""

    def __init__(self, team: Team, folder: Path, default: bool) -> None:
        self.team, self.folder = team, folder
        self.failures = 0
        self.flow = self._first(default)
        clones = [self._clone(f"worker-{number}") for number in range(3)]
        self.workers = Workers(team.scheduler, clones, folder)

    def _first(self, default: bool) -> Machine:
        """Set up the machine that runs flows: a clone of the last commit. Data and model are in the object store."""
        root = self.folder / "flow"
        subprocess.run(["git", "clone", "-q", ".", str(root)], check=True)
        machine = Machine(root, self.team.environment)
        machine.call("dvc", "remote", "modify", "storage", "url", "s3://eckart/dvc")
        if not default:
            tiny_workspace(root, promotion=_ANYTHING)
            for folder in ("data/raw", "models/base"):
                machine.call("git", "rm", "-rq", "--cached", folder)
                machine.call("dvc", "add", "-q", folder)
            machine.call("dvc", "push", "-q")
        machine.commit("As the team has it")
        return machine

    def _clone(self, name: str) -> Machine:
        subprocess.run(["git", "clone", "-q", str(self.flow.root), str(self.folder / name)], check=True)
        return Machine(self.folder / name, self.team.environment)

    def tell(self, act: str, began: float, as_it_should: bool, seen: str) -> None:
        self.failures += not as_it_should
        verdict = "ok" if as_it_should else "NOT AS IT SHOULD BE"
        print(f"| {act} | {verdict} | {time.monotonic() - began:.0f} s | {seen} |", flush=True)

    def play(self) -> None:
        print("| act | | took | seen |\n|---|---|---|---|", flush=True)
        for number in range(3):
            self.workers.start(number)
        try:
            self.study_and_a_killed_worker()
            self.promotions_at_once()
            self.second_machine()
            self.during_a_run("the store does not answer for a minute", self.stop_store)
            self.during_a_run("PostgreSQL is started again", self.team.database.restart)
            self.postgres_in_a_promotion()
            self.a_night()
        finally:
            self.workers.stop()

    def run(self) -> Running:
        return self.flow.begin("run", "--task-runner", "dask", "--scheduler", self.team.scheduler)

    def study_and_a_killed_worker(self) -> None:
        began, running = time.monotonic(), self.run()
        place = running.until(r"'([^' ]*@[^' ]*)' - runs in \S*/worker-(\d)")
        killed = ""
        if place:
            self.workers.kill(int(place[2]))
            killed = f"worker {place[2]} was killed in {place[1]}"
        code, output = running.end()
        if place:
            self.workers.start(int(place[2]))
        self.tell("a study on three workers, one killed", began, not code and bool(place), f"{killed}; {did(output)}")
        if code:
            raise RuntimeError(output[-3000:])
        self.flow.call("git", "add", "dvc.lock")
        self.flow.commit("All results")
        began = time.monotonic()
        code, output = self.flow.eckart("push")
        self.tell("`eckart push`", began, not code, cause(output))

    def promotions_at_once(self) -> None:
        began, other = time.monotonic(), self._clone("promoter")
        pulled, _ = other.eckart("pull")
        both = [machine.begin("promote") for machine in (self.flow, other)]
        codes, words = zip(*(running.end() for running in both), strict=True)
        last = [text.strip().splitlines()[-1] for text in words]
        champions = sum("is the champion now" in line for line in last)
        fine = not pulled and not any(codes) and champions == 1 and sum("already" in line for line in last) == 1
        self.tell("two machines promote at once", began, fine, " / ".join(last))

    def second_machine(self) -> None:
        began, second = time.monotonic(), self._clone("second")
        code, output = second.eckart("pull")
        self.tell("a second machine pulls", began, not code, output.strip().splitlines()[-1])
        began = time.monotonic()
        code, output = second.eckart("run")
        ran = set(re.findall(r"Task run '([^']*)' - Finished in state Executed", output))
        # `check` compares with the champion's data, so it runs again: before, there was no champion
        self.tell("and runs", began, not code and ran <= {"check"}, f"{summary(output)}: {', '.join(ran) or 'none'}")
        stages = YAML(typ="safe").load((self.flow.root / "dvc.lock").read_text())["stages"]
        candidate = next(name.partition("@")[2] for name in stages if name.startswith("finetune@"))
        for words in (["reproduce", candidate], ["reproduce", candidate, "--again"]):
            began = time.monotonic()
            code, output = second.eckart(*words)
            self.tell(f"`eckart {' '.join(words)}`", began, not code, output.strip().splitlines()[-1])

    def during_a_run(self, title: str, act: Callable[[], object]) -> None:
        """Call `act` while stages run, then check that the next run completes."""
        self.change()
        began, running = time.monotonic(), self.run()
        met = running.until(r"' - runs in \S*/worker-\d")
        act()
        code, output = running.end()
        self.tell(title, began, bool(met), f"exit code {code}; {summary(output) if not code else cause(output)}")
        began = time.monotonic()
        code, output = self.run().end()
        self.tell("the next run", began, not code, summary(output))

    def change(self) -> None:
        """Change the learning rate on all machines, so that fine-tuning and all stages after it must run again."""
        file, yaml = self.flow.root / "params.yaml", YAML()
        content = yaml.load(file.read_text())
        for name in content["study"]["recipes"]:
            content["recipes"][name]["recovery"]["learning_rate"] *= 1.01
        with file.open("w") as opened:
            yaml.dump(content, opened)
        self.flow.commit("Another learning rate")
        for worker in self.workers.machines:
            worker.call("git", "fetch", "-q")
            worker.call("git", "reset", "-q", "--hard", "@{upstream}")

    def stop_store(self) -> None:
        self.team.store.send(signal.SIGSTOP)
        time.sleep(_GONE)
        self.team.store.send(signal.SIGCONT)

    def postgres_in_a_promotion(self) -> None:
        began, before = time.monotonic(), self.champion()
        running = self.flow.begin("promote")
        met = running.until("goes through the gates")
        self.team.database.restart()
        code, output = running.end()
        seen = f"exit code {code}; {output.strip().splitlines()[-1]}; champion {before} → {self.champion()}"
        self.tell("PostgreSQL is started again in a promotion", began, bool(met) and self.champion() is not None, seen)
        began = time.monotonic()
        code, output = self.flow.eckart("promote")
        self.tell("the next promotion", began, not code, output.strip().splitlines()[-1])

    def a_night(self) -> None:
        """Change the learning rate, then run the study as a run of the deployment that `deploy/start flow` serves."""
        self.change()
        began, log = time.monotonic(), self.folder / "night.log"
        variables = {"ECKART_SCHEDULER": self.team.scheduler, "ECKART_WORKSPACE": str(self.flow.root)}
        flow = self.flow.service(["deploy/start", "flow"], log, **variables)
        flow.start()
        try:
            flow.wait_until(lambda: not self.flow.prefect("deployment", "inspect", "study/pool")[0])
            code, _ = self.flow.prefect("deployment", "run", "study/pool", "--watch")
        finally:
            flow.stop()
        self.tell("a night of `deploy/start flow`", began, not code, did(log.read_text()))

    def champion(self) -> str | None:
        places = self.team.environment
        client = MlflowClient(places["MLFLOW_TRACKING_URI"], places["MLFLOW_REGISTRY_URI"])
        with suppress(IndexError):
            return str(client.search_registered_models()[0].aliases.get("champion"))
        return None


def summary(output: str) -> str:
    lines = re.findall(r"^\d+ stages in .*$|Finished in state Completed\(.*\)$", output, re.MULTILINE)
    return lines[-1] if lines else cause(output)


def did(output: str) -> str:
    places = ", ".join(sorted(set(re.findall(r"Executed.* in \S*/(worker-\d)", output))))
    return f"{summary(output)}; stages ran on {places}"


def cause(output: str) -> str:
    return " ".join(output.strip().splitlines()[-4:])[-600:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default", action="store_true", help="the study of params.yaml")
    default = parser.parse_args().default
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="eckart-rehearsal-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with services.team(folder) as team:
            rehearsal = Rehearsal(team, folder, default)
            rehearsal.play()
    sys.exit(f"{rehearsal.failures} acts were not as they should be" if rehearsal.failures else 0)


if __name__ == "__main__":
    main()
