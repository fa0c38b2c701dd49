"""Preparation of text: windows for question answering, and alignment of words with tokens."""
