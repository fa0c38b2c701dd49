"""What stages write and read: names, paths, and the typed content of files."""
