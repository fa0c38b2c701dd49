"""Compare a study's candidates in tables, text, plots, a web page and model cards."""
