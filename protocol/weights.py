"""One policy version as a file of tensors in shared memory: the learner writes it, rollout servers map it.

Every version is a file of its own that appears complete (written under another name, then renamed) and is
never changed. The newest two are kept. A server that still has an older one mapped keeps a consistent
snapshot, since an unlinked file lives until its last mapping goes. Bytes only: which tensor means what is the
callers' affair.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.endpoints import SHARED_MEMORY
from protocol.errors import ErrorCode, ProtocolError
from protocol.layout import Layout, PublicationError, plan_layout
from protocol.messages import TensorEntry, WeightManifest
from protocol.shm import PREFIX, checksums, map_file

KEPT_VERSIONS = 2
_WRITE_BYTES = 64 << 20


@dataclass(frozen=True)
class Tensor:
    """A tensor to publish: contiguous little-endian bytes and what they mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass
class _Snapshot:
    path: Path
    view: memoryview
    manifest: WeightManifest


class Publication:
    """Published versions of one learner. `publish` and `read` may be called from different threads.

    A crashed learner leaves files behind; the next one to start in the same directory removes them. Who is
    alive is told by a file lock, which the kernel drops with the process: process ids mean nothing across
    containers.
    """

    def __init__(self, run_id: str, directory: Path = SHARED_MEMORY):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise PublicationError(f"{self.directory} is not a directory. Name another one to publish weights in")
        remove_stale(self.directory)
        safe_id = re.sub(r"[^A-Za-z0-9_]", "_", run_id)[:80]
        self._base = self.directory / f"{PREFIX}{safe_id}-{os.getpid()}-{id(self):x}"
        self._lock_path = self._base.with_name(self._base.name + ".lock")
        self._lock_fd = _take_lock(self._lock_path)
        self._snapshots: dict[int, _Snapshot] = {}
        self._guard = threading.Lock()

    def publish(self, version: int, tensors: Iterable[Tensor]) -> WeightManifest:
        """Write all tensors as `version`, drop all but the newest two versions, and return the manifest.

        Raises PublicationError if a tensor is malformed, the version is not new, or the directory is full.
        """
        if self._lock_fd is None:
            raise PublicationError("the publication is closed")
        if self._snapshots and version <= max(self._snapshots):
            raise PublicationError(f"version {version} is not newer than {max(self._snapshots)}")
        chosen = list(tensors)
        layout = plan_layout((t.name, t.dtype, t.shape, t.data.nbytes) for t in chosen)
        # Room first: the oldest goes before the new one is written, so there are never more than two copies.
        self._drop_oldest(KEPT_VERSIONS - 1)
        path = self._base.with_name(f"{self._base.name}-v{version}")
        data = [tensor.data.cast("B") if tensor.data.nbytes else memoryview(b"") for tensor in chosen]
        self._write(path, layout, data)
        entries = tuple(
            TensorEntry(
                name=slot.name,
                dtype=slot.dtype,
                shape=slot.shape,
                offset=slot.offset,
                nbytes=slot.nbytes,
                crc32=crc,
            )
            for slot, crc in zip(layout.slots, checksums(data), strict=True)
        )
        manifest = WeightManifest(version=version, tensors=entries, total_bytes=layout.total_bytes, shm_path=str(path))
        with self._guard:
            self._snapshots[version] = _Snapshot(path, map_file(path, layout.total_bytes), manifest)
        return manifest

    def manifest(self, version: int) -> WeightManifest:
        """Raises ProtocolError VERSION_GONE."""
        return self._snapshot(version).manifest

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can still be read, oldest first."""
        with self._guard:
            return tuple(sorted(self._snapshots))

    def read(self, version: int, offset: int, nbytes: int) -> memoryview:
        """A read-only view. Raises ProtocolError: VERSION_GONE, or MALFORMED for a range outside."""
        snapshot = self._snapshot(version)
        total = snapshot.view.nbytes
        if offset < 0 or nbytes <= 0 or offset + nbytes > total:
            raise ProtocolError(
                ErrorCode.MALFORMED,
                f"bytes {offset} to {offset + nbytes} of version {version}, which has {total} bytes",
            )
        return snapshot.view[offset : offset + nbytes]

    def close(self) -> None:
        """Remove all files. Servers that have one mapped may go on using it."""
        self._drop_oldest(0)
        if self._lock_fd is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _snapshot(self, version: int) -> _Snapshot:
        with self._guard:
            snapshot = self._snapshots.get(version)
            if snapshot is None:
                kept = ", ".join(map(str, sorted(self._snapshots))) or "nothing"
                raise ProtocolError(
                    ErrorCode.VERSION_GONE, f"version {version} is not published any more; there is {kept}"
                )
        return snapshot

    def _drop_oldest(self, keep: int) -> None:
        with self._guard:
            while len(self._snapshots) > keep:
                # The mapping goes with its last view: one may be in a chunk that is being sent.
                self._snapshots.pop(min(self._snapshots)).path.unlink(missing_ok=True)

    def _write(self, path: Path, layout: Layout, data: Sequence[memoryview]) -> None:
        free = shutil.disk_usage(self.directory).free
        if layout.total_bytes > free:
            raise PublicationError(self._no_room(layout.total_bytes, free))
        partial = path.with_name(path.name + ".partial")
        try:
            with open(partial, "xb", buffering=0) as file:
                for slot, view in zip(layout.slots, data, strict=True):
                    file.seek(slot.offset)
                    for start in range(0, view.nbytes, _WRITE_BYTES):
                        _write_all(file.fileno(), view[start : start + _WRITE_BYTES])
                file.truncate(layout.total_bytes)
            partial.rename(path)
        except OSError as problem:
            partial.unlink(missing_ok=True)
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(self.directory).free
                raise PublicationError(self._no_room(layout.total_bytes, free)) from problem
            raise PublicationError(f"cannot write weights to {path}: {problem}") from problem

    def _no_room(self, needed: int, free: int) -> str:
        size = shutil.disk_usage(self.directory).total
        return (
            f"publishing weights needs {_mib(needed):,} MiB in {self.directory}, "
            f"which has {_mib(free):,} free of {_mib(size):,} MiB. "
            f"{KEPT_VERSIONS} versions are kept: give it {_mib(KEPT_VERSIONS * needed):,} MiB "
            f"(docker run --shm-size={_mib(KEPT_VERSIONS * needed)}m), or publish in another directory"
        )


def remove_stale(directory: Path) -> list[Path]:
    """Remove what dead learners left in `directory`, and return it. Files of living ones stay."""
    removed = []
    for lock in directory.glob(f"{PREFIX}*.lock"):
        fd = _try_lock(lock)
        if fd is None:
            continue
        owner = lock.name.removesuffix(".lock")
        for path in [*directory.glob(f"{owner}-v*"), lock]:
            path.unlink(missing_ok=True)
            removed.append(path)
        os.close(fd)
    return removed


def _take_lock(path: Path) -> int:
    while True:
        fd = _try_lock(path, os.O_CREAT)
        if fd is None:
            raise PublicationError(f"{path} is locked by another process")
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)  # somebody took it for a dead learner's between our creating and locking it


def _try_lock(path: Path, flags: int = 0) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        return None  # gone meanwhile, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _write_all(fd: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(fd, view) :]


def _mib(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))
