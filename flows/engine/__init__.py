"""The engine: DVC decides what is stale, and a stage runs in a process of its own."""
