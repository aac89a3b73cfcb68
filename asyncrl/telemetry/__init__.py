"""What a run says about itself: Prometheus metrics, files in the run directory, and logs."""
