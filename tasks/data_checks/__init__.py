"""What is looked at in data before anything learns from them; tasks/check.py is the stage."""
