"""The comparison of a study's candidates as table, text, plots, page and model cards."""
