"""Shaping: training that gives the dense weights a structure before they are factorized. One file each."""

from __future__ import annotations

from eckart.shaping.pruning import Pruning

Shaping = Pruning
