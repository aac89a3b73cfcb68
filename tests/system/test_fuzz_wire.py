"""The short version of `make fuzz`: 2,000 mutated messages to each end of the wire, with fixed seeds."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar, get_args

import msgpack
import pytest

from protocol.codec import Limits, decode
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import LONGEST_TEXT, ControlFromServer, Error, ServerHeartbeat, printable
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of, mutate
from tests.rigs.fuzz.server_side import ServerSideResult, fuzz_server_side
from tests.rigs.fuzz_wire import fuzz_learner_side

MESSAGES = 2000
Result = TypeVar("Result")


def in_a_process_of_its_own(fuzz: Callable[..., Result], *arguments: object) -> Result:
    """Its memory is what is measured: that of a process that other tests have been in says nothing."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_silence) as pool:
        return pool.submit(fuzz, *arguments).result(timeout=300)


def _silence() -> None:
    """A refusal each would be most of the output."""
    logging.disable(logging.CRITICAL)


@pytest.mark.parametrize(("seed", "curve"), [(1, False), (2, True)])
def test_the_learner_survives_hostile_servers(tmp_path: Path, seed: int, curve: bool):
    result = in_a_process_of_its_own(partial(fuzz_learner_side, curve=curve), MESSAGES, seed, tmp_path)
    assert result.problems == []
    assert sum(result.hostile["sent"].values()) >= MESSAGES
    assert result.hostile["answers"]["malformed"] > 100
    assert result.hostile["answers"]["refused_group"] > 10
    assert result.hostile["answers"]["chunk"] > 5, "weights that are there were asked for, too"
    assert result.taken > 400, "the good server worked on"


def fuzz_server(messages: int, seed: int) -> ServerSideResult:
    return asyncio.run(fuzz_server_side(messages, seed))


def test_a_server_survives_a_hostile_learner():
    result = in_a_process_of_its_own(fuzz_server, MESSAGES, 1)
    assert result.problems == []
    assert result.counts["messages to the link"] > 1000
    assert result.counts["transfers that arrived whole"] > 0


def test_the_decoder_raises_protocol_errors_and_nothing_else():
    rng = random.Random(3)
    expected, reasons = get_args(ControlFromServer), []
    for number in range(5000):
        frames = mutate(rng, frames_of(content.group(number, 0, "s")))
        try:
            decode(frames, expected, Limits())
        except ProtocolError as error:
            reasons.append(error.reason)
    assert len(reasons) > 4000
    assert all(reason.isprintable() for reason in reasons)


def test_a_boolean_is_no_size():
    frames = frames_of(content.group(1, 0, "s"))
    header = msgpack.unpackb(frames[0])
    for shape in ([1, True], [True, 3], [1, 3, True]):
        header["image_grids"]["shape"] = shape
        with pytest.raises(ProtocolError) as caught:
            decode([msgpack.packb(header), *frames[1:]], get_args(ControlFromServer), Limits())
        assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
@pytest.mark.parametrize("depth", [300, 511, 900, 1000, 1023, 1024, 5000])
@pytest.mark.parametrize("place", [b"\xa9token_ids", b"\xacimage_hashes", b"\xa7timings", b"\xa5extra"])
def test_deep_nesting_is_malformed(opening: bytes, depth: int, place: bytes):
    header = b"\x82\xa4type\xa5group" + place + opening * depth + b"\x00"
    with pytest.raises(ProtocolError) as caught:
        decode([header], get_args(ControlFromServer), Limits())
    assert caught.value.code is ErrorCode.MALFORMED


def test_what_peers_say_is_short_and_on_one_line():
    error = Error(code=ErrorCode.MALFORMED, reason="a\nb\x1b[31m" + "x" * 10_000_000)
    assert error.reason.startswith("a b [31mxxx")
    assert len(error.reason) == LONGEST_TEXT
    assert printable("née é") == "née é"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_measurements_are_numbers(value: float):
    beat = content.heartbeat().model_dump() | {"busy_s": value}
    with pytest.raises(ValueError, match="finite number"):
        ServerHeartbeat.model_validate(beat)


@pytest.mark.parametrize("name", ["", "two words", "line\nbreak", "\x1b[31m", "x" * 201])
def test_names_of_servers_are_words(name: str):
    with pytest.raises(ValueError, match="server_id"):
        content.hello("s").model_validate(content.hello("s").model_dump() | {"server_id": name})
