"""The parity handshake, on the network thread: a server may have work while its log-probs equal the learner's.

A server that is welcomed gets *parity tickets*, at the newest published version, as soon as it holds no others. They
are outside of the ledger: they use no position in the data, and nothing of them is journaled. Their groups are
verified like all others and kept for the main thread, which compares them (`logprob_parity.py`) while it waits for
something, so that its weights are of its newest version. Groups of an older one are asked for again; no step begins
while a server that has loaded weights owes an answer, or a fast learner would never be at the version of the answer.

Caches, weights and adapters go stale at an update: a server is checked again at the next version, then after 2 more, 4,
8, and where a step's log-probs disagree. On policy it is idle then; else it goes on with what it has.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.errors import BadStateError, WaitTimeoutError
from learner.groups.group_verification import verify_answer
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.network.servers import Servers, ServerState
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_writer import PARITY_IDS
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Ack, Group, Refusal, TicketFailed, Tickets
from protocol.sockets import SLOWEST_TURN_S

logger = logging.getLogger(__name__)

OTHER_FIX = "See the log of the rollout server"


@dataclass
class ParityCheck:
    """The parity tickets of one server, and the groups that have come back for them."""

    server_id: str
    server: ServerState
    tickets: dict[int, PreparedTicket]
    waited_s: float = 0.0
    """Time in which the server could have answered, and had nothing else to do."""
    groups: dict[int, ReceivedGroup] = field(default_factory=dict)
    taken: bool = False
    """The main thread is comparing."""

    @property
    def is_complete(self) -> bool:
        return len(self.groups) == len(self.tickets)


@dataclass
class ParityHandshake:
    """Used by the network thread; `take_complete`, `has_complete` and `holds_step` by the main thread."""

    servers: Servers
    ledger: TicketLedger
    tickets: Sequence[PreparedTicket]
    """The rows that every server samples; without any, every server is aligned."""
    verify: Callable[..., None]
    """`verify_group` with those arguments that are the same for the whole run."""
    deadline_s: float
    can_answer: Callable[[ServerState], bool] = lambda server: True
    """Whether time counts towards the server's deadline now."""
    _checks: dict[str, ParityCheck] = field(default_factory=dict)
    _due: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Version of the next check, and versions from there to the one after, by id and session of an accepted server."""
    _first_id: int = field(default_factory=lambda: PARITY_IDS + (secrets.randbits(40) << 20))
    """Random: servers may still hold parity tickets of a learner before this one."""
    _num_issued: int = 0
    _last_turn_at: float = field(default_factory=time.monotonic)

    # --- the main thread's side -----------------------------------------------------------------

    def _complete(self) -> list[ParityCheck]:
        return [check for check in self._checks.values() if check.is_complete and not check.taken]

    @property
    def has_complete(self) -> bool:
        with self.ledger.changed:
            return bool(self._complete())

    def take_complete(self) -> list[ParityCheck]:
        """Take the checks whose groups have all come; each has to be accepted, repeated or refused."""
        with self.ledger.changed:
            complete = self._complete()
            for check in complete:
                check.taken = True
            return complete

    @property
    def holds_step(self) -> str | None:
        """Id of a server with a pending check, or None: until the check ends, weights must not change."""
        with self.ledger.changed:
            return next((name for name, check in self._checks.items() if check.server.loaded is not None), None)

    # --- the network thread's side ----------------------------------------------------------------

    def work(self) -> None:
        """Run one iteration: begin the checks of new servers, forget those of lost servers."""
        now = time.monotonic()
        elapsed_s = min(now - self._last_turn_at, SLOWEST_TURN_S)  # a stall of this process is no delay
        self._last_turn_at = now
        connected = self.servers.connected
        for server_id, check in list(self._checks.items()):
            if connected.get(server_id) is not check.server:
                self._forget(server_id)
                continue
            is_waited_for = self.can_answer(check.server) and not check.is_complete
            check.waited_s += elapsed_s if is_waited_for and not self.ledger.out.held_by(server_id) else 0
            if check.waited_s > self.deadline_s:
                reason = f"it has not answered its parity tickets for {self.deadline_s:g} s"
                self.refuse(check, reason, OTHER_FIX, WaitTimeoutError)
        for server_id, server in list(connected.items()):
            if server.refused or server_id in self._checks:
                continue
            due = self._due.get((server_id, server.hello.session))
            if not self.tickets or (due and not self._is_due(server_id, server, due[0])):
                server.aligned = True
            elif self.servers.manifest is not None and (due or not self.ledger.out.held_by(server_id)):
                server.aligned = False
                self._send(server_id, server)

    def _is_due(self, server_id: str, server: ServerState, version: int) -> bool:
        """Whether an accepted server is to be checked again, from that version on, and this disturbs nothing: the last
        bits of a training group depend on what runs beside it, and an evaluation needs all that keep its version."""
        newest, is_idle = self.servers.manifest, not self.ledger.out.held_by(server_id)
        if newest is None or newest.version < version or server.told != newest.version or self.ledger.evaluation:
            return False
        return is_idle or self.ledger.bound > 0

    def check_again(self) -> None:
        """Check every accepted server at the next chance, and then as if it were new."""
        self._due = dict.fromkeys(self._due, (0, 1))

    def _send(self, server_id: str, server: ServerState) -> None:
        tickets = [self._numbered(item) for item in self.tickets[: server.hello.max_groups]]
        check = ParityCheck(server_id, server, {item.ticket.ticket_id: item for item in tickets})
        with self.ledger.changed:
            self._checks[server_id] = check
        for item in tickets:
            blobs = {digest: memoryview(data) for digest, data in item.blobs.items()}
            if not self.servers.send(server_id, Tickets(tickets=(item.ticket,), blobs=blobs)):
                return  # it is lost, and forgotten at the next iteration

    def _numbered(self, item: PreparedTicket) -> PreparedTicket:
        """Renumber a ticket for the newest published version."""
        assert self.servers.manifest is not None
        number, version = self._first_id + self._num_issued, self.servers.manifest.version
        self._num_issued += 1
        ticket = item.ticket.model_copy(update={"ticket_id": number, "min_version": version})
        return replace(item, ticket=ticket, slot=replace(item.slot, ticket_id=number, version=version))

    def awaits(self, server_id: str, ticket_id: int) -> bool:
        """Whether this is a parity ticket of this server that has not been answered."""
        check = self._checks.get(server_id)
        return check is not None and ticket_id in check.tickets and ticket_id not in check.groups

    def was_issued(self, ticket_id: int) -> bool:
        """Whether this learner has issued the parity ticket: its group may come again after its check has ended."""
        return self._first_id <= ticket_id < self._first_id + self._num_issued

    def accept_group(self, server_id: str, group: Group) -> None:
        """Verify and keep the answer to a parity ticket; a wrong one refuses its server."""
        check = self._checks[server_id]
        prepared = check.tickets[group.ticket_id]
        try:
            newest = self.servers.version
            verify_answer(self.verify, group, prepared, sender=server_id, version=newest, components=())
        except ProtocolError as problem:
            self.refuse(check, problem.reason, "Start both services with the same configuration and library versions")
            return
        self.servers.send(server_id, Ack(ticket_ids=(group.ticket_id,)))
        with self.ledger.changed:
            check.groups[group.ticket_id] = ReceivedGroup(prepared, group)
            if check.is_complete:
                self.ledger.changed.notify_all()

    def fail_ticket(self, server_id: str, failed: TicketFailed) -> None:
        """Refuse a server that failed at a parity ticket."""
        check = self._checks[server_id]
        row = check.tickets[failed.ticket_id].ticket.prompt.row_id
        self.refuse(check, f"row {row} from {server_id} failed: {failed.error_kind}: {failed.error_message}", OTHER_FIX)

    # --- verdicts ---------------------------------------------------------------------------------

    def _is_open(self, check: ParityCheck) -> bool:
        """True if the check still belongs to a connected server, which may have left or reconnected meanwhile."""
        return self._checks.get(check.server_id) is check

    def accept_server(self, check: ParityCheck, *, once: bool = False) -> None:
        """Let the server have work: engine and learner agree. `once`: it is not checked again."""
        if self._is_open(check):
            key = check.server_id, check.server.hello.session
            _, gap = self._due.get(key, (0, 1))
            version = max(item.slot.version for item in check.tickets.values())
            self._due[key] = sys.maxsize if once else version + gap, 2 * gap
            check.server.aligned = True
            self._forget(check.server_id)

    def repeat(self, check: ParityCheck) -> None:
        """Ask again: the groups were sampled with weights that the learner no longer has."""
        if self._is_open(check) and self.servers.connected.get(check.server_id) is check.server:
            self._send(check.server_id, check.server)

    def refuse(self, check: ParityCheck, reason: str, fix: str, failure: type[BadStateError] = BadStateError) -> None:
        """Send the server away. Raises `failure` if there is no other server."""
        if not self._is_open(check):
            return
        server_id, connected = check.server_id, self.servers.connected
        self._forget(server_id)
        reason = f"server {server_id!r} is refused: {reason}"
        logger.error("%s. %s", reason, fix)
        if connected.get(server_id) is check.server:
            check.server.refused = True
            self.servers.count_error(str(ErrorCode.PARITY))
            self.servers.send(server_id, Refusal(code=ErrorCode.PARITY, reason=reason, fix=fix))
        if all(server.refused for server in connected.values()):
            raise failure(f"{reason}. {fix}. No other rollout server is connected")

    def _forget(self, server_id: str) -> None:
        with self.ledger.changed:
            del self._checks[server_id]
            self.ledger.changed.notify_all()
