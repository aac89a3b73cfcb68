"""Measurements of a cell. The bound of every consumed token is checked here, apart from the ledger's own check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.journal.writer import TicketSlot
from benchmarks.staleness.workload import Workload
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.ledger import TicketLedger

FILLING_STEPS, EMPTYING_STEPS = 16, 8
"""Left out of idle ratio and speed: the pipeline fills at the start of a run, and empties at its end."""
ROUNDING = 1e-12


@dataclass
class Observation:
    """Everything is counted over the whole run unless it says otherwise."""

    workload: Workload
    problems: list[str] = field(default_factory=list)
    """Violations of what is promised. Must stay empty."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Consumed tokens (loss mask 1) by versions behind the learner."""
    masked_tokens: int = 0
    """Sampled tokens of consumed groups that are not in the loss."""
    lengths: list[int] = field(default_factory=list)
    """Tokens in the loss of each consumed trajectory."""
    waits: list[float] = field(default_factory=list)
    """Seconds before each step."""
    ended: list[float] = field(default_factory=list)
    """End time of each step."""
    meter: list[float] = field(default_factory=list)
    """The ledger's length-bias meter after each step."""
    issued_bounds: dict[int, int] = field(default_factory=dict)
    positions: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    issued: int = 0
    tokens_generated: int = 0

    def watch(
        self, write: Callable[[TicketSlot], PreparedTicket], bound: Callable[[], int]
    ) -> Callable[[TicketSlot], PreparedTicket]:
        """Note the bound in force when each ticket is written."""

        def written(slot: TicketSlot) -> PreparedTicket:
            self.issued_bounds[slot.ticket_id] = bound()
            return write(slot)

        return written

    def step(self, version: int, groups: Sequence[ReceivedGroup], *, began: float, took: float, ended: float) -> None:
        """One learner step at `version`: waited from `began` to `took`, and published at `ended`."""
        self.waits.append(took - began)
        self.ended.append(ended)
        for received in groups:
            group, ticket_id = received.group, received.ticket.ticket_id
            in_loss = group.is_sampled
            ages = version - group.versions[in_loss]
            bound = self.issued_bounds[ticket_id]
            if ages.size and (ages.max() > bound or ages.min() < 0):
                self.problems.append(
                    f"ticket {ticket_id} at version {version}: tokens {ages.min()} to {ages.max()} old, bound {bound}"
                )
            self.staleness.update(ages.tolist())
            self.masked_tokens += int((~in_loss).sum())
            self.lengths += [int(row.sum()) for row in np.split(in_loss, np.cumsum(group.lengths)[:-1])]
            self.positions[received.slot.position] += 1

    def account(self, ledger: TicketLedger) -> None:
        """Check the ledger after each step."""
        counts = ledger.counts()
        if counts.residual:
            self.problems.append(f"ledger residual {counts.residual} at version {ledger.version}: {counts}")
        self.issued, self.dropped = counts.issued, sum(counts.dropped.values())
        self.meter.append(ledger.length_bias()["length_bias"])
        if self.workload.on_stale == "wait" and abs(self.meter[-1]) > ROUNDING:
            self.problems.append(f"length bias {self.meter[-1]} under wait at version {ledger.version}")

    def finish(self) -> None:
        """Check the totals at the end of the run."""
        wrong = {p: n for p, n in self.positions.items() if n != 1}
        if wrong or len(self.positions) != self.workload.total_groups:
            total = self.workload.total_groups
            self.problems.append(f"{len(self.positions)} of {total} positions trained; more than once: {wrong}")
        if self.workload.on_stale == "wait" and self.dropped:
            self.problems.append(f"{self.dropped} groups dropped under wait")

    # --- results ----------------------------------------------------------------------------------

    @property
    def oldest(self) -> int:
        return max(self.staleness)

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / self.staleness.total()

    @property
    def dropped_share(self) -> float:
        """Share of the issued groups."""
        return self.dropped / self.issued

    @property
    def masked_share(self) -> float:
        """Share of the sampled tokens in consumed groups."""
        return self.masked_tokens / (self.masked_tokens + self.staleness.total())

    @property
    def bias(self) -> float:
        """The length-bias meter at the end of the run."""
        return self.meter[-1]

    @property
    def true_bias(self) -> tuple[float, float]:
        """Mean trained length against the expectation of what the engine samples, and its standard error."""
        mean = self.workload.mean_length
        error = float(np.std(self.lengths)) / math.sqrt(len(self.lengths)) / mean
        return float(np.mean(self.lengths)) / mean - 1, error

    @property
    def _middle(self) -> slice:
        steps = len(self.waits)
        return slice(min(FILLING_STEPS, steps // 3), steps - min(EMPTYING_STEPS, steps // 6))

    @property
    def idle_ratio(self) -> float:
        """Idle share of the learner, without the ends of the run."""
        return sum(self.waits[self._middle]) / (len(self.waits[self._middle]) * self.seconds_per_step)

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds per step, without the ends of the run."""
        first, last = self._middle.start, self._middle.stop
        return (self.ended[last - 1] - self.ended[first - 1]) / (last - first)

    @property
    def decoding_ratio(self) -> float:
        """Share of the servers' decoding slots in use, over the whole run."""
        slots_s = self.workload.sequences * self.ended[-1]
        return self.tokens_generated * self.workload.seconds_per_token / slots_s
