"""Curricula: rows that are visited less often because of their latest groups."""
