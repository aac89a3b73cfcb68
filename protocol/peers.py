"""Per-peer budgets of bad messages and of messages at all; a peer beyond them is ignored for a while.

A connection over its budget is *muted*: what it sends is dropped without being decoded. The others lose nothing:
ZeroMQ takes messages from its connections in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_ACCOUNTS = 4096
"""Connections remembered; beyond it the longest silent one is forgotten."""


@dataclass(frozen=True)
class PeerLimits:
    """Budget of one connection."""

    bad_messages: int = 16
    """Undecodable messages, refused hellos and groups, and failures of tickets that it has not, per `interval_s`."""
    messages: int = 20_000
    """Messages per `interval_s`, good or bad."""
    interval_s: float = 10.0
    mute_s: float = 60.0
    """Seconds in which everything from a muted peer is dropped."""


@dataclass(frozen=True)
class Muted:
    """A connection that has just exceeded its budget."""

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
        self._accounts: dict[bytes, _Account] = {}

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
        account = self._accounts.pop(identity, None) or _Account(since=now)
        self._accounts[identity] = account  # the last one now
        if len(self._accounts) > MAX_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        if now - account.since >= self.limits.interval_s:
            account.since, account.messages, account.bad = now, 0, 0
        return account

    def _mute(self, identity: bytes, account: _Account, what: str) -> Muted:
        now = self._clock()
        account.muted_until = now + self.limits.mute_s
        account.messages = account.bad = 0
        mute = f"what it sends is ignored for {self.limits.mute_s:g} s"
        return Muted(identity, f"it sent {what} in {now - account.since:.1f} s; {mute}")
