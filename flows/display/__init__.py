"""Display of a study: its progress in the terminal, and its results on the run's page in Prefect."""
