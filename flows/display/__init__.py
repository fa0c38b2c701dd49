"""What a user sees while a study runs and after it ended."""
