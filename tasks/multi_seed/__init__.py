"""Studies over several tasks and seeds, and their tables."""
