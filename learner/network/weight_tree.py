"""The tree that one version travels along: who gets it from whom, and where there is room for one more.

A server has room for `fan_out` others while it is connected, can be reached, and keeps the version. The fastest come
first, and of those that are equally fast the one that joined first.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from learner.network.servers import Servers
from protocol.messages import WeightManifest

LEARNER = ""
"""The learner in the place of a server's id."""
FAST, UNKNOWN = math.inf, 100.0
"""Speeds of servers that have kept those behind them up, and that have not been sources; above all logarithms."""
WAITS_S = 1.0
"""Longest time that a server waits for a place behind those that are known to be fast."""


@dataclass
class Node:
    """A server that fetches a version, or has it."""

    endpoint: str
    key: str
    speed: float
    """Speed of the link at the request."""
    asked_at: float
    parent: str | None = None
    """The server that it fetches from, or the LEARNER; None: nobody yet, or the last one has failed."""
    is_queued: bool = False
    """True while in the tree's queue."""
    children: set[str] = field(default_factory=set)
    base: int | None = None
    """A version that it has in its memory."""
    passes_on: int | None = None
    """The version whose differences it receives, and may send on; None: it receives plain bytes."""
    is_complete: bool = False
    has_left: bool = False
    """True for a server that fetches another version now, and keeps this one for running transfers."""
    failed: set[str] = field(default_factory=set)
    """Servers that have failed this one."""
    fed_at: float = 0.0
    """Time at which its source was named."""
    seconds: float | None = None
    """From then until it had all; None: it has not, or had several sources."""
    fed: set[str] = field(default_factory=set)
    """Servers that have ever been its children."""
    fed_most: int = 0
    """Most children at the same time."""
    kept_up: bool | None = None
    """Whether it had all about as soon as its source."""


@dataclass
class Tree:
    """One version's."""

    manifest: WeightManifest
    fan_out: int
    servers: Servers
    liars: Mapping[str, str]
    """Servers, with their sessions, that nobody is sent to."""
    expected: set[str]
    """Fast servers that had a version before, and have not asked for this one."""
    nodes: dict[str, Node] = field(default_factory=dict)
    queues: dict[float, deque[str]] = field(default_factory=dict)
    """Servers that may have room for another child, by speed, those that joined first at the front."""
    least_s: dict[int | None, float] = field(default_factory=dict)
    """Shortest seconds of a transfer from the learner, by the base version of the difference."""
    from_learner: Counter[int | None] = field(default_factory=Counter)
    """Servers that were sent to the learner in the ordinary way, by the version whose differences they get."""

    def waits_for_fast(self, node: Node) -> bool:
        """Whether a server that may be slow waits for fast ones: each that has not asked yet finds a place first."""
        if node.speed == FAST or not self.expected or time.monotonic() - node.asked_at > WAITS_S:
            return False
        fast = (each for each in self.nodes.values() if each.speed == FAST and each.endpoint)
        return sum(self.fan_out - len(each.children) for each in fast) <= len(self.expected)

    def is_fed(self, server_id: str, asking: str) -> bool:
        """Whether a server has the version, or receives it by a chain that does not hang on the asking one."""
        name: str | None = server_id
        for _ in range(len(self.nodes) + 1):
            if name == LEARNER:
                return True
            node = self.nodes.get(name) if name is not None else None
            if name is None or node is None or name == asking or name not in self.servers.connected:
                return False
            if node.is_complete:
                return True
            if node.has_left:
                return False
            name = node.parent
        return False

    def free_place(self, server_id: str, node: Node) -> str | None:
        """The server that joined first of the fastest with a free place, one that receives the same differences, or
        plain bytes as well, where there is any; those without a place leave their queue."""
        second = None
        for speed in sorted(self.queues, reverse=True):
            queue, passed = self.queues[speed], 0
            while passed < len(queue):
                candidate = queue[0]
                if not self._has_room(candidate):
                    self.nodes[queue.popleft()].is_queued = False
                    continue
                if candidate != server_id and candidate not in node.failed and self.is_fed(candidate, server_id):
                    if self.nodes[candidate].passes_on == node.passes_on:
                        return candidate
                    second = second or candidate
                queue.rotate(-1)
                passed += 1
        return second

    def attach(self, server_id: str, node: Node, source_id: str) -> None:
        """Give a server a place at a source that is another server."""
        source = self.nodes[source_id]
        node.parent = source_id
        source.children.add(server_id)
        source.fed.add(server_id)
        source.fed_most = max(source.fed_most, len(source.children))

    def release(self, server_id: str, node: Node) -> None:
        """Free the place that a server has at its source."""
        if node.parent in self.nodes:
            self.nodes[node.parent].children.discard(server_id)
            self.open(node.parent)

    def open(self, server_id: str) -> None:
        """Put a server into the queue of those that may have room, where it has any."""
        node = self.nodes[server_id]
        if not node.is_queued and self._has_room(server_id):
            node.is_queued = True
            self.queues.setdefault(node.speed, deque()).append(server_id)

    def _has_room(self, server_id: str) -> bool:
        node = self.nodes[server_id]
        if node.has_left or not node.endpoint or server_id not in self.servers.connected:
            return False
        if self.liars.get(server_id) == self.servers.connected[server_id].hello.session:
            return False
        node.children = {child for child in node.children if child in self.servers.connected}
        return len(node.children) < self.fan_out
