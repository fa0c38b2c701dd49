"""The process environment of a run: settings, redaction of secrets, runs that crashed."""
