"""A training or parity ticket must ask for the sampling that this server was configured with."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import UserError
from protocol.messages import Ticket, TicketKind

SETTINGS = ("temperature", "top_p", "top_k", "min_p")


def check_sampling(tickets: Iterable[Ticket], config: RolloutConfig) -> None:
    """Raise UserError if learner and server were started with different `rollout` settings.

    The ticket's settings would be used, and this server's own silently ignored.
    """
    for ticket in tickets:
        if ticket.kind is TicketKind.EVAL:
            continue
        differing = [
            f"rollout.{name} is {getattr(config, name):g} here and {getattr(ticket.sampling, name):g} at the learner"
            for name in SETTINGS
            if getattr(config, name) != getattr(ticket.sampling, name)
        ]
        if differing:
            raise UserError(f"{'; '.join(differing)}. Start both services with the same configuration")
