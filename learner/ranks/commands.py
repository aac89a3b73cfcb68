"""Commands: what rank 0 tells the other ranks to do next, so that all are in the same collective. Reasons: what ranks
that end tell the others, who may be on other machines, where nobody sees their logs.

A command is a small MessagePack map in the ranks' store; groups follow as one broadcast. While rank 0 waits for groups
it gives none, for minutes: it says that it is alive, and a rank that hears nothing ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from asyncrl.errors import BadStateError, RestartError, UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from protocol.codec import MIB, Limits, decode, encode
from protocol.messages import Group, Tickets, Wire

ALIVE = "alive"
LONGEST_POLL_S, SHARE_OF_WAIT = 0.05, 0.05
"""A waiting rank looks for a command after this share of the time that it has waited already, at least so often. The
store's own wait would log each time that it has ended."""
LARGEST = Limits(max_message_bytes=1 << 40, max_header_bytes=256 * MIB, max_frames=1 << 20)
"""Groups were within the network's limits when they came in."""


@dataclass(frozen=True)
class RankCommand:
    kind: str
    values: dict[str, Any]


class CommandChannel:
    """Commands by their number. Rank 0 gives them, the others take each once."""

    def __init__(
        self,
        store: Store,
        *,
        leads: bool,
        every_s: float,
        silence_s: float,
        start_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ):
        """`silence_s`: time after which rank 0 counts as gone, which says every `every_s` that it is there, once it has
        looked at its run, for which it has `start_s`. `check` raises why rank 0 gives no command any more."""
        self._store = store
        self._silence_s, self._start_s = silence_s, start_s
        self._check = check
        self._number = 0
        self._over = threading.Event()
        if leads:
            self._store.set(ALIVE, "0")
            threading.Thread(target=self._stay_alive, args=(every_s,), name="ranks-alive", daemon=True).start()

    def give(self, kind: str, **values: Any) -> None:
        self._number += 1
        command: Any = _packed({"kind": kind, "values": values})  # bytes, which the stub of torch does not know
        self._store.set(_key(self._number), command)

    def take(self) -> RankCommand:
        """Wait for the next command. Raises what `check` does, and BadStateError when rank 0 has gone."""
        self._number += 1
        key, heard, began = _key(self._number), b"", time.monotonic()
        heard_at = began
        while True:
            try:
                if self._store.check([key]):
                    break
                self._check()
                alive = self._store.get(ALIVE) if heard or self._store.check([ALIVE]) else heard
            except RuntimeError as problem:  # the connection
                raise BadStateError(f"rank 0 has gone: {str(problem).partition(chr(10))[0]}") from None
            if alive != heard:
                heard, heard_at = alive, time.monotonic()
            elif time.monotonic() - heard_at > (self._silence_s if heard else self._start_s):
                wait = f"{self._silence_s:g} s (network.timeout_s)"
                raise BadStateError(
                    f"rank 0 has said nothing for {wait if heard else f'{self._start_s:g} s (learner.wait_timeout_s)'}"
                )
            time.sleep(min(LONGEST_POLL_S, SHARE_OF_WAIT * (time.monotonic() - began)))
        command = msgpack.unpackb(self._store.get(key), strict_map_key=False)
        return RankCommand(command["kind"], command["values"])

    def close(self) -> None:
        self._over.set()

    def _stay_alive(self, every_s: float) -> None:
        beats = 0
        while not self._over.wait(every_s):
            beats += 1
            try:
                self._store.set(ALIVE, str(beats))
            except RuntimeError:  # the end of the run
                return


def _key(number: int) -> str:
    return f"command {number}"


def pack_groups(received: Sequence[ReceivedGroup]) -> bytes:
    """Groups with their tickets and encoded images, as MessagePack. Pixels are computed where they are needed."""
    return _packed(
        [
            {
                "tickets": _frames(
                    Tickets(
                        tickets=(item.ticket,),
                        blobs={digest: memoryview(data) for digest, data in item.prepared.blobs.items()},
                    )
                ),
                "slot": asdict(item.slot),
                "group": _frames(item.group),
                "is_replayed": item.is_replayed,
            }
            for item in received
        ]
    )


def unpack_groups(data: bytes, processor: PromptProcessor) -> list[ReceivedGroup]:
    """Raises ProtocolError where they are not what `pack_groups` has made."""
    received: list[ReceivedGroup] = []
    bridge: TurnBridge | None = None
    for item in msgpack.unpackb(data):
        tickets, group = decode(item["tickets"], Tickets, LARGEST), decode(item["group"], Group, LARGEST)
        assert isinstance(tickets, Tickets)
        assert isinstance(group, Group)
        blobs = {digest: bytes(data) for digest, data in tickets.blobs.items()}
        ticket = tickets.tickets[0]
        if ticket.conversation and bridge is None:
            bridge = TurnBridge(processor, ticket.sampling.stop_token_ids)
        prepared = PreparedTicket(ticket, blobs, TicketSlot(**item["slot"]), None, bridge)
        received.append(ReceivedGroup(prepared, group, is_replayed=item["is_replayed"]))
    return received


def _frames(message: Wire) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def _packed(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


Reason = UserError | BadStateError | RestartError
REASONS = (UserError, BadStateError, RestartError)
REASON_POLL_S = 0.05
PATIENCE_S = 1.0
"""A collective fails on a rank's connections a moment before its reason is in the store, or it is seen to be gone."""
HEARING_S = 60.0
"""Time of the other ranks to hear why rank 0 ends: one on a slow or busy machine may still be at its imports."""


class Reasons:
    """Reasons that the user, a state or the memory has caused. A rank that was killed has none here."""

    def __init__(self, store: Store, rank: int):
        self._store = PrefixStore("reasons", store)
        self._rank = rank

    def say(self, error: Reason) -> None:
        kind = next(number for number, kind in enumerate(REASONS) if isinstance(error, kind))
        with suppress(DistError, RuntimeError):  # rank 0 has gone with the store
            self._store.set(str(self._rank), json.dumps([kind, str(error)]))

    def of(self, rank: int) -> Reason | None:
        """Reason that a rank reported before it ended."""
        with suppress(DistError, RuntimeError):
            if self._store.check([str(rank)]):
                kind, reason = json.loads(self._store.get(str(rank)))
                self._store.set(_heard(self._rank), "")
                return REASONS[kind](f"rank {rank}: {reason}")
        return None

    def say_to_all(self, error: Reason, size: int) -> None:
        """Say it, and wait until each rank has heard it or ends for a reason of its own: this one may take the store
        with it."""
        self.say(error)
        deadline, others = time.monotonic() + HEARING_S, range(1, size)
        with suppress(DistError, RuntimeError):
            while time.monotonic() < deadline and not all(self._knows(rank) for rank in others):
                time.sleep(REASON_POLL_S)

    def _knows(self, rank: int) -> bool:
        return self._store.check([_heard(rank)]) or self._store.check([str(rank)])

    def wait_for_one(self, ranks: Iterable[int]) -> Reason | None:
        """Reason that one of the ranks reports within PATIENCE_S, after a collective has failed."""
        deadline, others = time.monotonic() + PATIENCE_S, list(ranks)
        while time.monotonic() < deadline:
            if said := next(filter(None, map(self.of, others)), None):
                return said
            time.sleep(REASON_POLL_S)
        return None


def _heard(rank: int) -> str:
    return f"heard by {rank}"
