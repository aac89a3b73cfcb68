"""From which peer each server pulls a version: the learner sends it to a few, and nobody is left without."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_plugins.relays.tree import WeightTree
from protocol.errors import ErrorCode
from protocol.messages import Error, Source, SourceFailure, SourceRequest
from protocol.weights import Publication, Tensor


class Fleet:
    """The learner's tree, and servers that ask it."""

    def __init__(self, folder: Path, fan_out: int = 2, keys: tuple[bytes, ...] | None = None):
        self.publication = Publication("tree", folder)
        self.servers: Any = SimpleNamespace(connected={}, errors=Counter(), of_session=self._of_session)
        self.servers.count_error = lambda kind: self.servers.errors.update([kind])
        self.tree = WeightTree(fan_out, self.servers, self.publication, None if keys is None else lambda: keys)
        self.parents: dict[str, str] = {}
        self.publish(1)

    def publish(self, version: int) -> None:
        self.version = version
        self.publication.publish(version, [Tensor("w", "uint8", (4,), [memoryview(b"1234")])])
        self.parents = {}

    def _of_session(self, session: str) -> str | None:
        name = session.removesuffix("-session")
        return name if name in self.servers.connected else None

    def ask(self, name: str, **fields: Any) -> Source | Error:
        self.servers.connected.setdefault(name, SimpleNamespace())
        request = {
            "version": self.version,
            "publication": self.publication.id,
            "session": f"{name}-session",
            "endpoint": f"tcp://127.0.0.1:{1000 + int(name[1:])}",
        }
        return self.tree.answer(SourceRequest(**{**request, **fields}))

    def parent(self, name: str, **fields: Any) -> str:
        """Ask, and return the source's name; empty for the learner."""
        answer = self.ask(name, **fields)
        assert isinstance(answer, Source), answer
        self.parents[name] = answer.server_id
        return answer.server_id

    def fail(self, name: str, reason: Any) -> str:
        return self.parent(name, failure=SourceFailure(server_id=self.parents[name], reason=reason))

    def depth(self, name: str) -> int:
        return 0 if not name else 1 + self.depth(self.parents[name])


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.publication.close()


@pytest.mark.parametrize(("fan_out", "servers", "deepest"), [(2, 1022, 9), (4, 1364, 5), (1, 20, 20)])
def test_a_tree_of_the_least_depth_and_the_learner_sends_to_its_fan_out(
    tmp_path: Path, fan_out: int, servers: int, deepest: int
) -> None:
    fleet = Fleet(tmp_path, fan_out)
    for number in range(servers):
        fleet.parent(f"s{number}")
    children = Counter(fleet.parents.values())
    assert children[""] == fan_out
    assert max(children.values()) == fan_out
    assert max(map(fleet.depth, fleet.parents)) == deepest
    assert fleet.tree.named == {"learner": fan_out, "server": servers - fan_out}
    fleet.publication.close()


def test_the_same_question_has_the_same_answer(fleet: Fleet) -> None:
    for _ in range(3):
        assert [fleet.parent(f"s{number}") for number in range(4)] == ["", "", "s0", "s0"]
    answer = fleet.ask("s3")
    assert isinstance(answer, Source)
    assert answer.endpoint == "tcp://127.0.0.1:1000"


def test_a_server_whose_source_has_failed_gets_the_rest_from_the_learner(fleet: Fleet) -> None:
    for number in range(5):
        fleet.parent(f"s{number}")
    assert fleet.parents["s3"] == "s0"
    assert fleet.parents["s4"] == "s1"
    assert [fleet.fail("s3", "silent"), fleet.fail("s4", "checksum"), fleet.fail("s2", "gone")] == [""] * 3
    assert fleet.servers.errors == {"relay_silent": 1, "relay_checksum": 1}, "who has newer weights has not failed"
    assert fleet.tree.named["learner_instead"] == 3
    crossed = SourceFailure(server_id="s0", reason="silent")
    assert fleet.parent("s3", failure=crossed) == ""
    assert fleet.tree.named["learner_instead"] == 3, "it was told before"
    fleet.publish(2)
    assert [fleet.parent(f"s{number}") for number in range(4)] == ["", "", "s0", "s0"], "another version, another try"


def test_nobody_is_sent_to_a_server_that_has_gone_and_one_that_comes_back_is_not_its_own_source(fleet: Fleet) -> None:
    for number in range(2):
        fleet.parent(f"s{number}")
    del fleet.servers.connected["s0"]
    assert fleet.parent("s2") == "s1"
    assert fleet.parent("s1", endpoint="tcp://127.0.0.1:1") == "s2", "another process of its name"
    assert fleet.parent("s3") == "s2"
    assert fleet.parent("s4") == "s1"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"version": 0}, ErrorCode.VERSION_GONE),
        ({"publication": "another"}, ErrorCode.VERSION_GONE),
        ({"session": "guessed"}, ErrorCode.NOT_WELCOME),
    ],
)
def test_what_cannot_be_answered(fleet: Fleet, fields: dict[str, Any], code: ErrorCode) -> None:
    answer = fleet.ask("s0", **fields)
    assert isinstance(answer, Error)
    assert answer.code is code
    assert not fleet.tree.named


@pytest.mark.parametrize("fields", [{"endpoint": "nowhere"}, {"endpoint": ""}, {"key": "k" * 40}])
def test_nobody_is_sent_to_an_endpoint_that_is_none_or_whose_key_is_unknown(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    known = b"K" * 40
    fleet = Fleet(tmp_path, 1, keys=(known,))
    fleet.parent("s0", **{"key": known.decode(), **fields})
    assert fleet.parent("s1", key=known.decode()) == ""
    assert fleet.parent("s2", key=known.decode()) == "s1"
    answer = fleet.ask("s3", key=known.decode())
    assert isinstance(answer, Source)
    assert answer.peer_keys == (known.decode(),)
    fleet.publication.close()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_fails_every_chain_ends_at_the_learner(tmp_path: Path, seed: int) -> None:
    """No server sends to more than the fan-out, and failures of some do not make the learner send to all."""
    rng, fleet = random.Random(seed), Fleet(tmp_path)
    alive = [f"s{number}" for number in range(60)]
    for name in alive:
        fleet.parent(name)
    for _ in range(40):
        name = rng.choice(alive)
        alive.remove(name)
        del fleet.servers.connected[name]
        for child in [child for child in alive if fleet.parents[child] == name]:
            fleet.fail(child, rng.choice(["silent", "gone"]))
    assert max(Counter(parent for parent in fleet.parents.values() if parent).values()) <= 2
    for name in alive:
        assert fleet.depth(name) <= 60
        assert not fleet.parents[name] or fleet.parents[name] in alive
    assert fleet.tree.named["learner"] == 2
    assert fleet.tree.named["learner_instead"] < 40
    fleet.publication.close()
