"""The consumer process. Reading order: `service` (its life), `step` (the algorithm), `tickets` (staleness,
back-pressure and the ledger), `exchange` (the sockets), `verification` (the alignment contract), `packing`, `engines`, `publication`,
`checkpoint`."""
