"""The consumer process. Reading order:

`service` (start, steps, end) -> `loop` (trainer, work between steps, resuming) -> `training` (`step` is the algorithm;
`batch` and `packing` make tensors of groups) -> `tickets` (staleness, back-pressure and the ledger) -> `network`
(`thread` and its parts; `group_verification` is the alignment contract) -> `reporting`.
"""
