"""Code about models: batches, target layers and their replacements, the Hugging Face format, a forward pass's cost."""
