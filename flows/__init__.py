"""Orchestration: DVC decides what is stale, Prefect runs it, MLflow mirrors it."""
