"""`python -m flows COMMAND`."""

from flows.cli import app

app()
