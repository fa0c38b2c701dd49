"""Removal of files and records that are no longer used."""
