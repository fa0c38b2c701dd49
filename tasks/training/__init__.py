"""Training: the loop of all trainings, its checkpoints, and recovery fine-tuning."""
