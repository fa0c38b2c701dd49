"""`eckart COMMAND`, also as `python -m flows COMMAND`."""

from flows.cli import app

app(prog_name="eckart")
