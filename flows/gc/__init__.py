"""What nights leave behind: which of it stays, and the rest removed."""
