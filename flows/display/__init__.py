"""Display of a study, while it runs and after it has ended."""
