"""A version on its way that is sent on to others, and pulls of it from other servers.

What has arrived from one sender stays when the next goes on. Only tensors with the learner's checksum are sent on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from protocol.download import Download, Pull
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Chunk, Error

SILENT_RETRIES, SILENT_SHARE = 2, 1 / 3
"""Limits of silence: after so many retries, or this share of the deadline, without a message, a server counts as
silent."""
FailureReason = Literal["checksum", "silent", "gone"]


class SourceFailed(Exception):
    """Another server that was to send a version does not; `reason` is the wire's word, the text says what happened."""

    def __init__(self, reason: FailureReason, what: str):
        super().__init__(what)
        self.reason: FailureReason = reason


class RelayedDownload(Download):
    """One version on its way, of which others may read what is verified."""

    received_bytes = 0
    """Bytes that have arrived, those that had to come again included."""
    on_verified: Callable[[], None] = staticmethod(lambda: None)
    """Called when more tensors can be sent on."""

    def take(self, chunk: Chunk) -> bool:
        taken = super().take(chunk)
        self.received_bytes += chunk.data.nbytes * taken
        return taken

    async def _verify(self, indices: list[int]) -> None:
        await super()._verify(indices)
        self.on_verified()

    def read(self, offset: int, nbytes: int) -> memoryview | None:
        """A view of these bytes; None while a tensor among them is not verified. Raises ProtocolError MALFORMED."""
        if offset < 0 or nbytes <= 0 or offset + nbytes > self._target.nbytes:
            raise ProtocolError(
                ErrorCode.MALFORMED,
                f"bytes {offset} to {offset + nbytes} of version {self.manifest.version}, which has "
                f"{self._target.nbytes} bytes",
            )
        if self._unverified and not all(self._verified[index] for index in self._tensors_in(offset, nbytes)):
            return None
        return self._target[offset : offset + nbytes]


class RelayPull(Pull):
    """A pull from the server of the name `relay`: SourceFailed is raised in the place of every other error."""

    unsent_level = logging.DEBUG

    def __init__(self, *arguments: Any, relay: str, **options: Any):
        super().__init__(*arguments, **options)
        self._relay = relay

    def ask_again(self) -> None:
        if names := self.download.ask_again(counts=False):
            version = self.download.manifest.version
            raise SourceFailed("checksum", f"version {version} from {self._relay}: wrong checksum of {names}")

    def take_error(self, error: Error) -> None:
        if error.code is not ErrorCode.NOT_YET:
            raise SourceFailed("gone", f"{self._relay} answers {error.code}: {error.reason}")

    def check_deadlines(self, now: float) -> None:
        where = f"from {self._relay} at {self.socket.endpoint}: {self.download.progress()}"
        silent_s, late_s = now - self.heard_at, now - self.arrived_at
        if silent_s >= max(SILENT_RETRIES * self.retry_s, SILENT_SHARE * self.timeout_s):
            raise SourceFailed("silent", f"not a word for {silent_s:.1f} s {where}")
        if late_s >= self.timeout_s:
            raise SourceFailed("silent", f"no weights arrived for {late_s:.1f} s {where}")
