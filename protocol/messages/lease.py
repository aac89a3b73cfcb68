"""The device lease goes to and fro: trainer.mode=sync (see protocol/lease.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.messages.wire import Seconds, Wire

Fence = Annotated[int, Field(gt=0, lt=2**63)]
"""Number of one tenure of the device lease, larger than all before it."""


class LeaseGrant(Wire):
    """The learner sleeps: take the lease under this fence, and wake up."""

    type: Literal["lease_grant"] = "lease_grant"
    fence: Fence


class LeaseRecall(Wire):
    """The learner needs the device: sleep, and return what you hold under this fence or an older one."""

    type: Literal["lease_recall"] = "lease_recall"
    fence: Fence


class LeaseReturn(Wire):
    """The server sleeps, and the lease is free."""

    type: Literal["lease_return"] = "lease_return"
    fence: Fence
    wake_s: Seconds
    """To wake up, or to load the model the first time."""
    sleep_s: Seconds
    """To fall asleep."""
    sleep_bytes: int = Field(ge=0)
    """That left the device."""
