"""Score models on splits: metrics, bootstrap intervals, trivial baselines, zero-shot tasks and generated samples."""
