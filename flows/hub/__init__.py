"""Use of the Hugging Face hub: pinning inputs to commits, and publishing candidates."""
