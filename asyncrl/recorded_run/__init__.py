"""A run directory read again: `run` its files, `findings` its problems, `learning` whether it learned."""
