"""MLflow's model registry: versions, their packages, and how they answer."""
