"""The servers of Prefect and MLflow, who may reach them, and their notifications."""
