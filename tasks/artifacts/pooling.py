"""Names of poolings, as in eckart/calibration/embeddings.py, whose import loads torch."""

from typing import Literal

Pooling = Literal["mean", "cls", "max", "lasttoken"]
"""Way in which an embedding is made of the states of a text's tokens."""
