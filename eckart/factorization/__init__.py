"""Factorization: the weighted SVD and what applies it to a whole model."""
