"""The running of stages: their process, their hardware, and the code that they depend on."""
