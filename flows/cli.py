"""The command line: `eckart COMMAND`."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from flows.engine.run_options import SEED_FOLDER, Options
from flows.environment import redaction, settings
from flows.workspace import installation
from tasks.artifacts.errors import EckartError
from tasks.artifacts.paths import COMPARISON_TEXT
from tasks.nlp_tasks import TaskName

if TYPE_CHECKING:
    from flows.engine.stages import Outcome
    from flows.engine.verify import Findings
    from flows.gc.kind import Kind
    from flows.workspace.reproduce import ComparedFile
    from tasks.report.choose_candidate import Gate


F = TypeVar("F", bound=Callable[..., None])
Panel = Literal["Make", "Look", "Ship", "Share", "Operate"]
"""A heading of `eckart --help`."""


class _Commands(TyperGroup):
    """The group of all commands. If a command fails with an expected error, only the error's message is printed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands panel by panel, so that `--help` reads in the order of the work."""
        commands: Mapping[str, Any] = self.commands
        panels = get_args(Panel)
        return sorted(super().list_commands(ctx), key=lambda name: panels.index(commands[name].rich_help_panel))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EckartError as error:
            # The message may quote the message of a library, which may contain a URL with a password.
            sys.exit(redaction.redact(str(error)))
        except OSError as error:
            if not error.filename:
                raise
            sys.exit(redaction.redact(f"{error}. Fix that and run again: finished stages are kept"))


Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Stages to run at the same time. Default: as many as the cores allow; 1 with a GPU."),
]
Timeout = Annotated[float | None, typer.Option(min=1, help="Stop a stage after this many seconds. Default: no limit.")]
TaskRunner = Annotated[
    Literal["threads", "dask"],
    typer.Option(help="Where stages run: threads = on this machine, dask = on the workers of a cluster."),
]
Scheduler = Annotated[str | None, typer.Option(help="Address of the Dask scheduler, for --task-runner dask.")]

app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="eckart COMMAND --help shows the options of a command, with examples.",
)


def _command(panel: Panel, *examples: str, name: str | None = None, **options: Any) -> Callable[[F], F]:
    """Return a decorator like `app.command`, which puts the command under a heading of `--help`.

    Args:
        examples: command lines, which the command's own help shows at its end.
        options: others of `app.command`.
    """
    epilog = "\n".join(["Examples:", *(f"  {example}" for example in examples)])

    def add(function: F) -> F:
        text = _LINE_BREAK.sub(" ", inspect.getdoc(function) or "")  # the terminal breaks lines by its own width
        return app.command(name, help=text, epilog=epilog, rich_help_panel=panel, **options)(function)

    return add


_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")  # inside a paragraph
_TABLE_LINE = re.compile(r"\S {3,}\S|──")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("eckart"))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make a transformer smaller and faster, compare candidates, and ship the best."""
    settings.apply()


@_command(
    "Make",
    "eckart init my-study --base ./my-model --data reviews.csv",
    "eckart init my-study --base google-bert/bert-base-uncased --data data/",
    "eckart init my-study --again --data new-reviews.csv",
)
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder, or a git repository of yours.")],
    base: Annotated[
        str | None, typer.Option(help="Your model: a folder, a GGUF file, or an id on the Hugging Face hub.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Your data: a file of examples, or a folder with a file for each split, such as train.csv."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Name of the text column. Default: text.")] = None,
    text_pair: Annotated[
        str | None, typer.Option(help="Name of the column with a second text, for pairs of texts.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Name of the label column. Default: label.")] = None,
    task: Annotated[TaskName | None, typer.Option(help="Kind of task. Default: guessed from the labels.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Update an existing workspace. No file in it is lost.")
    ] = False,
) -> None:
    """Make a workspace: a folder for a study of your model and data.

    It copies your model and data into the folder, fills in params.yaml from them, and sets up git and DVC. Without
    --base and --data, the workspace has the default study. It commits nothing.
    """
    from flows.workspace import init as new_workspace
    from flows.workspace import worktrees  # slow imports, not for --help

    if base and ":" not in base and not Path(base).exists():
        print(f"There is no folder {base} here; looking for it on the Hugging Face hub.", flush=True)
    options = new_workspace.InitOptions(base, data, text, text_pair, label, task)
    with _steps() as step:
        filled = new_workspace.init(folder, options, again, step)
    for path, value in filled.changes.items():
        before = f"{json.dumps(filled.before.get(path))} → " if again else ""
        print(f"  {path}: {before}{json.dumps(value)}")
    if filled.head:
        print(filled.head)
    if again:
        print("The rest of params.yaml is as it was." if filled.changes else "params.yaml is as it was.")
        return
    rest = "the rest of params.yaml is the default study's" if filled.changes else "params.yaml has the default study"
    if (root := worktrees.root_of(folder)) != folder.resolve():
        print(f"It is a folder of the git repository {root}: study, reproduce and gc need a repository of its own.")
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"{folder} is a workspace; {rest}. Nothing is committed.")
    print(f"Next: {enter}git add . && git commit -m 'new study' && eckart run")


@contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done: with a spinner in a terminal, else as a line each."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda words: print(f"{words} …", file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield lambda words: status.update(f"{escape(words)} …")


@_command("Make", "eckart run", "eckart run --goals", "eckart run --quiet --json > results.json")
def run(
    workers: Workers = None,
    timeout: Timeout = None,
    task_runner: TaskRunner = "threads",
    scheduler: Scheduler = None,
    goals: Annotated[
        bool,
        typer.Option(
            "--goals", help="Try more values of keep, until study.goals are met as closely as the data can show."
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and, with --json, the object.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object. All other lines go to stderr.")
    ] = False,
) -> None:
    """Run the study that params.yaml describes.

    Stages that are up to date are skipped, so an interrupted run continues where it stopped. Results are in
    reports/comparison.html, and the models in models/finetuned/.

    The object of --json has the keys that `eckart table --help` lists; also `stages` (the number of stages that were
    executed, restored and cached) and `seconds`.
    """
    options = Options(workers, timeout, task_runner, scheduler)
    start = time.monotonic()
    settings.use_local_server()
    ran: dict[str, Outcome] = {}
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        if goals:
            from flows.goal_search import pursue  # slow imports, not for --help

            pursue(lambda: _run(options, ran, quiet), lambda line: None if quiet else print(line, flush=True))
        else:
            _run(options, ran, quiet)
    from flows.engine import nothing_to_do

    outcomes, seconds = list(ran.values()), time.monotonic() - start
    if as_json:
        _print_json({"stages": Counter(outcome.status.lower() for outcome in outcomes), "seconds": round(seconds, 1)})
    elif not quiet:
        seed = os.environ.get(SEED_FOLDER)
        _print_comparison(COMPARISON_TEXT, seed)
        print(f"{len(outcomes)} stages in {seconds:.0f} s: {nothing_to_do.summary(outcomes)}")
        place = Path(seed or "")
        print(f"See {place / 'reports/comparison.html'}. `eckart ui` shows the runs.")
        print(f"The models are in {place / 'models/finetuned'}/.")


def _run(options: Options, ran: dict[str, Outcome], quiet: bool) -> None:
    """Run the study once, and note in `ran` the outcome of each stage; a stage that ran before stays Executed."""
    installation.refresh()
    from flows.display import terminal  # slow imports, not for --help
    from flows.engine import nothing_to_do, torch_questions
    from flows.servers import prefect_server
    from flows.tracking import database

    with _ended_with_words(), terminal.terminal(quiet):
        terminal.doing("checking params.yaml")
        torch_questions.checked_params()  # before a server is started for the flow
        damage = database.check()
        terminal.doing("finding what is up to date")
        # If there is a server, it should show every run, even one without stages to execute.
        outcomes = None if prefect_server.require() else nothing_to_do.outcomes()
        if outcomes is None:
            outcomes = _by_prefect(options)
    ran.update({new.stage: new for new in outcomes if new.status != "Cached" or new.stage not in ran})
    if damage:
        print(f"WARNING: {damage}.", file=sys.stderr)


@_command("Look", "eckart table", "eckart table --quiet", "eckart table --json > results.json")
def table(
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the name of the best candidate, for a script.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Print the results of the last complete run.

    The object of --json has these keys:

    study, metric, lower_is_better: name of the study, name of its metric, and whether a lower metric is better.

    original: the original model's metric on test examples, target_parameters, model_parameters, macs_per_token, bytes.

    control: the metric of the original model with the same fine-tuning.

    best: name of the candidate that `eckart promote` takes; null if none is within the limits of promotion.

    non_inferior: whether the test examples show that best loses at most promotion.largest_drop.

    alternative: the smallest non-inferior candidate that is small and fast enough, if it is not best; else null.

    candidates: a list of objects with name, recipe, keep, metric, before_fine_tuning (the metric then), from_original
    and from_control (low and high of the 95 % interval of the difference), the sizes as in original, speedup (median,
    low, high: over the original model in torch), exports (onnx and int8, each with metric, bytes, speedup, also over
    the original model in torch, and speedup_in_runtime, over its file for the same runtime; empty if nothing was
    exported) and files (paths of model, card, onnx, int8).

    goals: a list of objects with goal, recipe, met, candidate (it meets the goal, or comes nearest) and next_keep (null
    if no other keep is worth a try).

    files: paths of page, text, table and picture.
    """
    if quiet and as_json:
        raise EckartError("--quiet and --json contradict each other: give only one")
    from flows.display import study_json

    if note := study_json.note():
        print(note, file=sys.stderr)
    if as_json:
        _print_json({})
    elif not quiet:
        _print_comparison(study_json.require(study_json.REPORTS["text"]))
    elif name := study_json.best():
        print(name)
    else:
        raise EckartError(
            "no candidate is within the limits of promotion in params.yaml: `eckart table` names the nearest"
        )


def _print_json(more: Mapping[str, Any]) -> None:
    from flows.display.study_json import study_json

    print(json.dumps({**study_json(), **more}, indent=2))


def _print_comparison(file: Path, seed: str | None = None) -> None:
    """Print a file of tables and sentences; in a terminal, cut the lines of tables and wrap the others at its width.

    Args:
        seed: folder of a seed's workspace, if this is one. The advice in the file is left out then: whoever follows it
            is in another folder.
    """
    from tasks.artifacts.results_schema import NEXT  # pydantic: not for --help

    console, text = Console(highlight=False), file.read_text()
    if seed:
        text = "\n".join(line for line in text.splitlines() if not line.startswith(NEXT))
    if not console.is_terminal:
        print(text)
        return
    wide = [line for line in text.splitlines() if _TABLE_LINE.search(line) and len(line) > console.width]
    for line in text.splitlines():
        console.print(Text(line[: console.width] if line in wide else line))
    if wide:
        print(f"\nTables are cut to the width of this terminal; {Path(seed or '', file)} has all columns.")
    print()


def _by_prefect(options: Options) -> list[Outcome]:
    from flows.display import terminal
    from flows.engine.stage_processes import terminable  # slow imports, needed only if there is something to run
    from flows.servers import prefect_server
    from flows.study import study

    terminal.log_above()
    terminal.doing("starting")
    with terminable():  # a SIGTERM must also end the temporary server
        prefect_server.use_temporary()
        return study(**options.parameters())


@contextmanager
def _ended_with_words(then: str = "Finished stages are kept: run again") -> Iterator[None]:
    """If a signal or the loss of Prefect's server ends the block, print what to do then.

    If the server was lost, also end the process.
    """
    import httpx  # a slow import, not for --help

    try:
        yield
    except (KeyboardInterrupt, SystemExit) as ending:
        if not isinstance(ending, SystemExit) or ending.code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            print(f"Interrupted. {then} to continue.", file=sys.stderr)
        raise
    except httpx.TransportError as error:
        cause = redaction.redact(str(error))
        print(f"Prefect's server is gone ({cause}). {then}.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for minutes, because Prefect retries the delivery of each event


@_command(
    "Operate",
    "eckart serve",
    "eckart serve --cron '30 1 * * *' --promote --notify slack-webhook/team",
)
def serve(
    cron: Annotated[
        str, typer.Option(help="When to run: minute, hour, day of month, month, day of week.")
    ] = "0 2 * * *",
    timezone: Annotated[str, typer.Option(help="Time zone of --cron, such as Europe/Berlin.")] = "UTC",
    name: Annotated[str, typer.Option(help="Name of the deployment in Prefect.")] = "nightly",
    workers: Workers = None,
    timeout: Timeout = None,
    task_runner: TaskRunner = "threads",
    scheduler: Scheduler = None,
    promote: Annotated[
        bool, typer.Option("--promote", help="Promote the best candidate after each run, if it passes the gates.")
    ] = False,
    notify: Annotated[
        list[str] | None, typer.Option(help="Prefect notification block, such as slack-webhook/team. Repeatable.")
    ] = None,
) -> None:
    """Run the study on a schedule, one run at a time, until Ctrl-C."""
    options = Options(workers, timeout, task_runner, scheduler)
    from flows import schedule  # slow imports, not for --help
    from tasks.config import validation

    validation.check()
    schedule.serve(name, cron, timezone, options, promote, notify or ())


@_command(
    "Operate",
    "eckart notify slack-webhook/team",
    "eckart notify slack-webhook/team --name pool --hours 8",
    name="notify",
)
def set_up_notifications(
    blocks: Annotated[
        list[str] | None,
        typer.Argument(help="Prefect notification blocks, such as slack-webhook/team. None: notify nobody."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the deployment. prefect.yaml calls it pool.")] = "pool",
    hours: Annotated[
        float, typer.Option(min=0.01, max=8760, help="Hours without a successful run before a warning is sent.")
    ] = 26,
) -> None:
    """Send the results of scheduled runs to Slack, e-mail or others.

    Prefect's server sends them. For a schedule of `eckart serve`, use its option --notify.
    """
    settings.use_local_server()
    from flows.servers import notifications, prefect_server  # slow imports, not for --help

    if not prefect_server.require():
        raise EckartError("there is no Prefect server to send notifications: set PREFECT_API_URL")
    notifications.set_up(name, blocks or (), timedelta(hours=hours))
    print(f"study/{name} notifies {', '.join(blocks or ['nobody'])}.")


@_command("Operate", "eckart worker tcp://10.0.0.1:8786", "eckart worker tcp://10.0.0.1:8786 --stages 2")
def worker(
    scheduler: Annotated[str, typer.Argument(help="Address of the Dask scheduler, such as tcp://10.0.0.1:8786.")],
    stages: Annotated[int, typer.Option(min=1, help="Stages to run at the same time.")] = 1,
) -> None:
    """Run stages here for a study on a Dask cluster."""
    from flows.cluster import dask_runner
    from flows.cluster.dask_worker import work

    dask_runner.require()
    work(scheduler, stages)


@_command(
    "Make",
    "eckart study studies/fair.yaml",
    "eckart study studies/fair.yaml --seed 0 --seed 1 --table fair.md",
    name="study",
)
def other_study(
    file: Annotated[Path, typer.Argument(help="A file of studies/ with the values that differ from params.yaml.")],
    seed: Annotated[
        list[int] | None,
        typer.Option(min=0, max=2**32 - 1, help="Seed to run, instead of those in the file. Repeatable."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Task of the file to run. Repeatable. Default: all of them.")
    ] = None,
    workers: Workers = None,
    timeout: Timeout = None,
    table: Annotated[
        Path | None, typer.Option(help="Write the table to this .md file, and its numbers to .csv files next to it.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Draw the figures of study.figures into this folder, as means over the seeds.")
    ] = None,
) -> None:
    """Run a study with several seeds, and print mean and spread.

    Each task and seed runs in a workspace of its own, a git worktree in workspaces/. All share the cache.
    """
    if table and table.suffix != ".md":
        raise EckartError(f"--table {table}: write a name that ends with .md")
    from flows import multi_seed  # slow imports, not for --help
    from tasks.multi_seed import seeds_table, study_file

    studies = study_file.load(file, seed or (), task or ())
    if figures and not all(study.params["study"]["figures"] for study in studies):
        raise EckartError(
            f"--figures {figures}: add `figures: {{results, weights}}` to `study` in {file}, or one of them"
        )
    multi_seed.check_committed(studies[0])
    with ExitStack() as held:
        ran, results, pairs, failed = multi_seed.run_tasks(studies, Options(workers, timeout), held)
        if studies[0].task and results:
            metrics = {study.task: study.metric for study in studies}
            print(seeds_table.to_text(seeds_table.combined(seeds_table.joined(results), metrics)))
        if table and not failed:
            command = multi_seed.same_command(studies[0].path, seed or (), task or (), table)
            rows, text = seeds_table.page(ran, results, pairs, table.stem, command)
            written = seeds_table.write(table, rows, seeds_table.joined(pairs), text)
            print(f"Written to {', '.join(map(str, written))}.")
        if figures and not failed:
            multi_seed.draw(figures, ran, results)
    if failed:
        causes = "".join(f"\n  {where}: {cause}" for where, cause in failed.items())
        unit = "runs" if studies[0].task else "seeds"
        missing = f"\n{table} was not written, because {unit} are missing." if table else ""
        count = sum(len(study.seeds) for study in studies)
        raise EckartError(f"{len(failed)} of {count} {unit} failed; run again to resume them:{causes}{missing}")


@_command("Ship", "eckart promote", "eckart promote anchored-0.33", "eckart promote --rollback")
def promote(
    candidate: Annotated[
        str | None,
        typer.Argument(help="A candidate, such as anchored-0.33. Default: the best one, which the report names."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Promote it even if it was rolled back before.")] = False,
    first: Annotated[
        bool,
        typer.Option("--first", help="Accept a registry without a champion, although this workspace had one before."),
    ] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Make the previous version the champion again.")] = False,
) -> None:
    """Make a candidate the champion, if it passes the gates.

    The champion is the version of the model registry that services load. The gates compare the candidate's quality,
    size and speed with the limits of promotion in params.yaml and with the present champion. If it fails a gate, the
    champion stays.
    """
    if rollback and (again or first or candidate):
        other = "--again" if again else "--first" if first else candidate
        raise EckartError(f"{other} and --rollback contradict each other: give only one")
    if rollback:
        from flows.promotion import flow

        print(flow.rollback())
        return
    settings.use_local_server()
    from flows.display import terminal
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
        with _ended_with_words("Promote again"), terminable(), terminal.own_lines():
            prefect_server.use_temporary()
            result = flow.promotion(again=again, first=first, candidate=candidate)
    except Refused as refusal:
        _print_gates(refusal.gates)
        raise
    _print_gates(result.gates)
    print(result.message)


def _print_gates(gates: Sequence[Gate]) -> None:
    if gates:
        table = Table("gate", "value", "limit", "")
        for gate in gates:
            table.add_row(*gate.row)
        Console().print(table)


@_command(
    "Ship",
    "eckart export anchored-0.33 model.onnx --int8",
    "eckart export ./any-hugging-face-folder model.onnx",
    "eckart export anchored-0.33 anchored-onnx/",
    "eckart export anchored-0.33 plain-model/ --dense",
)
def export(
    candidate: Annotated[
        str, typer.Argument(help="A candidate, such as anchored-0.33, or the path of any Hugging Face folder.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            help="File to write, such as model.onnx. A folder gets an ONNX file in float32, one in int8, config and "
            "tokenizer; with --dense a plain model."
        ),
    ],
    int8: Annotated[bool, typer.Option("--int8", help="Store the weights of the file in int8.")] = False,
    dense: Annotated[
        bool, typer.Option("--dense", help="Write a plain Hugging Face folder with the factors multiplied out.")
    ] = False,
) -> None:
    """Write a candidate as ONNX or as a plain Hugging Face model.

    The answers of the ONNX file are checked against those in torch.
    """
    if dense and int8:
        raise EckartError("--dense and --int8 contradict each other: give only one")
    _refuse_old(candidate)
    if dense:
        from tasks.exporting.merged_checkpoint import to_plain  # slow imports, not for --help

        print(to_plain(candidate, target))
        return
    from tasks.exporting.onnx import to_onnx, to_onnx_folder

    is_file = int8 or target.suffix == ".onnx"
    print(to_onnx(candidate, target, int8) if is_file else to_onnx_folder(candidate, target))


def _refuse_old(candidate: str) -> None:
    """Raise if the workspace has a model of this name that its study does not make, or not like this."""
    from tasks.artifacts.paths import FINETUNED  # slow imports, not for --help

    is_path = len(Path(candidate).parts) > 1  # of a folder to export as it is
    if is_path or not (FINETUNED / candidate).is_dir() or not Path("dvc.yaml").exists():
        return
    from flows.engine import nothing_to_do

    try:
        nothing_to_do.plan_with(candidate)
    except EckartError as error:
        raise EckartError(f"{error}. To export the folder as it is, name {FINETUNED / candidate}") from error


@_command(
    "Ship", "eckart publish anchored-0.33 me/my-model --dry-run", "eckart publish anchored-0.33 me/my-model --private"
)
def publish(
    candidate: Annotated[str, typer.Argument(help="A candidate, such as anchored-0.33.")],
    repository: Annotated[str, typer.Argument(help="Repository on the Hugging Face hub: USER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and send nothing.")] = False,
) -> None:
    """Upload a candidate with its model card to the Hugging Face hub."""
    from flows.hub import publish as hub  # a slow import, not for --help

    published = hub.publish(candidate, repository, private, dry_run)
    sizes = {path: file.stat().st_size for path, file in published.files.items()}
    for path, size in sizes.items():
        print(f"{path}  {size:,} bytes")
    for path in published.removed:
        print(f"{path}  removed: weights that this candidate does not have")
    place = f"are at {published.url}" if published.url else f"would go to {repository}"
    print(f"{len(sizes)} files, {sum(sizes.values()):,} bytes, {place}.")


@_command("Make", "eckart params", "eckart params recipes.kfac", name="params")
def show_params(
    part: Annotated[str, typer.Argument(help="Dotted name, such as recipes.kfac. Default: all.")] = "",
) -> None:
    """Print all parameters with their defaults and meanings."""
    from tasks.config import params_file, reference, validation  # slow imports, not for --help
    from tasks.config.resolved import resolve

    validation.check()
    print(reference.text(resolve(params_file.read()), part), end="")


@_command("Operate", "eckart pin", name="pin")
def pin_inputs() -> None:
    """Pin base model and data to their newest commits on the hub."""
    from flows.hub import pin as hub  # a slow import, not for --help

    pins = hub.pin()
    for pin in pins:
        change = "already the newest" if pin.now == pin.before else f"was {pin.before or 'null'}"
        print(f"{pin.section}.revision: {pin.now} of {pin.name}, {change}")
    if not pins:
        print("Nothing to pin: base model, data and texts are not on the hub, or name a branch or tag.")


@_command(
    "Ship",
    "eckart with lm_eval --model hf --model_args pretrained=models/finetuned/narrowed-0.6 --tasks lambada_openai",
    "eckart with transformers serve models/finetuned/narrowed-0.6",
    "eckart with python score.py",
    name="with",
    context_settings={"allow_interspersed_args": False},
)
def with_program(
    words: Annotated[list[str], typer.Argument(help="A program and its arguments.", metavar="PROGRAM")],
) -> None:
    """Run another program that can load compressed models.

    The program and the Python processes that it starts import eckart as soon as they import transformers.
    """
    from eckart_command import run_with

    run_with(words)


@_command("Share", "eckart push")
def push() -> None:
    """Upload models, data and results to the DVC remote."""
    from flows.engine import dvc_transport, stages  # slow imports, not for --help

    stages.check_workspace()
    if lacking := dvc_transport.push():
        raise EckartError(
            f"{len(lacking)} objects of earlier runs are neither in the cache nor in the remote, which has the rest."
        )
    print("The remote has all that dvc.lock and the run cache name.")


@_command("Share", "git pull && eckart pull")
def pull() -> None:
    """Download the files that are missing here from the DVC remote."""
    from flows.engine import dvc_transport, stages  # slow imports, not for --help

    stages.check_workspace()
    pulled = dvc_transport.pull()
    if edited := [name for name in pulled.stale if name.endswith(".dvc")]:
        print(f"Your files differ from {', '.join(edited)}: to get the recorded ones, move yours away and pull again.")
    if stale := [name for name in pulled.stale if name not in edited]:
        print(f"Differs from dvc.lock: {', '.join(stale)}. `eckart run` brings them up to date.")
    if pulled.lacking:
        raise EckartError(f"Neither the cache nor the remote has {', '.join(pulled.lacking)}; all else is here.")
    if not pulled.stale:
        print("Everything is up to date.")


@_command(
    "Share",
    "eckart reproduce anchored-0.33",
    "eckart reproduce anchored-0.33 --rev v1.0",
    "eckart reproduce anchored-0.33 --again",
    name="reproduce",
)
def reproduce_candidate(
    candidate: Annotated[str, typer.Argument(help="A candidate, such as anchored-0.33, or the name of any stage.")],
    rev: Annotated[str, typer.Option(help="Git revision whose dvc.lock records it.")] = "HEAD",
    again: Annotated[
        bool, typer.Option("--again", help="Run the stages again even if the recorded files are in the cache.")
    ] = False,
) -> None:
    """Restore a candidate of any git revision, bit for bit.

    Its files come from the cache or the DVC remote, or from running its stages again, in a workspace of its own.
    """
    from flows.workspace import reproduce  # a slow import, not for --help

    recorded = reproduce.record(candidate, rev)
    reproduction = reproduce.reproduce(recorded, again)
    _print_files(reproduction.files, f"{recorded.stage} at {recorded.commit[:10]}, {reproduction.origin}")
    print(f"The files are in {reproduction.folder}.")
    if not reproduction.same:
        differing = ", ".join(file.path for file in reproduction.files if not file.same)
        raise EckartError(
            f"These files differ from the record: {differing}. `git -C {reproduction.folder} diff dvc.lock` shows "
            "which stages read or wrote other bytes. Likely reasons: other data or base models, other packages than "
            "requirements.lock of that revision, another kind of CPU, or another build of torch: float sums may differ "
            "in their last bits."
        )
    print("All files are the same, bit for bit.")


@_command("Share", "eckart verify")
def verify() -> None:
    """Check that a run has written each entry of dvc.lock.

    It also checks the entries of the run cache, here and in the DVC remote.
    """
    from flows.engine import stages
    from flows.engine import verify as module  # a slow import, not for --help

    stages.check_workspace()
    findings = module.verify()
    _print_findings(findings)
    if findings.false or findings.damaged:
        raise EckartError(
            f"{len(findings.false)} entries are false, {len(findings.damaged)} are damaged. Remove files of the run "
            "cache that are false or damaged; for an entry of dvc.lock: dvc repro --force --single-item STAGE; for all "
            "of it: git checkout dvc.lock"
        )


def _print_findings(findings: Findings) -> None:
    agree, unrecorded = len(findings.agree), len(findings.unrecorded)
    print(f"{agree} entries agree with what their stages recorded; {unrecorded} have no record.")
    for place in findings.damaged:
        print(f"{place} is damaged: remove it.")
    if findings.doubtful:
        print("These entries have the same outputs as others with different inputs; one of each group may be false:")
        print("\n".join(sorted(f"  {entry.place}: {entry.stage}" for entry in findings.doubtful)))
    if findings.false:
        print("No run wrote these entries:")
        for difference, entries in findings.false.items():
            print("\n".join([f"  {difference}", *(f"    in {entry.place}" for entry in entries)]))


@_command("Operate", "eckart gc", "eckart gc --runs 14 --commits 10 --yes")
def gc(
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove what is listed. Without this option, nothing is removed.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="Finished runs of each study to keep.")] = 7,
    commits: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep results of the last N commits that changed dvc.lock, and of tags and branches. Default: of all.",
        ),
    ] = None,
) -> None:
    """List files and runs that nothing uses; --yes removes them."""
    settings.use_local_server()
    from flows.gc import collect  # slow imports, not for --help

    with collect.kinds(runs, commits) as kinds:
        _print_kinds(kinds)
        for kind in kinds if yes else ():
            kind.remove()
    freed = f"{sum(kind.goes.bytes or 0 for kind in kinds):,} bytes"
    print(f"Removed {freed}." if yes else f"Nothing was removed. --yes removes {freed}.")


def _print_kinds(kinds: Sequence[Kind]) -> None:
    right = [Column(name, justify="right") for name in ("stay", "bytes", "go", "bytes")]
    table = Table("", *right)
    for kind in kinds:
        sizes = (kind.stays, kind.goes)
        numbers = [number for size in sizes for number in (size.count, size.bytes)]
        cells = ["–" if number is None else f"{number:,}" for number in numbers]
        table.add_row(kind.name, *cells)
    Console().print(table)


def _print_files(files: Sequence[ComparedFile], title: str) -> None:
    table = Table(Column("file", overflow="fold"), "recorded", "now", "", title=title)
    for file in files:
        cells = [digest[:10] if digest else "–" for digest in (file.recorded, file.now)]
        table.add_row(file.path, *cells, "same" if file.same else "DIFFERS")
    Console().print(table)


@_command("Look", "eckart ui", "eckart ui --port 4201 --mlflow-port 5001")
def ui(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of Prefect's page. Default: PREFECT_SERVER_API_PORT, or 4200."),
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of MLflow's page. Default: MLFLOW_PORT, or 5000.")
    ] = None,
) -> None:
    """Show all runs on the web pages of Prefect and MLflow.

    Missing servers are started, and run until Ctrl-C. Only this machine can open the pages.
    """
    from flows.servers.ui import show_pages

    show_pages(Console(), port, mlflow_port)
