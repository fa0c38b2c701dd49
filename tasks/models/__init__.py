"""Models of a study: the base model, its head and licence, loading and measuring."""
