"""How a stage runs: its process, its hardware, and the code that it depends on."""
