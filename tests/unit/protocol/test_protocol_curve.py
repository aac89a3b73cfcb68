"""Keys on both sides: who gets in, who does not, and what each of them is told."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from learner.network.sockets import LearnerSockets, open_sockets
from protocol.curve import KeyFileError, read_learner_keys, read_server_keys
from protocol.endpoints import InsecureBindError, check_dial
from protocol.errors import ErrorCode
from protocol.messages import Error
from rollout_server.link import LearnerLink, dial
from tests.rigs.curve_keys import make_keys
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import small_config

WAIT_S = 5.0
HELLO = content.hello("server")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def config_with(**network: object) -> RunConfig:
    return small_config(timeout_s=30.0, start_timeout_s=10.0, **network)


def with_keys(config: RunConfig, keys: Path | str) -> RunConfig:
    return config.model_copy(update={"network": config.network.model_copy(update={"keys_dir": str(keys)})})


@contextmanager
def learner_at(config: RunConfig) -> Iterator[LearnerSockets]:
    with zmq.Context() as context:
        ports = open_sockets(config.network, config.network_settings.largest_group_bytes, context)
        try:
            yield ports
        finally:
            ports.close()
            started = time.monotonic()
            context.term()
            assert time.monotonic() - started < 3.0, "a socket was left open"


def knock(ports: LearnerSockets, config: RunConfig, *, weights: bool = False) -> None:
    """A server of this configuration says hello to one of the learner's sockets, and hears an answer."""
    learner, endpoint = ports.control, config.network.control_endpoint
    if weights:
        learner, endpoint = ports.weights, config.network.weights_endpoint

    async def server() -> None:
        sock = dial(config.network, endpoint, (Error,))
        try:
            await sock.send(HELLO, 2.0)
            received = await asyncio.to_thread(learner.recv, WAIT_S)
            assert received is not None
            learner.send(received.identity, Error(code=ErrorCode.MALFORMED, reason="heard"))
            assert isinstance(await sock.recv(WAIT_S), Error)
        finally:
            sock.close()

    asyncio.run(server())


async def connect(config: RunConfig) -> None:
    link = LearnerLink(config.link_settings, engine="hf", fingerprints=("m", "p"), in_work=tuple)
    try:
        await link.connect()
    finally:
        link.close()


def other_keys(keys: Path, tmp_path: Path) -> None:
    """Keys of an unknown server that accepts the right learner."""
    make_keys(tmp_path / "other")
    (tmp_path / "other" / "learner.public").write_bytes((keys / "learner.public").read_bytes())


def test_unusable_key_files_are_named_with_the_fix(keys: Path):
    (keys / "learner.secret").chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_learner_keys(keys)
    (keys / "learner.secret").chmod(0o600)
    for damaged in (b"", b"x" * 39, b"~" * 40, b"#" * 40, b"\xff" * 40, os.urandom(500)):
        (keys / "server.secret").write_bytes(damaged)
        with pytest.raises(KeyFileError, match="does not hold a key") as caught:
            read_server_keys(keys)
        assert repr(damaged)[2:-1] not in str(caught.value) or not damaged
    (keys / "server.secret").unlink()
    with pytest.raises(KeyFileError, match="asyncrl keys DIR"):
        read_server_keys(keys)
    (keys / "servers" / "server.public").unlink()
    with pytest.raises(KeyFileError, match="no rollout server could connect"):
        read_learner_keys(keys)


def test_secrets_appear_in_no_text(keys: Path):
    config = config_with(keys_dir=str(keys))
    texts = [repr(read_learner_keys(keys)), repr(read_server_keys(keys)), repr(config), dump_config(config)]
    for path in keys.glob("*.secret"):
        secret = path.read_text().strip()
        assert not any(secret in text or repr(secret)[1:-1] in text for text in texts)


def test_servers_with_keys_are_heard_on_both_sockets_also_with_one_added_during_the_run(keys: Path, tmp_path: Path):
    other_keys(keys, tmp_path)
    config = config_with(keys_dir=str(keys))
    late = with_keys(config, tmp_path / "other")
    with learner_at(config) as ports:
        knock(ports, config)
        knock(ports, config, weights=True)
        assert not ports.take_rejections()
        (keys / "servers" / "late.public").write_bytes((tmp_path / "other/servers/server.public").read_bytes())
        knock(ports, late)


@pytest.mark.parametrize(
    ("theirs", "message", "kind"),
    [
        ("unknown", "does not know this server's key", "rejected_key"),
        ("another learner's", "learner.public is not the key of the learner", "failed_handshake"),
        ("none", "the learner there uses keys", "failed_handshake"),
    ],
)
def test_a_wrong_key_is_reported_at_once_and_counted_by_the_learner(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: str, message: str, kind: str
):
    config = config_with(keys_dir=str(keys))
    if theirs == "another learner's":
        make_keys(tmp_path / "other")
    else:
        other_keys(keys, tmp_path)
    stranger = with_keys(config, "" if theirs == "none" else tmp_path / "other")
    started = time.monotonic()
    with caplog.at_level(logging.INFO), learner_at(config) as ports:
        with pytest.raises(UserError, match=message):
            asyncio.run(connect(stranger))
        assert time.monotonic() - started < 0.8 * config.network.start_timeout_s
        assert ports.take_rejections()[kind] >= 1
        assert ports.control.recv() is None
        knock(ports, config)  # the others come and go
    logged = [record.getMessage() for record in caplog.records]
    assert sum("rejected" in line for line in logged) == 1, "logged once"


def test_a_server_with_keys_does_not_talk_to_a_learner_without(keys: Path):
    """No other program can lure it by answering in its learner's place."""
    config = config_with()
    secure = with_keys(config, keys)
    with learner_at(config) as ports:
        with pytest.raises(UserError, match="that learner uses no keys"):
            asyncio.run(connect(secure))
        assert ports.control.recv() is None


@pytest.mark.parametrize("host", ["0.0.0.0", "*"])
def test_a_public_bind_needs_keys_or_consent(keys: Path, host: str):
    with pytest.raises(UserError) as caught, learner_at(config_with(host=host)):
        pass
    for named in ("asyncrl keys DIR", "network.keys_dir", "network.insecure=true", "network.host=127.0.0.1"):
        assert named in str(caught.value)
    with learner_at(config_with(host=host, keys_dir=str(keys))) as ports:
        assert ports.control.endpoint.startswith("tcp://0.0.0.0:")
    with learner_at(config_with(host=host, insecure=True)) as ports:
        assert ports.weights.endpoint.startswith("tcp://0.0.0.0:")


def test_a_server_dials_other_machines_only_with_keys_or_consent():
    for endpoint in ("tcp://192.0.2.1:1", "tcp://no-such-machine.invalid:1", "tcp://0.0.0.0:1"):
        with pytest.raises(InsecureBindError, match="asyncrl keys DIR"):
            check_dial(endpoint)
    check_dial("tcp://127.0.0.1:1")
    check_dial("tcp://localhost:1")
    with pytest.raises(UserError, match=r"network\.keys_dir"):
        asyncio.run(connect(config_with(host="192.0.2.1")))
