"""The servers of Prefect and MLflow: starting and finding them, protection of access, and notifications."""
