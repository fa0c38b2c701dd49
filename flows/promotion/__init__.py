"""How the best candidate becomes the champion of the model registry."""
