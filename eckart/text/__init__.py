"""Text: windows for question answering, alignment of words with tokens, and text that a language model writes."""
