"""Exports on the hub, with a model card made from the run: options of `asyncrl export`."""
