"""A run directory read again: `run` its records, `findings` its problems, `learning` its scores at start and end."""
