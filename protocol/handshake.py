"""The answer to a `hello`, welcome or refusal, and budgets of messages per peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import ErrorCode
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Refusal

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


def check_hello(
    hello: Hello,
    *,
    model_fingerprint: str,
    processor_fingerprint: str,
    base_fingerprint: str = "",
    quantization: str = "",
    scoring: Mapping[str, str] | None = None,
    live_server_ids: Mapping[str, str],
) -> Refusal | None:
    """Refuse a server that does not fit a learner of these fingerprints; None if it fits.

    `live_server_ids` maps the id of each welcomed, living server to its session: the same session again is a
    reconnection and fine, another session is a second process that took the id.
    """
    server = f"server {hello.server_id!r}"
    if hello.protocol_major != PROTOCOL_MAJOR:
        return refuse_other_protocol(hello.model_dump())
    if hello.model_fingerprint != model_fingerprint:
        return Refusal(
            code=ErrorCode.MODEL_MISMATCH,
            reason=f"{server} loaded a model with fingerprint {hello.model_fingerprint}, "
            f"the learner's is {model_fingerprint}: parameter names, shapes or dtypes differ",
            fix="Start both with the same resolved configuration: the same model path, revision, dtype and model.lora; "
            "name model.dtype where it is auto and not every machine has a GPU",
        )
    if hello.base_fingerprint != base_fingerprint:
        return Refusal(
            code=ErrorCode.MODEL_MISMATCH,
            reason=f"{server} holds base weights with fingerprint {hello.base_fingerprint or 'unknown'}, the learner's "
            f"are {base_fingerprint or 'published whole'}: an adapter on another base is another policy",
            fix="Copy the learner's model folder (its *.safetensors files) to the server, and start it again",
        )
    if hello.quantization != quantization:
        return Refusal(
            code=ErrorCode.MODEL_MISMATCH,
            reason=f"{server} samples with weights of quantization {hello.quantization!r}, the learner "
            f"expects {quantization!r}: its check of log-probs and its correction are for that",
            fix="Start both with the same rollout.quantization and model.quantization",
        )
    if hello.processor_fingerprint != processor_fingerprint:
        return Refusal(
            code=ErrorCode.PROCESSOR_MISMATCH,
            reason=f"{server} has a processor with fingerprint {hello.processor_fingerprint}, "
            f"the learner's is {processor_fingerprint}: tokenizer, image processor or chat template differ",
            fix="Use the same model files, model.min_pixels, model.max_pixels, data.chat_template_kwargs and "
            "transformers version on both sides",
        )
    mine = scoring or {}  # a file that one side alone has on its machine tells nothing
    if other := [f"{name} is not what the run has" for name, its in hello.scoring if mine.get(name, its) != its]:
        return Refusal(
            code=ErrorCode.REWARD_MISMATCH,
            reason=f"{server} would score by something else than the run: {'; '.join(other)}",
            fix="Put back what the run has and start the server again, which reads files anew; or take what is there "
            "now: end the run, and start it with --resume --accept-changes",
        )
    session = live_server_ids.get(hello.server_id)
    if session is not None and session != hello.session:
        return Refusal(
            code=ErrorCode.DUPLICATE_SERVER,
            # The living one's session is not told: with it this one could pass for a reconnection.
            reason=f"{server} is already connected; this one has session {hello.session} (pid {hello.pid})",
            fix="Give each rollout server an id of its own; after a crash wait until the old one is gone",
        )
    return None


def check_mode(hello: Hello, mode: str, tenant: Hello | None) -> Refusal | None:
    """Refuse a server of another trainer.mode, or a second one beside the living `tenant`; None if it fits."""
    server = f"server {hello.server_id!r}"
    if hello.mode != mode:
        return Refusal(
            code=ErrorCode.MODE_MISMATCH,
            reason=f"{server} runs in {hello.mode} mode, the learner in {mode} mode: they would use one device at "
            "once, or wait for each other for ever",
            fix="Start both with the same trainer.mode",
        )
    if mode == "sync" and tenant is not None:
        return Refusal(
            code=ErrorCode.DUPLICATE_SERVER,
            reason=f"{server} is the second one: in sync mode the learner shares its device with one, which is "
            f"{tenant.server_id!r}",
            fix="Stop one of them, or train with trainer.mode=async",
        )
    return None


def refuse_other_protocol(header: Mapping[str, Any]) -> Refusal | None:
    """Refuse a hello of another protocol major, whose other fields may not fit our model of it.

    None if `header` is anything else.
    """
    major, minor = header.get("protocol_major"), header.get("protocol_minor")
    if header.get("type") != "hello" or not isinstance(major, int) or major == PROTOCOL_MAJOR:
        return None
    server = f"server {str(header.get('server_id'))[:200]!r}"
    older = "server" if major < PROTOCOL_MAJOR else "learner"
    return Refusal(
        code=ErrorCode.PROTOCOL_VERSION,
        reason=f"{server} speaks protocol {major}.{minor if isinstance(minor, int) else 0}, the learner speaks "
        f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        fix=f"Upgrade the {older}: both sides need the same major protocol version",
    )
