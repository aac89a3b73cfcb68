"""Which rollout servers may have work: each samples a few rows first, and the learner computes their log-probs again.

A server that is welcomed gets *parity tickets*, at the newest published version, as soon as it holds no others. They
are outside of the ledger: they use no position in the data, and nothing of them is journaled. Their groups are
verified like all others and kept for the main thread, which compares them (`parity.py`) while it waits for something,
so that its weights are of its newest version. Groups of an older one are asked for again; no step begins while a
server that has loaded weights owes an answer, or a fast learner would never be at the version of the answer.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.errors import BadStateError, WaitTimeoutError
from learner.network.servers import SLOWEST_TURN_S, Servers, ServerState
from learner.tickets.ledger import TicketLedger
from learner.tickets.outstanding import MAX_ATTEMPTS
from learner.tickets.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.ticket_size import check_ticket_size
from learner.tickets.writer import PARITY_IDS
from protocol.codec import Limits
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Ack, Group, Refusal, TicketFailed, Tickets

logger = logging.getLogger(__name__)

OTHER_FIX = "See the log of the rollout server"


@dataclass
class ParityCheck:
    """The parity tickets of one server, and what has come back for them."""

    server_id: str
    server: ServerState
    version: int
    """Oldest policy version that may sample them."""
    tickets: dict[int, PreparedTicket]
    attempts: int = 1
    waited_s: float = 0.0
    """For a server that could answer."""
    groups: dict[int, ReceivedGroup] = field(default_factory=dict)
    taken: bool = False
    """The main thread is comparing."""

    @property
    def is_complete(self) -> bool:
        return len(self.groups) == len(self.tickets)


class ParityHandshake:
    """Used by the exchange thread; `take_complete`, `has_complete` and `holds_step` by the main thread."""

    def __init__(
        self,
        connections: Servers,
        ledger: TicketLedger,
        tickets: Sequence[PreparedTicket],
        verify: Callable[..., None],
        *,
        limits: Limits,
        deadline_s: float,
        can_answer: Callable[[ServerState], bool] = lambda server: True,
    ):
        """`tickets` are the rows that every server samples; without any, every server is aligned.

        `verify` is `verify_group` with what is the same for the whole run. Only time in which a server `can_answer`
        counts towards its deadline.
        """
        for item in tickets:
            check_ticket_size(item, limits)
        self._connections = connections
        self._ledger = ledger
        self._tickets = tickets
        self._verify = verify
        self._deadline_s = deadline_s
        self._can_answer = can_answer
        self._checks: dict[str, ParityCheck] = {}
        self._passed: set[tuple[str, str]] = set()
        """Server ids and sessions."""
        self._next_id = PARITY_IDS + (secrets.randbits(40) << 20)
        """Servers may still hold those of a learner before us."""
        self._looked_at = time.monotonic()

    # --- the main thread's side -----------------------------------------------------------------

    @property
    def has_complete(self) -> bool:
        with self._ledger.changed:
            return any(check.is_complete and not check.taken for check in self._checks.values())

    def take_complete(self) -> list[ParityCheck]:
        """Checks whose groups are all here; each has to be passed, repeated or refused."""
        with self._ledger.changed:
            complete = [check for check in self._checks.values() if check.is_complete and not check.taken]
            for check in complete:
                check.taken = True
            return complete

    @property
    def holds_step(self) -> str | None:
        """A server that is about to be compared: the weights may not move."""
        with self._ledger.changed:
            return next((name for name, check in self._checks.items() if check.server.loaded is not None), None)

    # --- the exchange thread's side ---------------------------------------------------------------

    def work(self) -> None:
        """One turn: begin the checks of servers that have come, forget those of servers that have gone."""
        now = time.monotonic()
        elapsed_s = min(now - self._looked_at, SLOWEST_TURN_S)  # time in which this process was stopped does not count
        self._looked_at = now
        servers = self._connections.servers
        for server_id, check in list(self._checks.items()):
            if servers.get(server_id) is not check.server:
                self._forget(server_id)
                continue
            check.waited_s += elapsed_s if self._can_answer(check.server) and not check.is_complete else 0
            if check.waited_s > self._deadline_s:
                reason = f"it has not answered its parity tickets for {self._deadline_s:g} s"
                self.refuse(check, reason, OTHER_FIX, WaitTimeoutError)
        for server_id, server in list(servers.items()):
            if not (server.aligned or server.refused or server_id in self._checks):
                self._begin(server_id, server)

    def _begin(self, server_id: str, server: ServerState) -> None:
        if not self._tickets or (server_id, server.hello.session) in self._passed:
            server.aligned = True
        elif self._connections.manifest is not None and not self._ledger.out.held_by(server_id):
            self._send(server_id, server, attempts=1)

    def _send(self, server_id: str, server: ServerState, *, attempts: int) -> None:
        """Alone in the engine: on-policy, the last bits of a training group depend on what runs beside it."""
        assert self._connections.manifest is not None
        version = self._connections.manifest.version
        tickets = [self._numbered(item, version) for item in self._tickets[: server.hello.max_groups]]
        check = ParityCheck(server_id, server, version, {item.ticket.ticket_id: item for item in tickets}, attempts)
        with self._ledger.changed:
            self._checks[server_id] = check
        for item in tickets:
            blobs = {digest: memoryview(data) for digest, data in item.blobs.items()}
            if not self._connections.send(server_id, Tickets(tickets=(item.ticket,), blobs=blobs)):
                return  # it is lost, and forgotten at the next turn

    def _numbered(self, item: PreparedTicket, version: int) -> PreparedTicket:
        number, self._next_id = self._next_id, self._next_id + 1
        ticket = item.ticket.model_copy(update={"ticket_id": number, "min_version": version})
        return replace(item, ticket=ticket, slot=replace(item.slot, ticket_id=number, version=version))

    def awaits(self, server_id: str, ticket_id: int) -> bool:
        check = self._checks.get(server_id)
        return check is not None and ticket_id in check.tickets and ticket_id not in check.groups

    def accept(self, server_id: str, group: Group, version: int) -> None:
        """`version` is the newest policy version that the server may have."""
        check = self._checks[server_id]
        prepared = check.tickets[group.ticket_id]
        try:
            self._verify(group, prepared.ticket, prepared.facts, sender=server_id, version=version, components=())
        except ProtocolError as problem:
            self.refuse(check, problem.reason, "Start both services with the same configuration and library versions")
            return
        self._connections.send(server_id, Ack(ticket_ids=(group.ticket_id,)))
        with self._ledger.changed:
            check.groups[group.ticket_id] = ReceivedGroup(prepared, group)
            if check.is_complete:
                self._ledger.changed.notify_all()

    def fail(self, server_id: str, failed: TicketFailed) -> None:
        """The server could not sample a parity row: it may try again, but not for ever."""
        check = self._checks[server_id]
        if check.attempts < MAX_ATTEMPTS:
            self._send(server_id, check.server, attempts=check.attempts + 1)
            return
        row = check.tickets[failed.ticket_id].ticket.prompt.row_id
        said = f"{failed.error_kind}: {failed.error_message}"
        self.refuse(check, f"row {row} from {server_id} failed {check.attempts} times: {said}", OTHER_FIX)

    # --- verdicts ---------------------------------------------------------------------------------

    def _is_open(self, check: ParityCheck) -> bool:
        """Not once its server has gone, or has come back with another check, while the learner compared."""
        return self._checks.get(check.server_id) is check

    def accept_server(self, check: ParityCheck) -> None:
        if not self._is_open(check):
            return
        self._passed.add((check.server_id, check.server.hello.session))
        check.server.aligned = True
        self._forget(check.server_id)

    def repeat(self, check: ParityCheck) -> None:
        """Its groups were sampled with weights that the learner no longer has."""
        if self._is_open(check) and self._connections.servers.get(check.server_id) is check.server:
            self._send(check.server_id, check.server, attempts=check.attempts)

    def refuse(self, check: ParityCheck, reason: str, fix: str, failure: type[BadStateError] = BadStateError) -> None:
        """Raises `failure` if there is no other server."""
        if not self._is_open(check):
            return
        server_id, servers = check.server_id, self._connections.servers
        self._forget(server_id)
        reason = f"server {server_id!r} is refused: {reason}"
        logger.error("%s. %s", reason, fix)
        if servers.get(server_id) is check.server:
            check.server.refused = True
            self._connections.count_error(str(ErrorCode.PARITY))
            self._connections.send(server_id, Refusal(code=ErrorCode.PARITY, reason=reason, fix=fix))
        if all(server.refused for server in servers.values()):
            raise failure(f"{reason}. {fix}. No other rollout server is connected")

    def _forget(self, server_id: str) -> None:
        with self._ledger.changed:
            del self._checks[server_id]
            self._ledger.changed.notify_all()
