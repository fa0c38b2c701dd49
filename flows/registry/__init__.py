"""The model registry of MLflow: versions, what one is made of, and how it is asked."""
