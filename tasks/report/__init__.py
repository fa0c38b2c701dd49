"""The comparison of a study's candidates: read the results, then say them as table, words, plots and page."""
