"""The tree that each version travels along over ZeroMQ: from which peer a server pulls it.

The learner sends a version to the first `rollout.relay.fan_out` servers that ask. Each later server pulls it from one
that is receiving it or has it. No server sends a version to more than `rollout.relay.fan_out` others: the learner sends
each byte to so many servers, however many there are, and the depth grows with the logarithm of their number. A server
whose source fails keeps what has arrived, and pulls the rest from the learner.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from asyncrl.config.service_sections import RolloutConfig
from asyncrl_plugins.relays.plugin import RelayConfig
from learner.network.servers import Servers
from protocol.endpoints import BindError, split_endpoint
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Error, Source, SourceFailure, SourceRequest
from protocol.weights import Publication

logger = logging.getLogger(__name__)

LEARNER = ""
"""The learner in the place of a server's id."""
KEYS_EVERY_S = 1.0
"""Longest age of the known list of servers' public keys."""


@dataclass
class Node:
    """A server that pulls a version, or has it."""

    endpoint: str
    """Endpoint at which it sends the version on; empty: nowhere."""
    key: str
    parent: str = LEARNER
    children: int = 0
    """Servers that were sent to it."""


@dataclass
class Tree:
    """Places of one version. A place is given once: who comes back asks the learner."""

    nodes: dict[str, Node] = field(default_factory=dict)
    open: deque[str] = field(default_factory=deque)
    """Servers that may have a free place, those that joined first at the front."""
    from_learner: int = 0


class WeightTree:
    """Used by the network thread; other threads may read the counters."""

    def __init__(
        self,
        fan_out: int,
        servers: Servers,
        publication: Publication,
        known_keys: Callable[[], Collection[bytes]] | None = None,
    ):
        """`known_keys`: public keys of the servers that may connect; None without keys."""
        self.named: Counter[str] = Counter()
        """Answers by the source they name: `learner`, `server`, and `learner_instead` where a server has failed."""
        self._fan_out = fan_out
        self._servers = servers
        self._publication = publication
        self._known_keys = known_keys
        self._keys: tuple[float, tuple[str, ...]] = (float("-inf"), ())
        self._trees: dict[int, Tree] = {}

    def answer(self, request: SourceRequest) -> Source | Error:
        """Name the source of a version for a server: the same one again until the server says that it has failed."""
        version = request.version
        try:
            self._publication.check_is_meant(request.publication)
            self._publication.manifest(version)
        except ProtocolError as error:
            return Error(code=error.code, reason=error.reason, version=version)
        server_id = self._servers.of_session(request.session)
        if server_id is None:
            reason = "this session has not been welcomed: say hello first"
            return Error(code=ErrorCode.NOT_WELCOME, reason=reason, version=version)
        keys = self._peer_keys()
        tree = self._tree(version)
        has_key = self._known_keys is None or request.key in keys
        endpoint = request.endpoint if has_key and _is_endpoint(request.endpoint) else ""
        node = tree.nodes.get(server_id)
        if node is None or node.endpoint != endpoint:  # it is new, or another process of its name
            node = self._join(tree, server_id, Node(endpoint, request.key))
        if request.failure is not None and node.parent == request.failure.server_id:
            self._take_failure(server_id, node, request.failure)
        peer_keys = keys if endpoint else ()
        parent = tree.nodes.get(node.parent)
        if parent is None:
            return Source(version=version, peer_keys=peer_keys)
        return Source(
            version=version, server_id=node.parent, endpoint=parent.endpoint, key=parent.key, peer_keys=peer_keys
        )

    def _tree(self, version: int) -> Tree:
        if version not in self._trees:
            published = self._publication.versions
            self._trees = {other: tree for other, tree in self._trees.items() if other in published}
            self._trees[version] = Tree()
        return self._trees[version]

    def _join(self, tree: Tree, server_id: str, node: Node) -> Node:
        """Put a server into the tree, behind the learner or the first server with a free place."""
        tree.nodes[server_id] = node
        if tree.from_learner >= self._fan_out:
            node.parent = self._free_place(tree, server_id)
        tree.from_learner += node.parent == LEARNER
        self.named["server" if node.parent else "learner"] += 1
        if node.endpoint:
            tree.open.append(server_id)
        return node

    def _free_place(self, tree: Tree, server_id: str) -> str:
        """Take a place behind another server, and else behind the LEARNER."""
        while tree.open:
            name = tree.open[0]
            other = tree.nodes[name]
            if name != server_id and name in self._servers.connected and other.children < self._fan_out:
                other.children += 1
                return name
            tree.open.popleft()
        return LEARNER

    def _take_failure(self, server_id: str, node: Node, failure: SourceFailure) -> None:
        """Send a server whose source has failed to the learner."""
        level = logging.INFO if failure.reason == "gone" else logging.WARNING
        logger.log(level, "%s got no weights from %s (%s)", server_id, failure.server_id, failure.reason)
        if failure.reason != "gone":  # it has gone on to newer versions, which is no fault
            self._servers.count_error(f"relay_{failure.reason}")
        node.parent = LEARNER
        self.named["learner_instead"] += 1

    def _peer_keys(self) -> tuple[str, ...]:
        if self._known_keys is not None and time.monotonic() - self._keys[0] > KEYS_EVERY_S:
            self._keys = (time.monotonic(), tuple(key.decode() for key in self._known_keys()))
        return self._keys[1]


def open_tree(
    rollout: RolloutConfig,
    servers: Servers,
    publication: Publication,
    known_keys: Callable[[], Collection[bytes]] | None,
) -> WeightTree:
    """The learner's end of the channel (`asyncrl.config.parts`)."""
    return WeightTree(rollout.settings_of(RelayConfig).fan_out, servers, publication, known_keys)


def _is_endpoint(text: str) -> bool:
    try:
        return bool(split_endpoint(text))
    except BindError:
        return False
