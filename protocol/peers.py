"""Per-peer budgets of bad messages and of messages at all; a peer beyond them is ignored for a while.

A connection over its budget is *muted*: what it sends is dropped without being decoded. The others lose nothing:
ZeroMQ takes messages from its connections in turns.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_ACCOUNTS = 4096
"""Connections remembered; beyond it the longest silent one is forgotten."""


@dataclass(frozen=True)
class PeerLimits:
    """Budget of one connection."""

    bad_messages: int = 16
    """Undecodable messages and refused groups per `interval_s`."""
    messages: int = 20_000
    """Messages per `interval_s`, good or bad."""
    interval_s: float = 10.0
    mute_s: float = 60.0
    """Seconds in which everything from a muted peer is dropped."""


@dataclass(frozen=True)
class Muted:
    """This connection has just used up its budget."""

    identity: bytes
    reason: str


@dataclass
class _Account:
    since: float
    messages: int = 0
    bad: int = 0
    muted_until: float = 0.0


class PeerBudget:
    """Accounts of all connections. Not thread-safe."""

    def __init__(self, limits: PeerLimits | None = None, clock: Callable[[], float] = time.monotonic):
        self.limits = limits or PeerLimits()
        self._clock = clock
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()

    def is_muted(self, identity: bytes) -> bool:
        account = self._accounts.get(identity)
        return account is not None and self._clock() < account.muted_until

    def count(self, identity: bytes) -> Muted | None:
        """Count one message that has arrived."""
        account = self._account(identity)
        account.messages += 1
        if account.messages <= self.limits.messages:
            return None
        return self._mute(identity, account, f"{account.messages:,} messages")

    def charge(self, identity: bytes) -> Muted | None:
        """Count one message that could not be used."""
        account = self._account(identity)
        account.bad += 1
        if account.bad < self.limits.bad_messages:
            return None
        return self._mute(identity, account, f"{account.bad:,} unusable messages")

    def _account(self, identity: bytes) -> _Account:
        now = self._clock()
        account = self._accounts.setdefault(identity, _Account(since=now))
        self._accounts.move_to_end(identity)
        if len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        if now - account.since >= self.limits.interval_s:
            account.since, account.messages, account.bad = now, 0, 0
        return account

    def _mute(self, identity: bytes, account: _Account, what: str) -> Muted:
        seconds = self._clock() - account.since
        account.muted_until = self._clock() + self.limits.mute_s
        account.messages = account.bad = 0
        return Muted(
            identity, f"it sent {what} in {seconds:.1f} s; what it sends is ignored for {self.limits.mute_s:g} s"
        )
