"""Models of a study: load the base model with its head and license; load and measure the models that stages wrote."""
