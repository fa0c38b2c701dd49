"""Load data sets, split them, encode their labels and make batches."""
