"""Logging to MLflow of the results that are in DVC. It can be repeated at any time."""
