"""The short version of `make fuzz`: 2,000 mutated messages to each end of the wire, with fixed seeds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import pytest

from tests.rigs.fuzz.server_side import ServerSideResult, fuzz_server_side
from tests.rigs.fuzz_wire import fuzz_learner_side

MESSAGES = 2000
Result = TypeVar("Result")


def in_a_process_of_its_own(fuzz: Callable[..., Result], *arguments: object) -> Result:
    """Run `fuzz` in a fresh process: its memory is measured."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_silence) as pool:
        return pool.submit(fuzz, *arguments).result(timeout=300)


def _silence() -> None:
    """Log nothing: refusals would be most of the output."""
    logging.disable(logging.CRITICAL)


@pytest.mark.parametrize(("seed", "curve"), [(1, False), (2, True)])
def test_the_learner_survives_hostile_servers(tmp_path: Path, seed: int, curve: bool):
    result = in_a_process_of_its_own(partial(fuzz_learner_side, curve=curve), MESSAGES, seed, tmp_path)
    assert result.problems == []
    assert result.sent.total() >= MESSAGES
    assert result.answers["malformed"] > 100
    assert result.answers["refused_group"] > 10
    assert result.answers["chunk"] > 5, "existing weights were asked for, too"
    assert result.taken > 400, "the good server worked on"


def fuzz_server(messages: int, seed: int) -> ServerSideResult:
    return asyncio.run(fuzz_server_side(messages, seed))


def test_a_server_survives_a_hostile_learner():
    result = in_a_process_of_its_own(fuzz_server, MESSAGES, 1)
    assert result.problems == []
    assert result.counts["messages to the link"] > 1000
    assert result.counts["transfers that arrived whole"] > 0
