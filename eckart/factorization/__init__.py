"""Factorization: the weighted SVD, and its application to all targets of a model."""
