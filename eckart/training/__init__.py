"""Training: the settings of an optimizer, and rules that methods add to the training loop."""
