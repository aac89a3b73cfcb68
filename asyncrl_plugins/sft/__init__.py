"""Supervised warm start on demonstrations."""
