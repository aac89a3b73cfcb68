"""Prometheus: metrics of both services, their endpoints, and health checks of containers."""
