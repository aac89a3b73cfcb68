"""Channels of new weights from the learner's device memory into the engine's: `nccl` and `cuda_ipc` (decision 013).

Reading order: `plugin`, `receiver` (the server's end), `staging` and `stage` (one receiver beside the model), `sender`
(the learner's end), `group` (a process group for one transfer), `flat` (a version as bytes).
"""
