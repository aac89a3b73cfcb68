"""Trackers: TensorBoard and Weights & Biases show the metrics, evaluations and samples of a run."""
