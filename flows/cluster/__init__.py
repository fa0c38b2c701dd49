"""Running stages on the workers of a Dask cluster."""
