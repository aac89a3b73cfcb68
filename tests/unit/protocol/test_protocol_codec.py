"""Messages survive the wire unchanged, and nothing that arrives can do worse than a ProtocolError."""

from __future__ import annotations

import functools
import random
from typing import Any, get_args
from unittest import mock

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.codec import ALL_MODELS, MAX_ELEMENTS, MAX_REASON, Limits, decode, encode
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    LONGEST_TEXT,
    ControlFromLearner,
    ControlFromServer,
    Error,
    Group,
    Message,
    Tickets,
    Wire,
)
from protocol.nesting import MAX_DEPTH
from protocol.values import pack_values, unpack_values
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of, mutate, pack

LIMITS = Limits()


def make_group(lengths: list[int]) -> Group:
    return content.group(7, 3, "server-0", lengths)


def assert_same(left: Message | Wire, right: Message | Wire) -> None:
    assert type(left) is type(right)
    assert encode(left) == encode(right)


def refused(frames: list[bytes], expected: Any = Message, limits: Limits = LIMITS) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(frames, expected, limits)
    assert len(caught.value.reason) <= MAX_REASON
    return caught.value


def test_every_message_type_has_an_example():
    assert {type(example) for example in content.EXAMPLES} == set(ALL_MODELS.values()) == set(get_args(Message))


@pytest.mark.parametrize("message", content.EXAMPLES, ids=lambda message: message.type)
def test_round_trip(message: Wire):
    assert_same(message, decode(encode(message, LIMITS), Message, LIMITS))
    assert_same(message, decode([zmq.Frame(frame) for frame in frames_of(message)], type(message), LIMITS))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), max_size=5),
    prompt_ids=hnp.arrays(np.int32, st.integers(0, 30)),
    data=st.data(),
)
def test_groups_of_any_shape_round_trip(lengths: list[int], prompt_ids: np.ndarray, data: st.DataObject):
    floats = st.floats(width=32)  # NaN and infinities included: the learner judges values, not the codec
    logprobs = data.draw(hnp.arrays(np.float32, sum(lengths), elements=floats))
    group = make_group(lengths).model_copy(update={"prompt_ids": prompt_ids, "logprobs": logprobs})
    assert_same(group, decode(frames_of(group), ControlFromServer, LIMITS))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(columns=st.dictionaries(st.text(), json_like, max_size=3), image=st.binary(max_size=50))
def test_dataset_columns_round_trip(columns: dict[str, Any], image: bytes):
    tickets = content.example_tickets(image, columns)
    assert_same(tickets, decode(frames_of(tickets), ControlFromLearner, LIMITS))


def test_receiving_copies_no_array_and_no_blob():
    frames = frames_of(make_group([5, 6]))
    group = decode(frames, Group, LIMITS)
    assert isinstance(group, Group)
    owners = [np.frombuffer(frame, np.uint8) for frame in frames[1:]]
    assert any(np.shares_memory(group.token_ids, owner) for owner in owners)
    assert not group.token_ids.flags.writeable

    received = [zmq.Frame(frame) for frame in frames_of(content.example_tickets(b"x" * 1000))]
    tickets = decode(received, Tickets, LIMITS)
    assert isinstance(tickets, Tickets)
    blob = tickets.blobs[content.EXAMPLE_IMAGE]
    assert blob.readonly
    assert np.shares_memory(np.frombuffer(blob, np.uint8), np.frombuffer(received[1].buffer, np.uint8))


def test_sending_copies_no_array():
    group = make_group([100])
    assert any(np.shares_memory(np.frombuffer(f, np.uint8), group.token_ids) for f in encode(group)[1:])


def header(**fields: Any) -> list[bytes]:
    return [pack(fields)]


MALFORMED = {
    "no frames": [],
    "empty header": [b""],
    "not messagepack": [b"\xc1"],
    "a list": [pack([1])],
    "trailing bytes": [pack({"type": "ack", "ticket_ids": []}) + b"\x00"],
    "cut off": [pack({"type": "ack", "ticket_ids": [1, 2]})[:-1]],
    "no type": header(ticket_ids=[]),
    "type is a number": header(type=3),
    "integer keys": [pack({1: 2})],
    "extension": header(type="ack", ticket_ids=msgpack.ExtType(4, b"abc")),
    "bad text": [b"\x81\xa4type\xa2\xff\xff"],
    "huge list announced": [b"\xdd\xff\xff\xff\xff"],
    "long list": header(type="ack", ticket_ids=[0] * (MAX_ELEMENTS + 1)),
    "unknown field": header(type="ack", ticket_ids=[], colour="red"),
    "missing field": header(type="ack"),
    "negative id": header(type="ack", ticket_ids=[-1]),
    "fractional id": header(type="ack", ticket_ids=[1.5]),
    "nan for an integer": header(type="learner_heartbeat", version=float("nan"), step=1),
    "unused frame": [*header(type="ack", ticket_ids=[]), b"left over"],
    "frame out of range": header(type="chunk", version=0, offset=0, data={"frame": 1}),
    "negative frame": [*header(type="chunk", version=0, offset=0, data={"frame": -1}), b"x"],
    **{
        f"{depth} nested {opening!r}": [b"\x82\xa4type\xa5group" + place + opening * depth + b"\x00"]
        for depth in (MAX_DEPTH, 300, 1023, 1024, 5000)
        for opening, place in ((b"\x91", b"\xa9token_ids"), (b"\x81\xa1a", b"\xa5extra"))
    },
    "blob inside the header": header(type="chunk", version=0, offset=0, data=b"inline"),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed(frames: list[bytes]):
    assert refused(frames).code is ErrorCode.MALFORMED


def test_values_travel_as_deep_as_they_may_and_no_deeper():
    def columns(depth: int) -> dict[str, Any]:
        return {"deep": functools.reduce(lambda inner, _: {"a": [inner]}, range(depth // 2), 0)}

    deepest = MAX_DEPTH - 1  # below columns, which are packed by themselves
    assert_same(right := content.example_tickets(columns=columns(deepest)), decode(frames_of(right), Tickets, LIMITS))
    with pytest.raises(ProtocolError, match=f"nested more than {MAX_DEPTH} deep"):
        encode(content.example_tickets(columns=columns(deepest + 2)))
    fields = msgpack.unpackb(frames_of(right)[0])
    fields["tickets"][0]["prompt"]["columns"] = columns(deepest + 2)
    assert f"nested more than {MAX_DEPTH} deep" in refused([pack(fields), b"png"], Tickets).reason


@pytest.mark.parametrize(
    "info",
    [
        "[" * 4000,
        '{"a":' * 800,
        '{"a":' + "[" * 100 + "]" * 100 + "}",
        '{"a": NaN}',
        '{"a": 1e999}',
        "[1]",
        "{",
        "1" * 4096,
    ],
    ids=lambda info: info[:12],
)
def test_facts_of_a_turn_that_are_no_json_object_are_refused(info: str):
    """None of them raises anything else, however deep, whoever calls: 4,000 brackets ended the learner's thread."""
    group = content.conversation(7)
    turns = group.trajectories[0].turns
    damaged = (turns[0].model_copy(update={"info": info}), *turns[1:])
    record = group.trajectories[0].model_copy(update={"turns": damaged})
    frames = frames_of(group.model_copy(update={"trajectories": (record, *group.trajectories[1:])}))
    error = refused(frames, Group)
    assert (error.code, "turns.0.info" in error.reason) == (ErrorCode.MALFORMED, True)


def test_nothing_that_a_validator_raises_gets_past_the_decoder(monkeypatch: pytest.MonkeyPatch):
    for error in (RecursionError("too deep"), KeyError("name"), MemoryError()):
        monkeypatch.setattr(Error, "model_validate", mock.Mock(side_effect=error))
        failed = refused(frames_of(Error(code=ErrorCode.MUTED, reason="x")))
        assert (failed.code, type(error).__name__ in failed.reason) == (ErrorCode.MALFORMED, True)


@pytest.mark.parametrize("seconds", [1e308, -1e308, -0.5, float("nan"), float("inf")])
def test_times_that_nobody_measured_are_refused(seconds: float):
    for message, name in ((make_group([3]), "timings"), (content.heartbeat(), "busy_s")):
        fields = msgpack.unpackb(frames_of(message)[0])
        fields[name] = {"generate_s": seconds, "reward_s": 0.0} if name == "timings" else seconds
        assert name in refused([pack(fields), *frames_of(message)[1:]]).reason


def tampered_group(**changes: Any) -> list[bytes]:
    frames = frames_of(make_group([3, 2]))
    frames[0] = pack(msgpack.unpackb(frames[0]) | changes)
    return frames


WRONG_ARRAYS = {
    "inline list": [1, 2, 3],
    "frame used twice": {"frame": 1, "dtype": "<i4", "shape": [8]},
    "wrong dtype": {"frame": 4, "dtype": "<f4", "shape": [5]},
    "object dtype": {"frame": 4, "dtype": "O", "shape": [5]},
    "wrong size": {"frame": 4, "dtype": "<i4", "shape": [6]},
    "negative shape": {"frame": 4, "dtype": "<i4", "shape": [-5]},
    "overflowing shape": {"frame": 4, "dtype": "<i4", "shape": [0, 2**39, 2**39]},
    "endless shape": {"frame": 4, "dtype": "<i4", "shape": [2**39] * 50_000},
    "two dimensions": {"frame": 4, "dtype": "<i4", "shape": [1, 5]},
    "boolean shape": {"frame": 4, "dtype": "<i4", "shape": [True]},
    "huge frame index": {"frame": 2**63, "dtype": "<i4", "shape": [5]},
    "nothing": None,
}


@pytest.mark.parametrize("value", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS.keys())
def test_wrong_arrays_are_refused_by_name(value: Any):
    error = refused(tampered_group(token_ids=value), Group)
    assert error.code is ErrorCode.MALFORMED
    assert "group.token_ids" in error.reason


def test_the_reason_names_the_path_and_stays_short():
    fields = msgpack.unpackb(encode(content.example_tickets())[0])
    fields["tickets"][0]["prompt"]["messages"][0]["content"][1]["text"] = 5
    assert "tickets.tickets.0.prompt.messages.0.content.1.text" in refused([pack(fields), b"png"]).reason
    flood = [{"turns": [0] * MAX_ELEMENTS} for _ in range(10)]
    assert "more" in refused(header(type="group", trajectories=flood)).reason


def test_limits():
    group = frames_of(make_group([100]))
    for limits in (Limits(max_message_bytes=900), Limits(max_header_bytes=50), Limits(max_frames=4)):
        assert refused(group, limits=limits).code is ErrorCode.TOO_LARGE
        with pytest.raises(ProtocolError) as caught:
            encode(make_group([100]), limits)
        assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    "packed", [b"", b"\x92\x01", b"\x81\x90\x01", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, 5, None]
)
def test_packed_values_that_are_none_are_refused_by_name(packed: Any) -> None:
    """Also extensions of an unknown type, and those whose text is none of their type."""
    fields = msgpack.unpackb(frames_of(content.example_tickets())[0])
    fields["tickets"][0]["prompt"]["columns"] = packed
    assert "tickets.tickets.0.prompt.columns" in refused([pack(fields), b"png"]).reason


@given(
    code=st.integers(0, 127),
    text=st.binary(max_size=30) | st.sampled_from([b"1e999999999", b"9" * 5000, b"nan", b"-1"]),
)
def test_an_extension_is_a_value_or_a_refusal(code: int, text: bytes) -> None:
    packed = msgpack.packb({"x": [msgpack.ExtType(code, text)]})
    try:
        value = unpack_values(packed)
    except ValueError:
        return
    assert unpack_values(pack_values(value)) == value or value["x"][0] != value["x"][0], "NaN alone differs from itself"


def test_values_that_cannot_travel_are_refused_by_the_sender():
    for value in (object(), {1, 2}, "\ud800"):
        with pytest.raises(ProtocolError) as caught:
            encode(content.example_tickets(columns={"bad": value}))
        assert caught.value.code is ErrorCode.MALFORMED
    nested: Any = 0
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(ProtocolError):
        encode(content.example_tickets(columns={"deep": nested}))


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([{}], f"1 requests for {content.GROUP_SIZE} trajectories"),
        ([{"prefix": [5] * (content.MAX_NEW_TOKENS + 1)}], "over max_new_tokens"),
        ([{"prefix": [5, content.BANNED]}], "begins with banned token ids"),
        ([{"prefix": [content.STOP, 5]}], "goes on behind the stop token ids"),
        ([{"prefix": [2**31]}], "prefix.0"),
        ([{"prefix": [-1]}], "prefix.0"),
    ],
)
def test_requests_that_no_trajectory_can_follow_are_refused(requests: list[dict[str, Any]], reason: str):
    fields = msgpack.unpackb(encode(content.example_tickets())[0])
    size = content.GROUP_SIZE if requests != [{}] else 1
    fields["tickets"][0]["requests"] = (requests + [{}] * content.GROUP_SIZE)[:size]
    assert reason in refused([pack(fields), b"png"], Tickets).reason


def test_damaged_messages_decode_or_raise_protocol_errors():
    rng = random.Random(3)
    reasons = []
    for number in range(1000):
        try:
            decode(mutate(rng, content.EXAMPLES[number % len(content.EXAMPLES)]), Message, LIMITS)
        except ProtocolError as error:
            reasons.append(error.reason)
    assert len(reasons) > 700
    assert all(reason.isprintable() and len(reason) <= MAX_REASON for reason in reasons)


def test_texts_of_peers_are_short_and_on_one_line():
    error = Error(code=ErrorCode.MALFORMED, reason="a\nb\x1b[31m" + "x" * 10_000_000)
    assert error.reason.startswith("a b [31mxxx")
    assert len(error.reason) == LONGEST_TEXT


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        *[(content.heartbeat(), "busy_s", value) for value in (float("nan"), float("inf"))],
        *[(content.hello("s"), "server_id", name) for name in ("", "two words", "line\nbreak", "\x1b[31m", "x" * 201)],
    ],
)
def test_measurements_are_finite_and_names_are_words(message: Wire, field: str, value: object):
    with pytest.raises(ValueError, match=field):
        type(message).model_validate(message.model_dump() | {field: value})
