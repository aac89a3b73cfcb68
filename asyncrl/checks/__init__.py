"""Checks of a configuration against model folder, data and machine, before anything is loaded."""
