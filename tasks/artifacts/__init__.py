"""Files that stages write and read: their names, paths and types."""
