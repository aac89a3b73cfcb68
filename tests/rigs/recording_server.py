"""A rollout server that writes down what vLLM itself says of each completion: `python -m tests.recording_server`.

To the file named by RECORD: a line for each, with ticket, index, and `[version, start, end]` of vLLM's spans.
"""

from __future__ import annotations

import json
import os
from typing import Any

from asyncrl.entry import run_service
from rollout_server.__main__ import main
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.vllm import engine

RECORD = "ASYNCRL_TEST_RECORD"


def record() -> None:
    made = engine.to_completion

    def recorded(request: GenerationRequest, index: int, output: Any, cached: int | None) -> Completion:
        spans = [[span.version, span.start, span.end] for span in output.weight_versions]
        with open(os.environ[RECORD], "a") as file:
            file.write(json.dumps([request.request_id, index, spans]) + "\n")
        return made(request, index, output, cached)

    engine.to_completion = recorded


if __name__ == "__main__":
    record()
    run_service("rollout_server", main)
