"""Data sets: sources, splits, labels, and batches of them."""
