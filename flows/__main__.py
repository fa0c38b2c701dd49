"""The command line: `python -m flows run`, `python -m flows study FILE`, `python -m flows ui`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows import settings

app = typer.Typer(help="Low-rank compression studies.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """One command per thing to do."""


@app.command()
def run(
    workers: Annotated[
        int | None, typer.Option(min=1, help="stages side by side; default: what the cores hold")
    ] = None,
    timeout: Annotated[float | None, typer.Option(min=1, help="seconds a stage may take; default: no limit")] = None,
) -> None:
    """Run the study that params.yaml describes; what is up to date is not run again."""
    start = time.monotonic()
    settings.use_local_server()
    from flows import params  # slow imports, not for --help
    from flows.study import StudyFailed, study

    try:
        params.check(Path())  # before a server is started for the flow
        outcomes = study(workers=workers, timeout=timeout)
    except (params.ParamsError, StudyFailed) as error:
        sys.exit(str(error))
    counts = Counter(outcome.status for outcome in outcomes)
    print(Path("reports/comparison.txt").read_text())
    what = ", ".join(f"{count} {status.lower()}" for status, count in counts.items())
    print(f"{len(outcomes)} stages in {time.monotonic() - start:.0f} s: {what}")
    if counts["Cached"] == len(outcomes):
        print("Nothing was recomputed: everything is up to date.")
    print("Read reports/comparison.html; `make ui` shows the runs; the models are in models/finetuned/.")


@app.command("study")
def other_study(
    file: Annotated[Path, typer.Argument(help="a file of studies/: what differs from params.yaml")],
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=2**32 - 1, help="instead of the file's; repeatable")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="as of run")] = None,
    timeout: Annotated[float | None, typer.Option(min=1, help="as of run")] = None,
    table: Annotated[Path | None, typer.Option(help="write the table to this .md, and a .csv beside it")] = None,
) -> None:
    """Run another study, each of its seeds in a workspace of its own, and print mean and spread of every candidate."""
    if table and table.suffix != ".md":
        sys.exit(f"--table {table}: write a name that ends with .md")
    from flows import summary, workspaces  # slow imports, not for --help
    from tasks.params import ParamsError

    root = Path.cwd()
    try:
        study = workspaces.load(root, file, seed or ())
        workspaces.check_committed(root, study)
    except (ParamsError, workspaces.WorkspaceError) as error:
        sys.exit(str(error))
    failed = workspaces.run_all(root, study, workers, timeout)
    finished = {one: root / study.folder(one) for one in study.seeds if one not in failed}
    if finished:
        rows = summary.collect(finished)
        print(summary.to_text(rows))
        if table and not failed:
            command = _command(study.path, seed or (), table.resolve(), root)
            summary.write(table, rows, summary.to_markdown(rows, table.stem, command, study.params))
            print(f"Written to {table} and {table.with_suffix('.csv')}.")
    if failed:
        causes = "\n".join(f"  seed {one}: {cause}" for one, cause in failed.items())
        missing = f"\n{table} was not written, because seeds are missing." if table else ""
        sys.exit(f"{len(failed)} of {len(study.seeds)} seeds failed; run again to resume them:\n{causes}{missing}")


def _command(file: Path, seeds: Sequence[int], table: Path, root: Path) -> str:
    """The command that makes the table again, in the root of any clone."""
    words = ["python -m flows study", str(file), *(f"--seed {one}" for one in seeds)]
    if table.is_relative_to(root):
        words.append(f"--table {table.relative_to(root)}")
    return " ".join(words)


@app.command()
def ui() -> None:
    """Serve Prefect's and MLflow's pages on this machine alone, until Ctrl-C."""
    from flows.ui import serve

    serve(Console())


if __name__ == "__main__":
    app()
