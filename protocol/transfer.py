"""Pulling one policy version over ZeroMQ: a window of chunk requests, sent again after losses, and their answers."""

from __future__ import annotations

import logging
import time
from collections import deque

from protocol.download import CHUNK_BYTES, MAX_CHUNK_BYTES, Download, SourceFailed
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Chunk, ChunkRequest, Error, WeightManifest
from protocol.sockets import BadMessage, SendTimeout, ServerSocket
from protocol.weights import Publication

logger = logging.getLogger(__name__)

WINDOW = 16
"""Most chunks on their way at a time: enough to keep both sides and the network busy at once."""
FIRST_WINDOW = 2
QUICK_SHARE = 0.25
"""Share of RETRY_S within which a chunk comes where nothing queues: each such one allows one more on its way."""
RETRY_S = 2.0
"""Seconds without any chunk after which requests are sent again, at least: a slow link is given longer."""
PATIENCE, MOST_PATIENCE = 2.0, 0.25
"""Times what a chunk took that is waited for the next one, and the most of that, as a share of the deadline."""
SILENT_RETRIES, SILENT_SHARE = 2, 1 / 3
"""Limits of silence: after so many retries, or this share of the deadline, without a message, a server counts as
silent."""


def answer_chunk_request(publication: Publication, request: ChunkRequest) -> Chunk | Error:
    """The learner's answer: the bytes, or the reason why not."""
    try:
        check_size(request)
        publication.check_is_meant(request.publication)
        data = publication.read(request.version, request.offset, request.nbytes)
    except ProtocolError as error:
        return Error(code=error.code, reason=error.reason, version=request.version)
    return Chunk(version=request.version, offset=request.offset, data=data)


def check_size(request: ChunkRequest) -> None:
    """Raise ProtocolError TOO_LARGE for a chunk over the limit."""
    if request.nbytes > MAX_CHUNK_BYTES:
        raise ProtocolError(
            ErrorCode.TOO_LARGE, f"a chunk of {request.nbytes:,} bytes, the limit is {MAX_CHUNK_BYTES:,}"
        )


async def fetch(
    socket: ServerSocket,
    manifest: WeightManifest,
    into: bytearray | memoryview,
    *,
    timeout_s: float,
    chunk_bytes: int = CHUNK_BYTES,
    window: int = WINDOW,
    retry_s: float = RETRY_S,
) -> None:
    """Fill `into` (exactly `manifest.total_bytes` long) with the version that `manifest` describes, from the learner.

    Raises as `pull` does.
    """
    download = Download(manifest, into, chunk_bytes=chunk_bytes)
    await pull(download, socket, timeout_s=timeout_s, window=window, retry_s=retry_s)


async def pull(
    download: Download,
    socket: ServerSocket,
    *,
    timeout_s: float,
    window: int = WINDOW,
    retry_s: float = RETRY_S,
    relay: str = "",
) -> None:
    """Fetch what is missing of a version. Returns when all of it is there and verified.

    Requests without an answer are sent again when nothing has arrived for `retry_s`, and only those. Raises
    ProtocolError VERSION_GONE if the learner has moved on, MALFORMED for tensors that stay wrong, and TimeoutError
    if nothing arrives for `timeout_s`. Where a server of the name `relay` sends, raises SourceFailed in their
    place: it also is at fault when it says nothing for long.
    """
    requests = _Pull(download, socket, timeout_s, window, min(retry_s, timeout_s), relay)
    while not download.is_complete:
        if download.missing():
            await requests.turn()
        else:
            await download.check_rest()
        download.ask_again(relay)


class _Pull:
    """Requests to one sender, and what they came to."""

    def __init__(
        self,
        download: Download,
        socket: ServerSocket,
        timeout_s: float,
        window: int,
        retry_s: float,
        relay: str,
    ):
        self._download = download
        self._socket = socket
        self._timeout_s, self._window, self._retry_s = timeout_s, window, retry_s
        self._relay = relay
        self._arrived_at = self._moved_at = self._asked_at = self._heard_at = time.monotonic()
        self._allowed = FIRST_WINDOW
        """Chunks that may be on their way: fewer where one takes long, since others wait in the sender's queue, too."""
        self._asked: dict[int, float] = {}
        """Offsets on their way, in the order in which they were asked for, and when that was."""
        self._asked_twice: set[int] = set()
        """Requests whose answer does not say how long it took: it may belong to the first of two."""
        self._patience_s = retry_s
        """Seconds without any chunk after which requests are sent again."""
        self._waiting: deque[int] = deque(download.missing())

    async def turn(self) -> None:
        """Ask for as much as the window allows, and take one message. Raises as `pull` does."""
        missing = self._download.missing()
        if not self._waiting and len(self._asked) < len(missing):  # what was wrong comes again
            self._waiting.extend(offset for offset in missing if offset not in self._asked)
        await self._ask(missing)
        message = await self._socket.recv(self._retry_s if self._asked else 0.0)
        now = time.monotonic()
        if message is not None:
            self._heard_at = now
        if isinstance(message, BadMessage):
            logger.warning("weights: %s", message.error)
        elif isinstance(message, Error) and message.version in (None, self._version):
            self._take_error(message)
        elif isinstance(message, Chunk) and message.version == self._version:
            self._moved_at = now
            if self._download.take(message):
                self._arrived_at = now
                self._pace(message.offset, now)
        # Not while others arrive: a slow link may take longer for one.
        if now - max(self._moved_at, self._asked_at) >= self._patience_s:
            self._waiting.extendleft(reversed(self._asked))
            self._asked_twice |= self._asked.keys()
            self._asked.clear()
            self._asked_at, self._allowed = now, 1
            self._wait_for(PATIENCE * self._patience_s)
        self._check_deadlines(now)

    def _pace(self, offset: int, now: float) -> None:
        """Ask for more, or less, at a time, by how long a chunk has taken."""
        asked_at = self._asked.pop(offset, None)
        if asked_at is None or offset in self._asked_twice:
            self._allowed = max(1, self._allowed // 2)
            return
        is_quick = now - asked_at < QUICK_SHARE * self._retry_s
        self._allowed = min(self._window, self._allowed + 1) if is_quick else max(1, self._allowed // 2)
        self._wait_for(PATIENCE * (now - asked_at))

    def _wait_for(self, seconds: float) -> None:
        self._patience_s = max(self._retry_s, min(seconds, MOST_PATIENCE * self._timeout_s))

    @property
    def _version(self) -> int:
        return self._download.manifest.version

    async def _ask(self, missing: dict[int, int]) -> None:
        while self._waiting and len(self._asked) < self._allowed:
            offset = self._waiting[0]
            if offset not in missing:  # it has come after all
                self._waiting.popleft()
                continue
            try:
                await self._socket.send(self._download.request(offset), timeout_s=self._retry_s)
            except SendTimeout as problem:
                logger.log(logging.DEBUG if self._relay else logging.WARNING, "%s; trying again", problem)
                return
            self._asked[self._waiting.popleft()] = time.monotonic()

    def _take_error(self, error: Error) -> None:
        if not self._relay:
            raise ProtocolError(error.code, error.reason)
        if error.code is not ErrorCode.NOT_YET:
            raise SourceFailed("gone", f"{self._relay} answers {error.code}: {error.reason}")

    def _check_deadlines(self, now: float) -> None:
        late_s = now - self._arrived_at
        where = f"from {self._relay or 'the learner'} at {self._socket.endpoint}: {self._download.progress()}"
        if not self._relay:
            if late_s >= self._timeout_s:
                raise TimeoutError(f"no weights arrived for {self._timeout_s:g} s {where}")
            return
        silent_s = now - self._heard_at
        if silent_s >= max(SILENT_RETRIES * self._retry_s, SILENT_SHARE * self._timeout_s):
            raise SourceFailed("silent", f"not a word for {silent_s:.1f} s {where}")
        if late_s >= self._timeout_s:
            raise SourceFailed("silent", f"no weights arrived for {late_s:.1f} s {where}")
