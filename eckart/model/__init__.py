"""Code about models: target layers, the layers that replace them, the Hugging Face format, a forward pass's cost."""
