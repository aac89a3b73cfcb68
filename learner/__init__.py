"""The consumer process. Reading order:

`service` (its life) -> `between_steps` (its waits) -> `step` (the algorithm) -> `batch`, `packing` (groups as tensors)
-> `tickets` (staleness, back-pressure and the ledger) -> `exchange` (the sockets) -> `verification` (the alignment
contract) -> `engines`, `publication`, `saving`, `checkpoint`, `reporting`. `sft` is the supervised warm start.
"""
