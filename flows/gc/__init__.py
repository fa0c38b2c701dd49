"""Removal of files and MLflow records that are no longer used."""
