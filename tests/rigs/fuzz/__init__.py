"""Hostile traffic for both ends of the wire; `python -m tests.rigs.fuzz_wire` runs it all and prints a summary."""
