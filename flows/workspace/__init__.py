"""Workspaces: made by `eckart init`, checked out at a revision, and what is installed beside them."""
