"""Choice of each server's source of a version over ZeroMQ: a tree for each version.

The learner sends a version to the first `network.weights_fan_out` servers that ask; each later one gets it from a
server that is receiving it or has it, and that sends it to fewer than that. So the learner sends each byte to so many
servers however many there are, and the way to the last one grows with the logarithm of their number. A server that
says that its source has failed gets another one, and what it has stays; the learner itself is the last resort.

Places behind fast servers are given first (`link_speeds.py`), and where they are the tree knows (`weight_tree.py`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection

from learner.network.link_speeds import LinkSpeeds
from learner.network.servers import Servers
from learner.network.weight_tree import FAST, LEARNER, Node, Tree
from protocol.endpoints import BindError, split_endpoint
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Error, Source, SourceFailure, SourceRequest, WeightManifest, WeightsLoaded
from protocol.weights import Publication

logger = logging.getLogger(__name__)

MOST_FAILURES, FAILED_S = 3, 600.0
"""Sources in a row that fail one server: it reaches no other, and gets all from the learner for so many seconds."""
SLOW_FACTOR, SLOW_QUANTILE, MEASURED = 4.0, 0.95, 256
"""A transfer is slow when it takes so much longer than this quantile of the last so many."""
KEYS_EVERY_S = 1.0
"""Longest age of the known list of servers' public keys."""


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
        self._trees: dict[int, Tree] = {}
        self._liars: dict[str, str] = {}
        """Servers, with their sessions, that have sent bytes with wrong checksums: nobody is sent to them."""
        self._failures: dict[str, list[float]] = {}
        """Times of a server's consecutive failed transfers, by source."""
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=MEASURED) for kind in (False, True)}
        """Seconds of the last transfers, of plain bytes and of differences."""
        self._within_s = {False: 0.0, True: 0.0}
        self._speeds = LinkSpeeds(servers)

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
        if node.parent is None or not tree.is_fed(node.parent, server_id):
            if tree.waits_for_fast(node):
                return None
            self._choose_source(tree, server_id, node)
        tree.open(server_id)
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
        tree.release(server_id, node)
        if not node.failed:
            self._speeds.measure(tree, server_id, time.monotonic() - node.fed_at - message.load_s)
        kind = node.passes_on is not None
        self._seconds[kind].append(message.transfer_s)
        ordered = sorted(self._seconds[kind])
        slow = SLOW_FACTOR * ordered[int(SLOW_QUANTILE * (len(ordered) - 1))]
        self._within_s[kind] = max(self._timeout_s, slow)

    def _tree(self, manifest: WeightManifest) -> Tree:
        if manifest.version not in self._trees:
            published = self._publication.versions
            self._trees = {other: tree for other, tree in self._trees.items() if other in published}
            self._speeds.keep_connected()
            before = {server_id for tree in self._trees.values() for server_id in tree.nodes}
            expected = {server_id for server_id in before if self._speeds.of(server_id) == FAST}
            self._trees[manifest.version] = Tree(manifest, self._fan_out, self._servers, self._liars, expected)
        return self._trees[manifest.version]

    def _join(self, tree: Tree, version: int, server_id: str, request: SourceRequest, keys: Collection[str]) -> Node:
        """The server's node. It is new where the server is, or another process of its name."""
        for other, elsewhere in self._trees.items():
            if other != version and server_id in elsewhere.nodes:
                elsewhere.nodes[server_id].has_left = True
        has_key = self._known_keys is None or request.key in keys
        endpoint = request.endpoint if has_key and _is_endpoint(request.endpoint) else ""
        node = tree.nodes.get(server_id)
        if node is None or node.endpoint != endpoint:
            node = tree.nodes[server_id] = Node(endpoint, request.key, self._speeds.of(server_id), time.monotonic())
            tree.expected.discard(server_id)
        node.has_left = node.is_complete = False
        node.base = request.base
        return node

    def _take_failure(self, tree: Tree, server_id: str, node: Node, failure: SourceFailure) -> None:
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
            self._speeds.blame(tree, server_id, time.monotonic() - node.fed_at)
        node.failed.add(source)
        tree.release(server_id, node)
        node.parent = None
        if reason == "checksum" and source in self._servers.connected:
            self._liars[source] = self._servers.connected[source].hello.session
            logger.error(
                "%s sends weights with wrong checksums: no server is sent to it any more. Look at its memory and its "
                "network; what it has loaded itself was verified",
                source,
            )

    def _choose_source(self, tree: Tree, server_id: str, node: Node) -> None:
        """Give a server its source."""
        tree.release(server_id, node)
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
            parent = tree.free_place(server_id, node)
            named = "learner_instead" if parent is None else "server"
            if parent is not None:
                tree.attach(server_id, node, parent)
                if tree.nodes[parent].passes_on != node.base:
                    node.passes_on = None
        self.named[named] += 1

    def _peer_keys(self) -> tuple[str, ...]:
        if self._known_keys is not None and time.monotonic() - self._keys[0] > KEYS_EVERY_S:
            self._keys = (time.monotonic(), tuple(key.decode() for key in self._known_keys()))
        return self._keys[1]

    def _named(self, version: int, tree: Tree, node: Node, keys: tuple[str, ...]) -> Source:
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


def _is_endpoint(text: str) -> bool:
    try:
        return bool(split_endpoint(text))
    except BindError:
        return False
