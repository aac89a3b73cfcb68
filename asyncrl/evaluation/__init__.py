"""Scores of a model folder on held-out rows, without the services."""
