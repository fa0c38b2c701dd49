"""The model: target layers, the layers that replace them, the Hugging Face format, and the cost of a forward pass."""
