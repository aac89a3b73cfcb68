"""The device lease on the wire: granted to the server while the learner sleeps, and called back.

Used by the exchange thread alone; other threads may read `returned`. Messages only say whose turn it is. That nobody
takes a turn while another has it is the lease's own doing (protocol/lease.py).
"""

from __future__ import annotations

import logging

from learner.network.servers import Servers, ServerState
from protocol.errors import ErrorCode
from protocol.messages import Error, LeaseGrant, LeaseRecall, LeaseReturn

logger = logging.getLogger(__name__)


class LeaseGrants:
    def __init__(self, connections: Servers):
        self.returned: LeaseReturn | None = None
        """The newest one."""
        self._connections = connections
        self._lent = False
        self._next = 1
        """The fence of the next grant."""
        self._fence = 0
        """Of the newest grant."""
        self._tenant: ServerState | None = None
        """Who was sent it; another object after a reconnection."""

    def lend(self, fence: int) -> None:
        """The device is free for a tenure of this number or a larger one."""
        self._lent, self._tenant, self._next = True, None, max(self._next, fence)

    def recall(self) -> None:
        self._lent = False
        server = self._present()
        if server is not None and server is self._tenant:
            self._connections.send(server.hello.server_id, LeaseRecall(fence=self._fence))

    def offer(self) -> None:
        """One turn: whoever is there and has not been granted the device is."""
        server = self._present()
        if not self._lent or server is None or server is self._tenant:
            return
        self._tenant, self._fence = server, self._next
        self._next += 1
        self._connections.send(server.hello.server_id, LeaseGrant(fence=self._fence))

    def _present(self) -> ServerState | None:
        """In sync mode there is at most one."""
        return next(iter(self._connections.servers.values()), None)

    def is_at_work(self, server: ServerState) -> bool:
        """It has its turn, and an engine with weights: in its first turn the engine has to be started."""
        return server is self._tenant and server.loaded is not None

    def take_return(self, server: ServerState, message: LeaseReturn) -> None:
        """Unasked, it means that the server has not heard of us for long: while we sleep it is granted again."""
        if server is not self._tenant or message.fence != self._fence:
            reason = f"fence {message.fence} was returned, the newest granted to this server is {self._fence}"
            self._connections.errors[str(ErrorCode.STALE_FENCE)] += 1
            self._connections.send(server.hello.server_id, Error(code=ErrorCode.STALE_FENCE, reason=reason))
            return
        self.returned, self._tenant = message, None
