"""Environment of a run: settings of the libraries, redaction of secrets, and marking of crashed runs."""
