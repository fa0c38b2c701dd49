"""MLflow is told what DVC knows: a projection of it, which can be made again."""
