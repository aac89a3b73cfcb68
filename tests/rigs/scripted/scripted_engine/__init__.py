"""Rollout engine of the tests and benchmarks, found through its entry point as a third party's would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.config.parts import RolloutEngine


def problems(config: Any) -> Iterator[str]:
    if rows := config.alignment.rows:
        yield f"rollout.engine is scripted, which makes up its log-probs, and alignment.rows is {rows}. Set it to 0"


ENGINE = RolloutEngine(
    implementation="scripted_engine.engine:ScriptedEngine",
    problems=problems,
    has_model=False,
    not_quantized="which has no model",
)
