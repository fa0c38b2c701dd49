"""The command line: `eckart COMMAND`."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from flows.engine.run_options import Options
from flows.environment import redaction, settings
from flows.workspace import installation
from tasks.artifacts.errors import EckartError
from tasks.artifacts.metrics import TaskKindName

if TYPE_CHECKING:
    import pandas as pd

    from flows.engine.stages import Outcome
    from flows.gc.kind import Kind
    from flows.workspace.reproduce import ComparedFile
    from tasks.config.promotion_limits import Gate
    from tasks.multi_seed.study_file import StudyFile


class _Commands(TyperGroup):
    """Every command ends with an error's message where the error has been put into words."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EckartError as error:
            sys.exit(redaction.shown(str(error)))  # it may quote what a library said of an address
        except OSError as error:
            if not error.filename:
                raise
            # A file that is gone, or cannot be read or written: a run makes it, or takes it from the cache.
            sys.exit(redaction.shown(f"{error}. Put that right, and run again: what is finished is kept"))


Workers = Annotated[int | None, typer.Option(min=1, help="stages side by side; default: what the cores hold")]
Timeout = Annotated[float | None, typer.Option(min=1, help="seconds a stage may take; default: no limit")]
TaskRunner = Annotated[Literal["threads", "dask"], typer.Option(help="dask: each stage in the workspace of a worker")]
Scheduler = Annotated[
    str | None, typer.Option(help="address of Dask's; default: workers on this machine, for this run alone")
]

app = typer.Typer(
    cls=_Commands, help="Low-rank compression studies.", no_args_is_help=True, pretty_exceptions_enable=False
)


_COLUMNS = re.compile(r"\S {3,}\S|──")  # in each line of a table


def _say_version(wanted: bool) -> None:
    if wanted:
        print(version("eckart"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="say it")] = False,
) -> None:
    """One command per thing to do."""
    settings.apply()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="new, or one of your own repositories")],
    base: Annotated[str | None, typer.Option(help="your model: a folder, a GGUF file, or an id of the hub")] = None,
    data: Annotated[Path | None, typer.Option(help="a file of rows, or a folder of files named by split")] = None,
    text: Annotated[str | None, typer.Option(help="the column of the text; default: text")] = None,
    text_pair: Annotated[str | None, typer.Option(help="the column of a second text")] = None,
    label: Annotated[str | None, typer.Option(help="the column of what is to be told; default: label")] = None,
    task: Annotated[
        TaskKindName | None, typer.Option(help="the kind of task; default: what the label looks like")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="amend the workspace that is there; nothing of it is lost")
    ] = False,
) -> None:
    """Lay a workspace: params.yaml, filled from your model and data, dvc.yaml, folders, git and DVC."""
    from flows.workspace import init as new_workspace
    from flows.workspace import worktrees  # slow imports, not for --help

    if base and ":" not in base and not Path(base).exists():
        print(f"There is no folder {base} here: the Hugging Face hub is asked for it.", flush=True)
    laid = new_workspace.init(folder, new_workspace.Wishes(base, data, text, text_pair, label, task), again)
    for line in new_workspace.in_words(laid, again):
        print(f"  {line}")
    if laid.head:
        print(laid.head)
    if again:
        print("The rest of params.yaml is as it was." if laid.changes else "Nothing of params.yaml has changed.")
        return
    said = "the rest of params.yaml is the default study's" if laid.changes else "params.yaml has the default study"
    if (root := worktrees.root_of(folder)) != folder.resolve():
        print(f"It is a folder of the git repository {root}: study, reproduce and gc want a repository of its own.")
    there = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"{folder} is a workspace; {said}. Next: {there}eckart run")


@app.command()
def run(
    workers: Workers = None,
    timeout: Timeout = None,
    task_runner: TaskRunner = "threads",
    scheduler: Scheduler = None,
    goals: Annotated[
        bool, typer.Option("--goals", help="then add keeps until study.goals are met as closely as can be told")
    ] = False,
) -> None:
    """Run the study that params.yaml describes; what is up to date is not run again."""
    options = Options(workers, timeout, task_runner, scheduler)
    settings.use_local_server()
    if goals:
        from flows.goal_search import pursue  # slow imports, not for --help

        pursue(lambda: _run(options), lambda line: print(line, flush=True))
    else:
        _run(options)


def _run(options: Options) -> None:
    start = time.monotonic()
    installation.refresh()
    from flows.display import terminal
    from flows.engine import (
        nothing_to_do,  # slow imports, not for --help
        torch_questions,
    )
    from flows.servers import prefect_server
    from flows.tracking import database

    with _ended_with_words(), terminal.terminal():
        terminal.doing("checking params.yaml")
        torch_questions.checked_params()  # before a server is started for the flow
        damage = database.set_aside_damaged()
        terminal.doing("finding what is up to date")
        told = prefect_server.require()  # a server that is there is told of the run in any case
        outcomes = None if told else nothing_to_do.outcomes()
        if outcomes is None:
            outcomes = _by_prefect(options)
    _print_comparison(nothing_to_do.COMPARISON)
    print(f"{len(outcomes)} stages in {time.monotonic() - start:.0f} s: {nothing_to_do.summary(outcomes)}")
    if damage:
        print(f"WARNING: {damage}.")
    print("Read reports/comparison.html; `eckart ui` shows the runs; the models are in models/finetuned/.")


def _print_comparison(file: Path) -> None:
    """Print tables and sentences; a terminal too narrow for a table gets its first columns."""
    console, text = Console(highlight=False), file.read_text()
    wide = [line for line in text.splitlines() if _COLUMNS.search(line) and len(line) > console.width]
    if not (console.is_terminal and wide):
        print(text)
        return
    for line in text.splitlines():
        console.print(Text(line[: console.width] if line in wide else line))
    print(f"\nThe tables are cut to the width of this terminal; {file} has all columns.\n")


def _by_prefect(options: Options) -> list[Outcome]:
    from flows.display import terminal
    from flows.engine.stage_processes import terminable  # slow imports, of no use where nothing is to be run
    from flows.servers import prefect_server
    from flows.study import study

    # A plain SIGTERM would leave the temporary server alone, which ends at a usual exit, after it was told all.
    terminal.log_above()
    terminal.doing("starting")
    with terminable():
        prefect_server.use_temporary()
        return study(**options.parameters())


@contextmanager
def _ended_with_words() -> Iterator[None]:
    """What ends a run says what is kept; Prefect's server that is gone ends the process."""
    import httpx  # a slow import, not for --help

    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted. What is finished is kept: run again to go on.", file=sys.stderr)
        raise
    except httpx.TransportError as error:
        cause = redaction.shown(str(error))
        print(f"Prefect's server is gone ({cause}). What is finished is kept: start it and run again.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # at a usual exit Prefect tries for minutes to deliver each of its events


@app.command()
def worker(
    scheduler: Annotated[str, typer.Argument(help="address of Dask's, such as tcp://10.0.0.1:8786")],
    stages: Annotated[int, typer.Option(min=1, help="side by side")] = 1,
) -> None:
    """Run stages here, in this clone, for the study that uses the scheduler, until that ends."""
    from flows.cluster import dask_runner
    from flows.cluster.dask_worker import work

    dask_runner.require()
    work(scheduler, stages)


@app.command()
def serve(
    cron: Annotated[str, typer.Option(help="when: minute, hour, day of month, month, day of week")] = "0 2 * * *",
    timezone: Annotated[str, typer.Option(help="of the schedule, such as Europe/Berlin")] = "UTC",
    name: Annotated[str, typer.Option(help="of the deployment")] = "nightly",
    workers: Workers = None,
    timeout: Timeout = None,
    task_runner: TaskRunner = "threads",
    scheduler: Scheduler = None,
    promote: Annotated[bool, typer.Option("--promote", help="then promote the best candidate")] = False,
    notify: Annotated[
        list[str] | None, typer.Option(help="a notification block of Prefect's, such as slack-webhook/team; repeatable")
    ] = None,
) -> None:
    """Run the study by a schedule on this machine, one run at a time, until Ctrl-C."""
    options = Options(workers, timeout, task_runner, scheduler)
    settings.use_local_server()
    from flows import schedule  # slow imports, not for --help
    from tasks.config import validation

    validation.check()
    schedule.serve(name, cron, timezone, options, promote, notify or ())


@app.command("notify")
def set_up_notifications(
    blocks: Annotated[
        list[str] | None, typer.Argument(help="of Prefect's, such as slack-webhook/team; none: tell nobody")
    ] = None,
    name: Annotated[str, typer.Option(help="of the deployment; prefect.yaml calls it pool")] = "pool",
    hours: Annotated[float, typer.Option(min=0.01, help="without a success, after which that is told")] = 26,
) -> None:
    """Have Prefect's server tell what comes of the runs of a deployment; `serve --notify` does it for its own."""
    settings.use_local_server()
    from flows.servers import (
        notifications,
        prefect_server,  # slow imports, not for --help
    )

    if not prefect_server.require():
        raise EckartError("there is no Prefect server to tell anything: set PREFECT_API_URL")
    notifications.set_up(name, blocks or (), timedelta(hours=hours))
    print(f"study/{name}: {', '.join(blocks or ['nobody'])} is told.")


@app.command("study")
def other_study(
    file: Annotated[Path | None, typer.Argument(help="of studies/: what differs from params.yaml")] = None,
    params: Annotated[Path | None, typer.Option(help="the same")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=2**32 - 1, help="instead of the file's; repeatable")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="of the file's tasks; repeatable; default: all")] = None,
    workers: Workers = None,
    timeout: Timeout = None,
    table: Annotated[Path | None, typer.Option(help="write the table to this .md, and its numbers beside it")] = None,
) -> None:
    """Run another study, each task and seed in a workspace of its own, and print mean and spread of every candidate."""
    if (path := file or params) is None or (file and params):
        raise EckartError("write one file of studies/: eckart study studies/NAME.yaml")
    if table and table.suffix != ".md":
        raise EckartError(f"--table {table}: write a name that ends with .md")
    from flows.workspace import seeds as other_studies  # slow imports, not for --help
    from tasks.multi_seed import seeds_table, study_file

    studies = study_file.load(path, seed or (), task or ())
    other_studies.check_committed(studies[0])
    ran, found, apart, failed = _run_tasks(studies, Options(workers, timeout))
    if studies[0].task and found:
        print(
            seeds_table.to_text(
                *seeds_table.combined(seeds_table.joined(found), {one.task: one.metric for one in studies})
            )
        )
    if table and not failed:
        command = _command(studies[0].path, seed or (), task or (), table)
        rows, text = seeds_table.page(ran, found, apart, table.stem, command)
        written = seeds_table.write(table, rows, seeds_table.joined(apart), text)
        print(f"Written to {', '.join(map(str, written))}.")
    if failed:
        causes = "".join(f"\n  {where}: {cause}" for where, cause in failed.items())
        what = "runs" if studies[0].task else "seeds"
        missing = f"\n{table} was not written, because {what} are missing." if table else ""
        count = sum(len(study.seeds) for study in studies)
        raise EckartError(f"{len(failed)} of {count} {what} failed; run again to resume them:{causes}{missing}")


def _run_tasks(
    studies: Sequence[StudyFile], options: Options
) -> tuple[list[StudyFile], dict[str | None, pd.DataFrame], dict[str | None, pd.DataFrame], dict[str, str]]:
    """Run each task and print its table; return the studies as they ran, rows, pairs, and causes of failures."""
    from flows.workspace import seeds as other_studies
    from tasks.multi_seed import seeds_table

    ran: list[StudyFile] = []
    found: dict[str | None, pd.DataFrame] = {}
    apart: dict[str | None, pd.DataFrame] = {}
    failed: dict[str, str] = {}
    for study in studies:
        chosen, causes = other_studies.run_all(study, options)
        ran.append(chosen)
        place = f"task {study.task}, " if study.task else ""
        failed |= {f"{place}seed {seed}": cause for seed, cause in causes.items()}
        finished = {seed: folder for seed, folder in other_studies.folders_of(study).items() if seed not in causes}
        if finished:
            found[study.task], apart[study.task] = seeds_table.collect(finished)
            print(seeds_table.to_text(*seeds_table.cells(found[study.task])), flush=True)
    return ran, found, apart, failed


@app.command()
def promote(
    candidate: Annotated[
        str | None, typer.Argument(help="such as kfac-0.5; none: the one that the report names")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="take it even if it was rolled back")] = False,
    first: Annotated[
        bool, typer.Option("--first", help="begin a registry that knows no champion, though this workspace has had one")
    ] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="go back to the version before")] = False,
) -> None:
    """Make a candidate of the study the champion of the model registry, if it passes the gates."""
    if rollback and (again or first or candidate):
        other = "--again" if again else "--first" if first else candidate
        raise EckartError(f"{other} and --rollback contradict each other: give one of them")
    if rollback:
        _roll_back()
        return
    settings.use_local_server()
    from flows.engine import stages
    from flows.engine.stage_processes import terminable
    from flows.promotion import flow
    from flows.promotion.gates import Refused
    from flows.servers import prefect_server  # slow imports, not for --help
    from tasks.config import validation

    validation.check()
    stages.check_workspace()
    prefect_server.require()
    try:
        with _ended_with_words(), terminable():
            prefect_server.use_temporary()
            conclusion = flow.promotion(again=again, first=first, candidate=candidate)
    except Refused as refusal:
        _print_gates(refusal.gates)
        raise
    _print_gates(conclusion.gates)
    print(conclusion.message)


def _roll_back() -> None:
    from flows.promotion import flow  # slow imports, not for --help

    print(flow.rollback())


def _print_gates(gates: Sequence[Gate]) -> None:
    if gates:
        table = Table("gate", "value", "limit", "")
        for gate in gates:
            table.add_row(*gate.row)
        Console().print(table)


def _command(file: Path, seeds: Sequence[int], tasks: Sequence[str], table: Path) -> str:
    """The command that makes the table again, in the root of any clone."""
    words = ["eckart study", str(file), *(f"--task {one}" for one in tasks)]
    words += [f"--seed {one}" for one in seeds]
    if table.resolve().is_relative_to(Path.cwd()):
        words.append(f"--table {table.resolve().relative_to(Path.cwd())}")
    return " ".join(words)


@app.command()
def export(
    candidate: Annotated[str, typer.Argument(help="of models/finetuned, or the path of any Hugging Face folder")],
    target: Annotated[Path, typer.Argument(help="what to write: FILE.onnx, or with --dense a folder")],
    int8: Annotated[bool, typer.Option("--int8", help="ONNX with weights in int8")] = False,
    dense: Annotated[bool, typer.Option("--dense", help="a plain Hugging Face folder, with merged factors")] = False,
) -> None:
    """Write a candidate as ONNX, once onnxruntime gives the answers that torch gives, or as a model for any tool."""
    if dense and int8:
        raise EckartError("--dense and --int8 contradict each other: give one of them")
    if dense:
        from tasks.exporting.merged_checkpoint import to_plain  # slow imports, not for --help

        print(to_plain(candidate, target))
        return
    from tasks.exporting.onnx import to_onnx

    print(to_onnx(candidate, target, int8))


@app.command()
def publish(
    candidate: Annotated[str, typer.Argument(help="such as kfac-0.33")],
    repository: Annotated[str, typer.Argument(help="of the Hugging Face hub: USER/NAME")],
    private: Annotated[bool, typer.Option("--private", help="where the repository is made")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would go, and send nothing")] = False,
) -> None:
    """Bring a candidate with its card to the Hugging Face hub."""
    from flows.hub import publish as hub  # a slow import, not for --help

    found = hub.publish(candidate, repository, private, dry_run)
    for path, file in found.files.items():
        print(f"{path}  {file.stat().st_size:,} bytes")
    done = f"are at {found.url}" if found.url else f"would go to {repository}"
    print(f"{len(found.files)} files, {found.bytes:,} bytes, {done}.")


@app.command()
def pin() -> None:
    """Write the hub's newest commits of base model and data into params.yaml."""
    from flows.hub import pin as hub  # a slow import, not for --help

    found = hub.pin()
    for one in found:
        change = "is the newest already" if one.now == one.before else f"was {one.before or 'null'}"
        print(f"{one.section}.revision: {one.now} of {one.name} {change}")
    if not found:
        print("model.base and data.source are not of the hub, or name a branch or tag: nothing to pin")


@app.command()
def push() -> None:
    """Copy to the DVC remote all that dvc.lock and the run cache name, and the inputs that are in DVC."""
    from flows.engine import (
        dvc_transport,  # slow imports, not for --help
        stages,
    )

    stages.check_workspace()
    if lacking := dvc_transport.push():
        raise EckartError(
            f"{len(lacking)} objects of earlier runs are neither in the cache nor in the remote; it has the rest."
        )
    print("The remote has all that dvc.lock and the run cache name.")


@app.command()
def pull() -> None:
    """Bring from the DVC remote what this workspace lacks; it runs nothing and leaves dvc.lock as it is."""
    from flows.engine import (
        dvc_transport,  # slow imports, not for --help
        stages,
    )

    stages.check_workspace()
    pulled = dvc_transport.pull()
    if pulled.stale:
        print(f"Not as dvc.lock records: {', '.join(pulled.stale)}. `eckart run` brings them up to date.")
    if pulled.lacking:
        raise EckartError(f"Neither the cache nor the remote has {', '.join(pulled.lacking)}; the rest is here.")
    if not pulled.stale:
        print("Everything is up to date.")


@app.command("reproduce")
def reproduce_candidate(
    candidate: Annotated[str, typer.Argument(help="such as kfac-0.33, or the name of any other stage")],
    rev: Annotated[str, typer.Option(help="git revision whose dvc.lock records it")] = "HEAD",
    again: Annotated[bool, typer.Option("--again", help="make it again even if the recorded bytes are there")] = False,
) -> None:
    """Get a candidate of any revision back, bit for bit: from cache or remote, or made again and compared."""
    from flows.workspace import reproduce  # a slow import, not for --help

    recorded = reproduce.record(candidate, rev)
    found = reproduce.reproduce(recorded, again)
    _print_files(found.files, f"{recorded.stage} at {recorded.commit[:10]}, {found.origin}")
    print(f"The files are in {found.folder}.")
    if not found.same:
        differing = ", ".join(file.path for file in found.files if not file.same)
        reasons = "\n".join(f"  {reason}" for reason in found.reasons)
        raise EckartError(f"Not the same bytes: {differing}. Likely reasons:\n{reasons}")
    print("All are the same, bit for bit.")


@app.command()
def verify(
    again: Annotated[int, typer.Option(min=0, help="stages of the last commit to make again and compare")] = 0,
) -> None:
    """Find entries of dvc.lock and of the run cache, here and in the remote, that no run wrote."""
    from flows.engine import stages
    from flows.engine import verify as module  # a slow import, not for --help

    stages.check_workspace()
    found = module.verify()
    print(f"{len(found.agree)} entries agree with what their stages recorded; {len(found.unrecorded)} have no record.")
    for place in found.damaged:
        print(f"{place} is damaged: remove it.")
    if found.doubtful:
        print("Entries of other inputs have the same outputs; of each group one may be false:")
        print("\n".join(sorted(f"  {entry.place}: {entry.stage}" for entry in found.doubtful)))
    if found.false:
        print("No run wrote these entries:")
        for what, where in found.false.items():
            print("\n".join([f"  {what}", *(f"    in {one.place}" for one in where)]))
    differing = failed = 0
    for recorded, made in module.sample(again, found) if again else ():
        if isinstance(made, str):
            failed += 1
            print(f"{recorded.stage} could not be made again: {made}", flush=True)
        elif made.same:
            print(f"{recorded.stage} was made again: the same bytes.", flush=True)
        else:
            differing += 1
            reasons = "; ".join(made.reasons)
            print(f"{recorded.stage} was made again, and has OTHER BYTES. Likely reasons: {reasons}", flush=True)
    if found.false or found.damaged or differing or failed:
        raise EckartError(
            f"{len(found.false)} entries are false, {len(found.damaged)} are damaged, {differing} stages differ, "
            f"{failed} could not be made again. Remove files of the run cache that are false or damaged; for an entry "
            "of dvc.lock: dvc repro --force --single-item STAGE; for all of it: git checkout dvc.lock"
        )


@app.command()
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="remove it; without, nothing is removed")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="remove nothing: the same as without --yes")] = False,
    runs: Annotated[int, typer.Option(min=1, help="of each study: the last that finished stay")] = 7,
    commits: Annotated[
        int | None,
        typer.Option(min=1, help="of those that changed dvc.lock: the last stay, besides tags; default: all"),
    ] = None,
    days: Annotated[float, typer.Option(min=0, help="that Prefect's records of runs stay")] = 30,
) -> None:
    """Show what fills the disk and nothing names any more, and with --yes remove it."""
    if yes and dry_run:
        raise EckartError("--yes and --dry-run contradict each other: give one of them")
    settings.use_local_server()
    from flows.gc import collect  # slow imports, not for --help

    with collect.found(runs, commits, days) as kinds:
        _print_kinds(kinds)
        for kind in kinds if yes else ():
            kind.remove()
    freed = f"{sum(kind.goes.bytes or 0 for kind in kinds):,} bytes"
    print(f"Removed, {freed}." if yes else f"Nothing was removed: with --yes what goes does, {freed}.")


def _print_kinds(kinds: Sequence[Kind]) -> None:
    right = [Column(name, justify="right") for name in ("stay", "bytes", "go", "bytes")]
    table = Table("", *right)
    for kind in kinds:
        sizes = (kind.stays, kind.goes)
        cells = [f"{one:,}" if one is not None else "–" for size in sizes for one in (size.count, size.bytes)]
        table.add_row(kind.name, *cells)
    Console().print(table)


def _print_files(files: Sequence[ComparedFile], title: str) -> None:
    table = Table(Column("file", overflow="fold"), "recorded", "now", "", title=title)
    for file in files:
        cells = [digest[:10] if digest else "–" for digest in (file.recorded, file.now)]
        table.add_row(file.path, *cells, "same" if file.same else "DIFFERS")
    Console().print(table)


@app.command()
def ui(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="of Prefect's; default: PREFECT_SERVER_API_PORT, or 4200")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="of MLflow's; default: MLFLOW_PORT, or 5000")
    ] = None,
) -> None:
    """Show where the pages of Prefect and MLflow are; until Ctrl-C serve those that are missing, on this machine."""
    from flows.servers.ui import show_pages

    show_pages(Console(), port, mlflow_port)
