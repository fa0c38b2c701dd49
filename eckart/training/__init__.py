"""Training: the settings of an optimizer, the input of a method, and rules that change the training loop."""
