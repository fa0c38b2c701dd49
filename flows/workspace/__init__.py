"""Workspaces: new ones (`eckart init`), and worktrees at a git revision for seeds and for reproducing results."""
