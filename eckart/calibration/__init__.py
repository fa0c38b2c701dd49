"""Calibration: batches, losses of examples, and statistics that are gathered in a pass over the batches."""
