"""Orchestration of a study: DVC decides which stages are stale, Prefect runs them, MLflow shows their results."""
