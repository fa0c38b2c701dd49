"""Training: the one loop, its checkpoints, and recovery fine-tuning."""
