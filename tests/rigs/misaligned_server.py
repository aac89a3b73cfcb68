"""A rollout server with log-probs of no distribution: `python -m tests.rigs.misaligned_server --config C`."""

from __future__ import annotations

from typing import Any

from asyncrl.service_entry import run_service
from rollout_server.__main__ import main
from rollout_server.engines.hf import decode_batch
from rollout_server.engines.hf import engine as hf_engine

ERROR_NATS = 0.01
"""Ten times what float32 may differ by."""


def make_wrong() -> None:
    """Wrong from the engine's own check of its decoding on, which would find it."""
    check: Any = hf_engine.check_decoding
    right = decode_batch.gather_logprobs

    def checked(*arguments: Any, **settings: Any) -> None:
        check(*arguments, **settings)
        decode_batch.gather_logprobs = lambda logprobs, token_ids: right(logprobs, token_ids) - ERROR_NATS

    hf_engine.check_decoding = checked


if __name__ == "__main__":
    make_wrong()
    run_service("rollout_server", main)
