"""Weights from the learner's device memory into an engine's: channels `nccl` and `cuda_ipc` (docs/decisions/013)."""
