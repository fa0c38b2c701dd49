"""The Hugging Face hub: pinned inputs and published candidates."""
