"""The short version of `python -m tests.rigs.hostile_decoders`: damaged and deeply nested input to every decoder."""

from __future__ import annotations

import asyncio

from tests.rigs.hostile_decoders import DECODERS, attack_all


def test_every_decoder_answers_hostile_input_with_a_value_or_an_error_of_its_kind() -> None:
    report = asyncio.run(attack_all(100, seed=2))
    assert report["problems"] == []
    for name, (_, allowed) in DECODERS.items():
        outcomes = {kind: count for kind, count in report["decoders"][name].items() if kind != "slowest_ms"}
        assert sum(outcomes.values()) == 100
        assert not allowed or outcomes.get("a value", 0) < 90, f"{name} refuses what is damaged"
