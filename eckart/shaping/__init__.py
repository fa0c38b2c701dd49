"""Shaping: trainings that give the dense weights a structure before they are factorized.

Each method of shaping has its own file.
"""

from __future__ import annotations

from eckart.shaping.pruning import Pruning

Shaping = Pruning
