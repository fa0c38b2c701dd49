"""Text: windows of question answering, and tokens aligned with words."""
