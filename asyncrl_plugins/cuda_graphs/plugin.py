"""Description of the decode batch: an entry of the entry point group `asyncrl.decode_batches`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.plugins import Part

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

EAGER = "enforce_eager"
"""Argument in rollout.engine_args that goes without graphs; vLLM's own name for it."""


def problems(config: RunConfig) -> Iterator[str]:
    given = config.rollout.engine_args.get(EAGER, False)
    if config.rollout.engine == "hf" and not isinstance(given, bool):
        yield f"rollout.engine_args.{EAGER} is {given!r}, not true or false. Set it to true to decode without graphs"


BATCH = Part(
    implementation="asyncrl_plugins.cuda_graphs.choice:graphed_batches",
    problems=problems,
    facts={"argument": EAGER, "memory": "asyncrl_plugins.cuda_graphs.memory:lines"},
)
