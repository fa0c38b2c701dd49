"""The stages: each module reads inputs, calls eckart, writes outputs. Run as `python -m tasks.STAGE`."""
