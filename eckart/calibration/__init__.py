"""Calibration: the user's batches, the losses of their examples, and statistics gathered in a pass over the batches."""
