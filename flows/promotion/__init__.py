"""Promotion of the best candidate to the champion of the model registry."""
