"""Code that runs stages: the process, the hardware, and digests of the code that stages depend on."""
