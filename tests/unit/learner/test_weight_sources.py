"""Who fetches a version from whom: the learner sends it to a few, and nobody waits for someone who waits for him."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.network.weight_sources import FAILED_S, MOST_FAILURES, WeightSources
from learner.network.weight_tree import WAITS_S
from protocol.errors import ErrorCode
from protocol.messages import Error, Source, SourceFailure, SourceRequest, WeightsLoaded
from protocol.weights import Publication, Tensor


class Fleet:
    """The learner's directory, and servers that ask it."""

    def __init__(
        self, folder: Path, fan_out: int = 2, keys: tuple[bytes, ...] | None = None, *, differences: bool = False
    ):
        self.publication = Publication("tree", folder)
        self.servers: Any = SimpleNamespace(connected={}, errors=Counter(), of_session=self._of_session)
        self.servers.count_error = lambda kind: self.servers.errors.update([kind])
        known = None if keys is None else lambda: keys
        self.sources = WeightSources(
            fan_out, 30.0, self.servers, self.publication, known, sends_differences=differences
        )
        self.parents: dict[str, str] = {}
        self.publish(1)

    def publish(self, version: int) -> None:
        self.version = version
        self.publication.publish(version, [Tensor("w", "uint8", (4,), memoryview(b"1234"))])
        self.parents = {}

    def join(self, name: str) -> None:
        self.servers.connected[name] = SimpleNamespace(hello=SimpleNamespace(session=f"{name}-session"))

    def _of_session(self, session: str) -> str | None:
        name = session.removesuffix("-session")
        return name if name in self.servers.connected else None

    def ask(self, name: str, **fields: Any) -> Source | Error | None:
        if name not in self.servers.connected:
            self.join(name)
        request = {
            "version": self.version,
            "publication": self.publication.id,
            "session": f"{name}-session",
            "endpoint": f"tcp://127.0.0.1:{1000 + int(name[1:])}",
        }
        return self.sources.answer(SourceRequest(**{**request, **fields}))

    def parent(self, name: str, **fields: Any) -> str:
        """Ask, and return the source's name; empty for the learner."""
        answer = self.ask(name, **fields)
        assert isinstance(answer, Source), answer
        if answer.server_id:
            assert answer.endpoint == f"tcp://127.0.0.1:{1000 + int(answer.server_id[1:])}"
        self.parents[name] = answer.server_id
        return answer.server_id

    def fail(self, name: str, reason: Any) -> str:
        return self.parent(name, failure=SourceFailure(server_id=self.parents[name], reason=reason))

    def load(self, name: str, seconds: float = 1.0) -> None:
        loaded = WeightsLoaded(version=self.version, channel="zmq", transfer_s=seconds, load_s=0.0)
        self.sources.loaded(name, loaded)

    def depth(self, name: str) -> int:
        return 0 if not name else 1 + self.depth(self.parents[name])

    def ask_all(self, names: Sequence[str], clock: list[float]) -> None:
        """In this order, and again where a server waits."""
        waiting = list(names)
        while waiting:
            left = [name for name in waiting if self.ask(name) is None]
            clock[0] += 0.1 if left == waiting else 0.0
            waiting = left
        for name in names:
            self.parent(name)

    def load_all(self, seconds: dict[str, float], clock: list[float]) -> None:
        """After so many seconds from now."""
        began = clock[0]
        for name, after in sorted(seconds.items(), key=lambda item: item[1]):
            clock[0] = began + after
            self.load(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


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
    assert fleet.sources.named == {"learner": fan_out, "server": servers - fan_out}
    fleet.publication.close()


def test_whoever_joins_late_gets_it_from_a_server_that_is_done(fleet: Fleet) -> None:
    for number in range(6):
        fleet.parent(f"s{number}")
        fleet.load(f"s{number}")
    assert fleet.parent("s9") in {f"s{number}" for number in range(6)}
    assert fleet.sources.named["learner"] == 2


def test_the_same_question_has_the_same_answer(fleet: Fleet) -> None:
    for _ in range(3):
        assert [fleet.parent(f"s{number}") for number in range(4)] == ["", "", "s0", "s0"]


def test_a_server_that_fails_another_is_not_named_to_it_again_and_nobody_hangs_on_himself(fleet: Fleet) -> None:
    for number in range(4):
        fleet.parent(f"s{number}")
    assert fleet.parents["s3"] == "s0"
    assert fleet.parent("s4") == "s1"
    assert fleet.fail("s2", "silent") == "s1"
    assert fleet.fail("s2", "slow") == "s3", "the others are full, and s3 does not hang on s2"
    assert fleet.servers.errors == {"relay_silent": 1, "relay_slow": 1}
    # What hangs on s3 alone cannot feed it.
    del fleet.servers.connected["s0"], fleet.servers.connected["s1"]
    assert fleet.fail("s3", "gone") == ""
    assert fleet.sources.named["learner_instead"] == 1


def test_a_liar_is_named_to_nobody_until_it_starts_anew(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        fleet.parent(f"s{number}")
        fleet.load(f"s{number}")
    assert fleet.parents["s2"] == "s0"
    fleet.publish(2)
    for number in range(3):
        fleet.parent(f"s{number}")
    fleet.fail("s2", "checksum")
    assert "s0 sends weights with wrong checksums" in caplog.text
    assert "s0" not in {fleet.parent(f"s{number}") for number in range(3, 9)}
    fleet.publish(3)
    assert "s0" not in {fleet.parent(f"s{number}") for number in range(9)}
    fleet.servers.connected["s0"].hello.session = "another"
    fleet.parent("s0")
    assert "s0" in {fleet.parent(f"s{number}") for number in range(9, 30)}


def test_a_server_that_reaches_no_other_gets_all_from_the_learner_for_a_while(fleet: Fleet, clock: list[float]) -> None:
    for number in range(8):
        fleet.parent(f"s{number}")
    for _ in range(MOST_FAILURES):
        assert fleet.parents["s7"]
        fleet.fail("s7", "silent")
    assert fleet.parents["s7"] == ""
    fleet.publish(2)
    for number in range(8):
        fleet.parent(f"s{number}")
    assert fleet.parents["s7"] == ""
    assert fleet.parents["s6"] != ""
    clock[0] += FAILED_S + 1
    fleet.publish(3)
    for number in range(8):
        fleet.parent(f"s{number}")
    assert fleet.parents["s7"] != ""


def test_a_server_that_fetches_another_version_is_no_new_source_of_this_one(fleet: Fleet) -> None:
    for number in range(2):
        fleet.parent(f"s{number}")
        fleet.load(f"s{number}")
    fleet.publish(2)
    fleet.parent("s0")
    assert fleet.parent("s5", version=1) == "s1"
    fleet.parent("s1")
    assert fleet.parent("s6", version=1) == "s5"


def test_a_slow_source_is_one_that_takes_much_longer_than_others_did(fleet: Fleet) -> None:
    def within() -> float:
        answer = fleet.ask("s7")
        assert isinstance(answer, Source)
        return answer.within_s

    for number in range(8):
        fleet.parent(f"s{number}")
    assert within() == 0, "not known yet"
    fleet.load("s0", 2.0)
    assert within() == 30, "network.timeout_s at least"
    fleet.load("s1", 20.0)
    fleet.load("s2", 20.0)
    assert within() == 80


@pytest.mark.parametrize(("slow", "fan_out"), [(0, 2), (4, 2), (4, 4), (1, 1)])
def test_servers_with_slow_uplinks_become_leaves(tmp_path: Path, clock: list[float], slow: int, fan_out: int) -> None:
    """However they ask: each of them costs one publication at most, and then it takes as long as without them."""
    rng, fleet = random.Random(slow), Fleet(tmp_path, fan_out)
    names, took = [f"s{number}" for number in range(16)], []
    for version in range(1, 16):
        if version > 1:
            fleet.publish(version)
        order = rng.sample(names, len(names))
        fleet.ask_all(order, clock)
        children = Counter(fleet.parents.values())
        assert children[""] == max(children.values()) == fan_out
        seconds = {"": 0.0}
        for name in sorted(order, key=fleet.depth):
            source = fleet.parents[name]
            link = 0.1 if source and int(source[1:]) < slow else 1.0
            seconds[name] = max(seconds[source], children[source] / link)
        del seconds[""]
        took.append(max(seconds.values()))
        fleet.load_all(seconds, clock)
    assert set(took) <= {fan_out, *(10.0 * number for number in range(fan_out + 1))}
    if fan_out > 1:  # in a chain, one that has not been a source yet may come behind a slow one
        assert sum(each > fan_out for each in took) <= slow
        assert max(map(fleet.depth, names)) <= 5
    assert fleet.sources.named == {"learner": 15 * fan_out, "server": 15 * (16 - fan_out)}
    fleet.publication.close()


def test_a_server_that_receives_slowly_is_a_leaf_and_its_source_is_not_blamed(fleet: Fleet, clock: list[float]) -> None:
    for number in range(4):
        fleet.parent(f"s{number}")
    assert [name for name, source in fleet.parents.items() if source == "s0"] == ["s2", "s3"]
    fleet.load_all({"s0": 2.0, "s1": 2.0, "s2": 2.0, "s3": 20.0}, clock)
    fleet.publish(2)
    assert fleet.ask("s3") is None, "it waits for s0"
    assert fleet.parent("s0") == ""
    assert fleet.parent("s3") == ""
    assert {fleet.parent(name) for name in ("s1", "s2")} == {"s0"}
    assert fleet.parent("s4") == "s1"
    fleet.load_all({"s0": 2.0, "s3": 2.0}, clock)
    fleet.publish(3)
    fleet.parent("s0")
    fleet.parent("s3")
    assert {fleet.parent(f"s{number}") for number in range(4, 8)} == {"s0", "s3"}, "it has kept up since"


def test_a_server_that_is_late_behind_two_others_is_slow_itself(fleet: Fleet, clock: list[float]) -> None:
    for version, order, source in ((1, ("s0", "s1", "s2"), "s0"), (2, ("s1", "s0", "s2"), "s1")):
        if version > 1:
            fleet.publish(version)
        for name in order:
            fleet.parent(name)
        assert fleet.parents["s2"] == source
        fleet.load_all({"s0": 2.0, "s1": 2.0, "s2": 20.0}, clock)
    fleet.publish(3)
    assert [fleet.parent(f"s{number}") for number in (2, 1, 3, 4, 5, 6)] == ["", "", "s1", "s1", "s3", "s3"]


def test_a_source_that_others_turned_away_from_as_slow_is_a_leaf(fleet: Fleet, clock: list[float]) -> None:
    for number in range(4):
        fleet.parent(f"s{number}")
    fleet.load_all({"s0": 2.0, "s1": 2.0}, clock)
    clock[0] += 30.0
    assert fleet.fail("s2", "slow") == "s1"
    fleet.publish(2)
    for number in range(8):
        fleet.parent(f"s{number}")
    assert "s0" not in fleet.parents.values()


def test_a_fast_source_is_slow_at_the_second_version_that_it_holds_up(fleet: Fleet, clock: list[float]) -> None:
    for version, late in enumerate([2.0, 20.0, 2.0, 20.0, 20.0, 2.0], start=1):
        if version > 1:
            fleet.publish(version)
        order = [f"s{number}" for number in ((0, 1, 2, 3, 4) if version < 6 else (0, 1, 3, 2))]
        fleet.ask_all(order, clock)
        assert fleet.parents["s2"] == ("s0" if version < 6 else "s1")
        fleet.load_all({name: late if fleet.parents[name] == "s0" else 2.0 for name in order}, clock)


def test_nobody_waits_for_long_for_a_fast_server_that_does_not_ask(fleet: Fleet, clock: list[float]) -> None:
    for number in range(3):
        fleet.parent(f"s{number}")
    fleet.load_all({"s0": 2.0, "s1": 2.0, "s2": 2.0}, clock)
    fleet.publish(2)
    assert fleet.ask("s1") is None
    clock[0] += WAITS_S + 0.1
    assert fleet.parent("s1") == ""
    assert fleet.ask("s2") is None
    assert fleet.parent("s0") == ""
    assert fleet.parent("s2") == "s0"


def test_servers_with_the_same_version_before_send_its_differences_to_each_other(tmp_path: Path) -> None:
    """A newcomer's plain bytes keep no other server from differences, and its time is not theirs."""
    fleet = Fleet(tmp_path, 1, differences=True)
    fleet.publish(2)
    assert fleet.parent("s0") == "", "has nothing yet"
    assert fleet.parent("s1", base=1) == "", "from nobody else could it get differences"
    assert fleet.parent("s2", base=1) == "s1"
    assert fleet.parent("s3", base=1) == "s2"
    assert fleet.parent("s4") == "s0"
    assert fleet.parent("s5", base=0) == "s4", "a version that the learner has no more"
    fleet.load("s1", 20.0)
    assert [fleet.ask(name).within_s for name in ("s0", "s4", "s5")] == [0, 0, 0]  # type: ignore[union-attr]
    assert fleet.ask("s3", base=1).within_s == 80  # type: ignore[union-attr]
    fleet.publication.close()


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
    assert not fleet.sources.named


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


def test_without_fan_out_the_learner_sends_to_all(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 0)
    assert {fleet.parent(f"s{number}") for number in range(9)} == {""}
    assert fleet.sources.named == {"learner": 9}
    fleet.publication.close()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_fails_every_server_is_fed_in_the_end(tmp_path: Path, seed: int) -> None:
    """Chains end at the learner or at one that is done, nobody sends to more than the fan-out, and failures of others
    do not make the learner send to all."""
    rng, fleet = random.Random(seed), Fleet(tmp_path)
    alive = [f"s{number}" for number in range(60)]
    done: set[str] = set()
    for name in alive:
        fleet.parent(name)
    while len(done) < len(alive):
        name = rng.choice(alive)
        source = fleet.parents[name]
        event = rng.random()
        if event < 0.05 and len(alive) > 30:
            alive.remove(name)
            done.discard(name)
            del fleet.servers.connected[name]
        elif name not in done and source and (source not in alive or event < 0.15):
            fleet.fail(name, rng.choice(["silent", "slow", "gone"]))
        elif name not in done and (not source or source in done):
            fleet.load(name)
            done.add(name)
        at, seen = name, set[str]()
        while name in alive and at and at in alive and at not in done:
            assert at not in seen, "a circle"
            seen.add(at)
            at = fleet.parents[at]
    assert fleet.sources.named["learner"] == 2
    assert fleet.sources.named["learner_instead"] < 20
    fleet.publication.close()
