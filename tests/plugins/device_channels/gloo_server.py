"""A rollout server that takes its weights over `nccl` without a GPU, and where that does not work from shared memory:
`python -m tests.plugins.device_channels.gloo_server --config C`."""

from __future__ import annotations

from asyncrl.service_entry import run_service
from rollout_server import service
from rollout_server.__main__ import main

if __name__ == "__main__":
    channels = iter(("nccl", "shm"))  # the one, and the one to go on with
    service.choose_channel = lambda configured, **_facts: next(channels)
    run_service("rollout_server", main)
