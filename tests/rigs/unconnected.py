"""The parts that `Servers` needs, without sockets and without tickets."""

from __future__ import annotations

from collections import Counter
from typing import Any

from protocol.sockets import Delivery


class Ports:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.control: Any = self
        self.sent: list[tuple[bytes, Any]] = []

    def encode(self, message: Any) -> Any:
        return message

    def send(self, identity: bytes, message: Any) -> Delivery:
        self.sent.append((identity, message))
        return Delivery.SENT

    def charge(self, identity: bytes) -> None:
        pass

    def take_rejections(self) -> Counter[str]:
        return Counter()


class Ledger:
    """No ticket is out."""

    def __init__(self) -> None:
        self.out = self

    def held_by(self, server_id: str) -> int:
        return 0

    def held_of_kind(self, server_id: str, *, is_training: bool) -> int:
        return 0

    def holds_since(self, server_id: str, moment: float) -> bool:
        return False

    def forgive(self, seconds: float) -> None:
        pass

    def reconcile(self, server_id: str, held: Any = ()) -> int:
        return 0
