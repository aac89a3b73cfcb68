"""The evaluation sender: an evaluation's tickets go out as there is room, to servers that keep its version meanwhile.

Servers that have the version when the evaluation begins are not told of newer ones before its last row is here; they
sample training tickets of that version or before beside it, and the learner goes on training as far as the staleness
bound lets it. A server that joins has the newest version, and trains. Where none is left that keeps the evaluated one,
or all that do have stalled, the others load it again: they finish what they sample first
(rollout_server/updates/policy_versions.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from learner.network.servers import Servers
from learner.network.ticket_sender import TicketSender
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import TicketLedger
from protocol.weights import Publication

logger = logging.getLogger(__name__)


@dataclass
class EvaluationSender:
    """Used by the network thread alone."""

    servers: Servers
    ledger: TicketLedger
    sender: TicketSender
    publication: Publication
    _running: Evaluation | None = None

    def begin(self, evaluation: Evaluation) -> None:
        """Evaluate the newest version, which the publication holds. All rows of the evaluation before are here."""
        self._end()
        self._running = evaluation
        self.servers.keep_version()

    def work(self) -> None:
        """Run one iteration: as many tickets as there is room for, and the end when the last row is here."""
        if self._running is None:
            return
        for item, reason in self.ledger.out.take_given_up():
            logger.warning("the evaluation of step %d goes on without a score: %s", self._running.step, reason)
            self._running.give_up(item)
        if self._running.is_complete:
            self._end()
            return
        keepers = self.servers.keepers
        if keepers.keys() <= self.ledger.out.stalled():
            self.servers.go_back()
            self.sender.look_again()
        most = sum(server.hello.max_groups for server in keepers.values())
        room = most - self.ledger.out.num_evaluation
        # Half of it at once: an engine that is given single rows interrupts what it decodes for each of them.
        if room > 0 and 2 * room >= most and self._running.has_more and not self.sender.is_busy:
            self.sender.prepare(self._running.tickets(room))

    def _end(self) -> None:
        if self._running is not None:
            self.servers.release_version()
            self.publication.release(self._running.version)
            self._running = None
