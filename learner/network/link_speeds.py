"""How fast servers send weights on, by how long each and its source took for a version.

Servers that those behind them kept up with send the next versions on, and one that held them up is a leaf where the
others have places enough. No message says so: the learner compares how long a server and its source took.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from learner.network.servers import Servers
from learner.network.weight_tree import FAST, LEARNER, UNKNOWN, Tree

logger = logging.getLogger(__name__)

HOLDS_UP, HOLDS_UP_S = 2.0, 0.5
"""A transfer that takes so much longer than its source's own, and so many seconds longer, was held up on the way."""
SLOW_UPLINK_S = 600.0
"""How long a server is no source that held others up: as a leaf it is not measured again."""


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
        """Speed that servers behind this one can expect."""
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


class LinkSpeeds:
    """Link speeds of the connected servers, by session. Used by the network thread."""

    def __init__(self, servers: Servers):
        self._servers = servers
        self._links: dict[str, _Link] = {}

    def of(self, server_id: str) -> float:
        """Speed that servers behind this one can expect: FAST, UNKNOWN, or log2 of bytes a second."""
        return self._link(server_id).speed

    def keep_connected(self) -> None:
        """Forget processes that have gone."""
        sessions = {server.hello.session for server in self._servers.connected.values()}
        self._links = {session: link for session, link in self._links.items() if session in sessions}

    def measure(self, tree: Tree, server_id: str, seconds: float) -> None:
        """Note how long a version took to a server, from its one source."""
        node = tree.nodes[server_id]
        node.seconds = seconds
        self._compare(tree, server_id)
        for child_id in node.fed:  # a message of theirs may have been quicker
            if tree.nodes[child_id].parent == server_id:
                self._compare(tree, child_id)

    def blame(self, tree: Tree, server_id: str, seconds: float) -> None:
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

    def _compare(self, tree: Tree, server_id: str) -> None:
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
            self.blame(tree, server_id, node.seconds)
        elif source.kept_up:
            link.downlink, link.held_up_by = FAST, ""
            self._link(node.parent or LEARNER).keep_up()

    def _link(self, server_id: str) -> _Link:
        server = self._servers.connected.get(server_id)
        return self._links.setdefault(server.hello.session, _Link()) if server else _Link()


def _is_late(seconds: float, source_s: float) -> bool:
    return seconds > max(HOLDS_UP * source_s, source_s + HOLDS_UP_S)


def _log2(bytes_s: float) -> float:
    return float(math.frexp(bytes_s)[1] - 1)
