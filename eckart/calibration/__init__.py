"""Calibration: batches, losses, and the statistics of one pass over them."""
