"""Checksums of tensors while their bytes arrive, so that the end of a transfer need not be waited for twice."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from protocol.messages import TensorEntry

_STEP_BYTES = 8 << 20


class RunningChecksums:
    """Reads `target` (a whole publication) from front to back, tensor by tensor, no further than it is told to."""

    def __init__(self, entries: Sequence[TensorEntry], target: memoryview):
        self._entries = sorted((entry for entry in entries), key=lambda entry: entry.offset)
        self._target = target
        self._index = 0
        self._done = 0  # bytes of the current tensor
        self._hash = xxhash.xxh3_64()
        self.wrong: list[str] = []
        """Names of the tensors that are complete and are not what the manifest says."""

    def advance(self, end: int, most: int = _STEP_BYTES) -> None:
        """All bytes before `end` have arrived. Reads at most `most` of them, because the event loop waits meanwhile."""
        while self._index < len(self._entries) and most > 0:
            entry = self._entries[self._index]
            nbytes = min(end - entry.offset, entry.nbytes) - self._done
            nbytes = min(nbytes, most)
            if nbytes > 0:
                start = entry.offset + self._done
                self._hash.update(self._target[start : start + nbytes])
                self._done += nbytes
                most -= nbytes
            if self._done < entry.nbytes or end < entry.offset + entry.nbytes:
                return
            if self._hash.intdigest() != entry.xxh3:
                self.wrong.append(entry.name)
            self._index, self._done = self._index + 1, 0
            self._hash.reset()

    def finish(self) -> list[str]:
        """Everything has arrived: read what is left, and name what is wrong."""
        self.advance(self._target.nbytes, most=self._target.nbytes + 1)
        return self.wrong
