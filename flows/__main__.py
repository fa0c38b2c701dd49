"""Entry point of `python -m flows COMMAND`, which does the same as `eckart COMMAND`."""

from flows.cli import app

app(prog_name="eckart")
