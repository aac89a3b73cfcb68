"""The tree that a version travels along: which server fetches it from whom, where weights go over ZeroMQ.

The learner sends a version to the first `network.weights_fan_out` servers that ask; each later one gets it from a
server that is receiving it or has it, and that sends it to fewer than that. So the learner sends each byte to so many
servers however many there are, and the way to the last one grows with the logarithm of their number. A server that
says that its source has failed gets another one, and what it has stays; the learner itself is the last resort.

Servers that those behind them kept up with send the next versions on, and one that held them up is a leaf where the
others have places enough. No message says so: the learner compares how long a server and its source took.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from learner.network.servers import Servers
from protocol.endpoints import BindError, split_endpoint
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Error, Source, SourceFailure, SourceRequest, WeightManifest, WeightsLoaded
from protocol.weights import Publication

logger = logging.getLogger(__name__)

LEARNER = ""
"""The learner in the place of a server's id."""
MOST_FAILURES, FAILED_S = 3, 600.0
"""Sources in a row that fail one server: it reaches no other, and gets all from the learner for so many seconds."""
SLOW_FACTOR, SLOW_QUANTILE, MEASURED = 4.0, 0.95, 256
"""A transfer is slow when it takes so much longer than this quantile of the last so many."""
HOLDS_UP, HOLDS_UP_S = 2.0, 0.5
"""A transfer that takes so much longer than its source's own, and so many seconds longer, was held up on the way."""
SLOW_UPLINK_S = 600.0
"""How long a server is no source that held others up: as a leaf it is not measured again."""
WAITS_S = 1.0
"""Longest time that a server waits for a place behind those that are known to be fast."""
FAST, UNKNOWN = math.inf, 100.0
"""Speeds of servers that have kept those behind them up, and that have not been sources; above all logarithms."""
KEYS_EVERY_S = 1.0
"""Longest age of the known list of servers' public keys."""


@dataclass
class _Node:
    """A server that fetches a version, or has it."""

    endpoint: str
    key: str
    parent: str | None = None
    """The server that it fetches from, or the LEARNER; None: nobody yet, or the last one has failed."""
    is_queued: bool = False
    """It is in the tree's queue."""
    children: set[str] = field(default_factory=set)
    base: int | None = None
    """A version that it has in its memory."""
    passes_on: int | None = None
    """The version whose differences it receives, and may send on; None: it receives plain bytes."""
    is_complete: bool = False
    has_left: bool = False
    """It fetches another version now, and keeps this one only for those that are at it."""
    failed: set[str] = field(default_factory=set)
    """Servers that have failed this one."""
    speed: float = UNKNOWN
    """Of its link when it asked."""
    asked_at: float = 0.0
    fed_at: float = 0.0
    """When its source was named."""
    seconds: float | None = None
    """From then until it had all; None: it has not, or had several sources."""
    fed: set[str] = field(default_factory=set)
    """Servers that have ever been its children."""
    fed_most: int = 0
    """Most children at the same time."""
    kept_up: bool | None = None
    """Whether it had all about as soon as its source."""


@dataclass
class _Link:
    """A server's way to the network, by what its transfers have shown. Speeds: FAST, UNKNOWN, or where it held somebody
    up log2 of the bytes a second, rounded down: servers of about the same speed take turns."""

    uplink: float = UNKNOWN
    measured_at: float = 0.0
    downlink: float = FAST
    held_up_by: str = ""
    """Source of its last version, where that came late."""
    doubted_at: int | None = None
    """Version at which it held somebody up for the first time since it was fast."""

    @property
    def speed(self) -> float:
        """What those behind the server can expect."""
        is_old = self.uplink < UNKNOWN and time.monotonic() - self.measured_at > SLOW_UPLINK_S
        return min(UNKNOWN if is_old else self.uplink, self.downlink)

    def keep_up(self) -> None:
        self.uplink, self.doubted_at = FAST, None

    def hold_up(self, version: int, uplink: float) -> bool:
        """Whether it counts as slow now: one that was fast does so at the second version, since a machine may be busy
        for once."""
        if self.uplink == FAST and self.doubted_at in (None, version):
            self.doubted_at = version
            return False
        self.uplink, self.measured_at = uplink, time.monotonic()
        return True


@dataclass
class _Tree:
    """One version's."""

    manifest: WeightManifest
    nodes: dict[str, _Node] = field(default_factory=dict)
    open: dict[float, deque[str]] = field(default_factory=dict)
    """Servers that may have room for another child, by speed, those that joined first at the front."""
    expected: set[str] = field(default_factory=set)
    """Fast servers that had a version before, and have not asked for this one."""
    least_s: dict[int | None, float] = field(default_factory=dict)
    """Of the transfers from the learner, by the version whose differences they are."""
    from_learner: Counter[int | None] = field(default_factory=Counter)
    """Servers that were sent to the learner in the ordinary way, by the version whose differences they get."""


class WeightSources:
    """Used by the network thread; other threads may read the counters."""

    def __init__(
        self,
        fan_out: int,
        timeout_s: float,
        servers: Servers,
        publication: Publication,
        known_keys: Callable[[], Collection[bytes]] | None = None,
        *,
        sends_differences: bool = False,
    ):
        """`known_keys`: public keys of the servers that may connect; None without keys."""
        self.sent_bytes = 0
        """Bytes of weights in chunks that the learner has sent itself."""
        self.saved_bytes = 0
        """Bytes of weights that it need not send, because differences are smaller."""
        self._sends_differences = sends_differences
        self.named: Counter[str] = Counter()
        """Answers by the source they name: `learner`, `server`, and `learner_instead` where no server was left."""
        self._fan_out = fan_out
        self._timeout_s = timeout_s
        self._servers = servers
        self._publication = publication
        self._known_keys = known_keys
        self._keys: tuple[float, tuple[str, ...]] = (float("-inf"), ())
        self._trees: dict[int, _Tree] = {}
        self._liars: dict[str, str] = {}
        """Servers, with their sessions, that have sent bytes with wrong checksums: nobody is sent to them."""
        self._failures: dict[str, list[float]] = {}
        """When sources failed a server, those in a row."""
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=MEASURED) for kind in (False, True)}
        """Of the last transfers, those of plain bytes and those of differences."""
        self._within_s = {False: 0.0, True: 0.0}
        self._links: dict[str, _Link] = {}
        """Of the connected servers, by session."""

    def answer(self, request: SourceRequest) -> Source | Error | None:
        """Name the source of a version for a server; the same one again until it says that it has failed. None: it
        waits, for a second at most; call again when others have asked."""
        version = request.version
        try:
            self._publication.check_is_meant(request.publication)
            manifest = self._publication.manifest(version)
        except ProtocolError as error:
            return Error(code=error.code, reason=error.reason, version=version)
        server_id = self._servers.of_session(request.session)
        if server_id is None:
            reason = "this session has not been welcomed: say hello first"
            return Error(code=ErrorCode.NOT_WELCOME, reason=reason, version=version)
        keys = self._peer_keys()
        tree = self._tree(manifest)
        node = self._join(tree, version, server_id, request, keys)
        if request.failure is not None:
            self._take_failure(tree, server_id, node, request.failure)
        if node.parent is None or not self._is_fed(tree, node.parent, server_id):
            if self._waits_for_fast(tree, node):
                return None
            self._attach(tree, server_id, node)
        self._open(tree, server_id)
        return self._named(version, tree, node, keys)

    def loaded(self, server_id: str, message: WeightsLoaded) -> None:
        """Note that a server has a version whole, and its source a free place."""
        tree = self._trees.get(message.version)
        node = tree.nodes.get(server_id) if tree else None
        if tree is None or node is None or message.channel != "zmq" or node.is_complete:
            return
        node.is_complete = True
        if node.parent != LEARNER:
            self._failures.pop(server_id, None)
        self._release(tree, server_id, node)
        if not node.failed:
            node.seconds = time.monotonic() - node.fed_at - message.load_s
            self._compare(tree, server_id)
            for child_id in node.fed:  # a message of theirs may have been quicker
                if tree.nodes[child_id].parent == server_id:
                    self._compare(tree, child_id)
        kind = node.passes_on is not None
        self._seconds[kind].append(message.transfer_s)
        ordered = sorted(self._seconds[kind])
        slow = SLOW_FACTOR * ordered[int(SLOW_QUANTILE * (len(ordered) - 1))]
        self._within_s[kind] = max(self._timeout_s, slow)

    def _tree(self, manifest: WeightManifest) -> _Tree:
        if manifest.version not in self._trees:
            published = self._publication.versions
            self._trees = {other: tree for other, tree in self._trees.items() if other in published}
            sessions = {server.hello.session for server in self._servers.connected.values()}
            self._links = {session: link for session, link in self._links.items() if session in sessions}
            before = {server_id for tree in self._trees.values() for server_id in tree.nodes}
            expected = {server_id for server_id in before if self._link(server_id).speed == FAST}
            self._trees[manifest.version] = _Tree(manifest, expected=expected)
        return self._trees[manifest.version]

    def _link(self, server_id: str) -> _Link:
        server = self._servers.connected.get(server_id)
        return self._links.setdefault(server.hello.session, _Link()) if server else _Link()

    def _compare(self, tree: _Tree, server_id: str) -> None:
        """Look whether a server had a version about as soon as its source; else one of the two is slow."""
        node, link = tree.nodes[server_id], self._link(server_id)
        if node.seconds is None or node.kept_up is not None:
            return
        if node.parent == LEARNER:
            least_s = tree.least_s[node.passes_on] = min(tree.least_s.get(node.passes_on, math.inf), node.seconds)
            node.kept_up = not _is_late(node.seconds, least_s)
            link.downlink = FAST if node.kept_up else _log2(tree.manifest.total_bytes / node.seconds)
            return
        source = tree.nodes.get(node.parent or LEARNER)
        if source is None or source.seconds is None or source.passes_on != node.passes_on:
            return
        node.kept_up = not _is_late(node.seconds, source.seconds)
        if not node.kept_up:
            self._blame(tree, server_id, node.seconds)
        elif source.kept_up:
            link.downlink, link.held_up_by = FAST, ""
            self._link(node.parent or LEARNER).keep_up()

    def _blame(self, tree: _Tree, server_id: str, seconds: float) -> None:
        """Take a server's transfer from another one that was late: its own fault where others kept up with the same
        source, or where another source's version was late here before; else the source's."""
        node, link = tree.nodes[server_id], self._link(server_id)
        source_id = node.parent or LEARNER
        source, before, link.held_up_by = tree.nodes[source_id], link.held_up_by, source_id
        if before not in ("", source_id) or any(tree.nodes[other].kept_up for other in source.fed):
            link.downlink = _log2(tree.manifest.total_bytes / seconds)
        else:
            speed = _log2(tree.manifest.total_bytes * source.fed_most / seconds)
            if self._link(source_id).hold_up(tree.manifest.version, speed):
                logger.info("%s is slow at sending weights on: others come first", source_id)

    def _waits_for_fast(self, tree: _Tree, node: _Node) -> bool:
        """Whether a server that may be slow waits for fast ones: each that has not asked yet finds a place first."""
        if node.speed == FAST or not tree.expected or time.monotonic() - node.asked_at > WAITS_S:
            return False
        fast = (each for each in tree.nodes.values() if each.speed == FAST and each.endpoint)
        return sum(self._fan_out - len(each.children) for each in fast) <= len(tree.expected)

    def _join(self, tree: _Tree, version: int, server_id: str, request: SourceRequest, keys: Collection[str]) -> _Node:
        """The server's node. It is new where the server is, or another process of its name."""
        for other, elsewhere in self._trees.items():
            if other != version and server_id in elsewhere.nodes:
                elsewhere.nodes[server_id].has_left = True
        has_key = self._known_keys is None or request.key in keys
        endpoint = request.endpoint if has_key and _is_endpoint(request.endpoint) else ""
        node = tree.nodes.get(server_id)
        if node is None or node.endpoint != endpoint:
            speed = self._link(server_id).speed
            node = tree.nodes[server_id] = _Node(endpoint, request.key, speed=speed, asked_at=time.monotonic())
            tree.expected.discard(server_id)
        node.has_left = node.is_complete = False
        node.base = request.base
        return node

    def _take_failure(self, tree: _Tree, server_id: str, node: _Node, failure: SourceFailure) -> None:
        """Never name this source to this server again for this version; one that has lied to nobody at all."""
        if node.parent in (None, LEARNER) or node.parent != failure.server_id:
            return  # the answer has crossed the question
        source, reason = failure.server_id, failure.reason
        level = logging.INFO if reason == "gone" else logging.WARNING
        logger.log(level, "%s got no weights from %s (%s)", server_id, source, reason)
        if reason != "gone":  # it has gone on to newer versions, which is no fault
            self._servers.count_error(f"relay_{reason}")
            self._failures.setdefault(server_id, []).append(time.monotonic())
        feeder = tree.nodes.get(source)
        if reason == "slow" and feeder is not None and feeder.seconds is not None:
            self._blame(tree, server_id, time.monotonic() - node.fed_at)
        node.failed.add(source)
        self._release(tree, server_id, node)
        node.parent = None
        if reason == "checksum" and source in self._servers.connected:
            self._liars[source] = self._servers.connected[source].hello.session
            logger.error(
                "%s sends weights with wrong checksums: no server is sent to it any more. Look at its memory and its "
                "network; what it has loaded itself was verified",
                source,
            )

    def _release(self, tree: _Tree, server_id: str, node: _Node) -> None:
        """Free the place that a server has at its source."""
        if node.parent in tree.nodes:
            tree.nodes[node.parent].children.discard(server_id)
            self._open(tree, node.parent)

    def _open(self, tree: _Tree, server_id: str) -> None:
        """Put a server into the queue of those that may have room, where it has any."""
        node = tree.nodes[server_id]
        if not node.is_queued and self._has_room(tree, server_id):
            node.is_queued = True
            tree.open.setdefault(node.speed, deque()).append(server_id)

    def _attach(self, tree: _Tree, server_id: str, node: _Node) -> None:
        """Give a server its source."""
        self._release(tree, server_id, node)
        node.parent, named, node.fed_at = LEARNER, "learner", time.monotonic()
        can_difference = self._sends_differences and node.base in self._publication.versions
        node.passes_on = node.base if can_difference else None
        failures = self._failures.get(server_id, [])
        if failures and time.monotonic() - failures[-1] > FAILED_S:
            failures.clear()
        if len(failures) >= MOST_FAILURES:
            named = "learner_instead"
        elif not node.failed and tree.from_learner[node.passes_on] < self._fan_out:
            # So many with each base: those with the same one send its differences on to each other.
            tree.from_learner[node.passes_on] += 1
        elif self._fan_out:
            parent = self._free_place(tree, server_id, node)
            named = "learner_instead" if parent is None else "server"
            if parent is not None:
                node.parent = parent
                if tree.nodes[parent].passes_on != node.base:
                    node.passes_on = None
                source = tree.nodes[parent]
                source.children.add(server_id)
                source.fed.add(server_id)
                source.fed_most = max(source.fed_most, len(source.children))
        self.named[named] += 1

    def _free_place(self, tree: _Tree, server_id: str, node: _Node) -> str | None:
        """The server that joined first of the fastest with a free place, one that receives the same differences, or
        plain bytes as well, where there is any; those without a place leave their queue."""
        second = None
        for speed in sorted(tree.open, reverse=True):
            queue, passed = tree.open[speed], 0
            while passed < len(queue):
                candidate = queue[0]
                if not self._has_room(tree, candidate):
                    tree.nodes[queue.popleft()].is_queued = False
                    continue
                if candidate != server_id and candidate not in node.failed and self._is_fed(tree, candidate, server_id):
                    if tree.nodes[candidate].passes_on == node.passes_on:
                        return candidate
                    second = second or candidate
                queue.rotate(-1)
                passed += 1
        return second

    def _has_room(self, tree: _Tree, server_id: str) -> bool:
        node = tree.nodes[server_id]
        if node.has_left or not node.endpoint or server_id not in self._servers.connected:
            return False
        if self._liars.get(server_id) == self._servers.connected[server_id].hello.session:
            return False
        node.children = {child for child in node.children if child in self._servers.connected}
        return len(node.children) < self._fan_out

    def _is_fed(self, tree: _Tree, server_id: str, asking: str) -> bool:
        """Whether a server has the version, or receives it by a chain that does not hang on the asking one."""
        name: str | None = server_id
        for _ in range(len(tree.nodes) + 1):
            if name == LEARNER:
                return True
            node = tree.nodes.get(name) if name is not None else None
            if name is None or node is None or name == asking or name not in self._servers.connected:
                return False
            if node.is_complete:
                return True
            if node.has_left:
                return False
            name = node.parent
        return False

    def _peer_keys(self) -> tuple[str, ...]:
        if self._known_keys is not None and time.monotonic() - self._keys[0] > KEYS_EVERY_S:
            self._keys = (time.monotonic(), tuple(key.decode() for key in self._known_keys()))
        return self._keys[1]

    def _named(self, version: int, tree: _Tree, node: _Node, keys: tuple[str, ...]) -> Source:
        mine = keys if node.endpoint else ()
        parent = tree.nodes.get(node.parent or LEARNER)
        if not node.parent or parent is None:
            return Source(version=version, peer_keys=mine)
        return Source(
            version=version,
            server_id=node.parent,
            endpoint=parent.endpoint,
            key=parent.key,
            within_s=self._within_s[node.passes_on is not None],
            peer_keys=mine,
        )


def _is_late(seconds: float, source_s: float) -> bool:
    return seconds > max(HOLDS_UP * source_s, source_s + HOLDS_UP_S)


def _log2(bytes_s: float) -> float:
    return float(math.frexp(bytes_s)[1] - 1)


def _is_endpoint(text: str) -> bool:
    try:
        return bool(split_endpoint(text))
    except BindError:
        return False
