"""Code about models: target layers, the layers that replace them, the Hugging Face format, the cost of a forward."""
