"""Metrics (Prometheus), files and logs of a run."""
