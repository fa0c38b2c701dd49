"""A projection of DVC's results to MLflow, which can be repeated."""
