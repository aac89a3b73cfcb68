"""The producer process. Reading order: `service` (its life), `link` (its socket), `group_producer` (ticket to group),
`engines` (sampling), `weights` (new policies and policy versions), `shared_device` (the lease in sync mode).
"""
