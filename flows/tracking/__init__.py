"""Logging to MLflow. It copies results that are in DVC, so it can be repeated at any time."""
