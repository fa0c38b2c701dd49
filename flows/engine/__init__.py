"""The engine that runs stages: DVC decides which stages are stale, and each stage runs in its own process."""
