"""Promotion: a candidate that passes all gates becomes the champion of the model registry."""
