"""params.yaml: its types, its validation, and edits that keep its layout."""
