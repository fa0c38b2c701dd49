"""Scores: splits, bootstrap intervals, baselines, zero-shot tasks and generated samples."""
