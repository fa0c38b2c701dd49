"""MLflow's model registry: the versions of a model, the files of a version, and the check that it can be served."""
