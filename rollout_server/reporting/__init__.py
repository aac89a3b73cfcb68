"""Metrics of the rollout server, and their Prometheus endpoint."""
