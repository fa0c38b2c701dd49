"""Checks of the data before any model is trained on them. The stage tasks/check.py runs them."""
