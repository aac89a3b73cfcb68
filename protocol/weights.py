"""One policy version as a file of tensors in shared memory: the learner writes it, rollout servers map it.

A version's file appears complete under its name and does not change while that name or a mapping of it is there. The
newest two versions are kept, and one that is held for longer. The file of an older one is filled again, unless a server
still has it mapped: that server keeps a consistent snapshot, since an unlinked file lives until its last mapping goes.
Bytes only: which tensor means what is the callers' affair.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from protocol.codec import MIB
from protocol.endpoints import SHARED_MEMORY
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import AdapterSpec, TensorEntry, WeightManifest
from protocol.weight_file import PREFIX, THREADS, FileLayout, PublicationError, WeightFile, map_for_reading

KEPT_VERSIONS = 2
"""Newest versions that can be fetched at a time."""


class Tensor(NamedTuple):
    """A tensor to publish: its type, and its contiguous little-endian bytes in pieces.

    A piece is read before the next one is asked for, so that all may come in the same memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[memoryview]


@dataclass
class _Snapshot:
    file: WeightFile
    view: memoryview
    manifest: WeightManifest


class Publication:
    """Published versions of one learner. `publish` and `read` may be called from different threads.

    A crashed learner leaves files behind; the next one to start in the same directory removes them. Who is
    alive is told by a file lock, which the kernel drops with the process: process ids mean nothing across
    containers.
    """

    def __init__(self, run_id: str, directory: Path = SHARED_MEMORY, *, refill: bool | None = None):
        """`refill` reuses files, by default only in shared memory: there a file's pages cannot run out.

        On a disk that copies on write they could, and a mapping that runs out of room kills the process.
        """
        self.directory = Path(directory)
        self._refill = self.directory == SHARED_MEMORY if refill is None else refill
        if not self.directory.is_dir():
            raise PublicationError(f"{self.directory} is not a directory. Name another one to publish weights in")
        remove_stale(self.directory)
        self.id = uuid.uuid4().hex[:12]
        """Unique id of this publication."""
        safe_id = re.sub(r"[^A-Za-z0-9_]", "_", run_id)[:80]
        self._base = self.directory / f"{PREFIX}{safe_id}-{os.getpid()}-{self.id}"
        self._lock_path = self._base.with_name(self._base.name + ".lock")
        self._lock_fd: int | None = _create_locked(self._lock_path)
        self._snapshots: dict[int, _Snapshot] = {}
        self._held: int | None = None
        """Version that is kept beside the newest two."""
        self._guard = threading.Lock()

    def publish(self, version: int, tensors: Iterable[Tensor], adapter: AdapterSpec | None = None) -> WeightManifest:
        """Write all tensors as `version`, drop all but the newest two versions and a held one; return the manifest.

        `adapter` describes them if they are adapters.

        Raises PublicationError if a tensor is malformed, the version is not new, or the directory is full.
        """
        if self._lock_fd is None:
            raise PublicationError("the publication is closed")
        if self._snapshots and version <= max(self._snapshots):
            raise PublicationError(f"version {version} is not newer than {max(self._snapshots)}")
        path = self._base.with_name(f"{self._base.name}-v{version}")
        file, entries, total_bytes = self._write(path, iter(tensors))
        manifest = WeightManifest(
            version=version,
            publication=self.id,
            tensors=entries,
            total_bytes=total_bytes,
            shm_path=str(path),
            adapter=adapter,
        )
        view = map_for_reading(path, total_bytes)
        with self._guard:
            self._snapshots[version] = _Snapshot(file, view, manifest)
        return manifest

    def hold(self, version: int) -> None:
        """Keep this version beside the newest two until `release`."""
        with self._guard:
            self._held = version

    def release(self, version: int) -> None:
        """Hold the version no longer; the next publication drops it. No-op if another one is held now."""
        with self._guard:
            if self._held == version:
                self._held = None

    def check_is_meant(self, publication: str) -> None:
        """Raise ProtocolError VERSION_GONE for another publication's id: its versions have other bits."""
        if publication != self.id:
            reason = f"publication {publication} has ended, that of this learner is {self.id}"
            raise ProtocolError(ErrorCode.VERSION_GONE, reason)

    def manifest(self, version: int) -> WeightManifest:
        """The manifest of a version. Raises ProtocolError VERSION_GONE."""
        return self._snapshot(version).manifest

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can still be read, oldest first."""
        with self._guard:
            return tuple(sorted(self._snapshots))

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that can still be read."""
        with self._guard:
            return sum(snapshot.view.nbytes for snapshot in self._snapshots.values())

    def read(self, version: int, offset: int, nbytes: int) -> memoryview:
        """A read-only view of a version's bytes. Raises ProtocolError VERSION_GONE, or MALFORMED for a bad range."""
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
        self._held = None
        for file in self._drop(0):
            file.remove()
        if self._lock_fd is not None:
            for path in self.directory.glob(f"{self._base.name}-v*"):
                path.unlink(missing_ok=True)  # left by an interrupted `publish`; without our lock they would stay
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

    def _drop(self, keep: int) -> list[WeightFile]:
        """Forget all but the newest `keep` versions and the held one.

        Returns the files of the others, which still have their names.
        """
        with self._guard:
            old = sorted(self._snapshots)[: max(0, len(self._snapshots) - keep)]
            # The mapping goes with its last view: one may be in a chunk that is being sent.
            return [self._snapshots.pop(version).file for version in old if version != self._held]

    def _write(self, path: Path, tensors: Iterator[Tensor]) -> tuple[WeightFile, tuple[TensorEntry, ...], int]:
        """Write the file of a version, reusing an old file without readers. Returns it, what it holds, and its size."""
        file: WeightFile | None = None
        layout, entries = FileLayout(), list[TensorEntry]()
        try:
            # Room first: the oldest goes before the new one is written, so there is never a copy more than are kept.
            for old in self._drop(KEPT_VERSIONS - 1):
                if self._refill and file is None and old.take_back(path):
                    file = old
                else:
                    old.remove()
            if file is None:
                file = WeightFile.create(path)
            with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
                for name, dtype, shape, pieces in tensors:
                    offset, nbytes = layout.place(name, dtype, shape)
                    end, xxh3 = file.put(offset, pieces, pool)
                    if end != offset + nbytes:
                        sizes = f"{dtype}{list(shape)} does not have {end - offset} bytes"
                        raise PublicationError(f"tensor {name!r}: {sizes}")
                    entry = TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, xxh3=xxh3)
                    entries.append(entry)
            if layout.end == 0:
                raise PublicationError("there is nothing to publish: no tensor has any element")
            file.finish(layout.end)
            file.show(path)
            return file, tuple(entries), layout.end
        except BaseException as problem:
            if file is not None:
                file.remove()
            if isinstance(problem, Exception):  # not Ctrl-C; ranks gather tensors together, and would wait for this one
                for name, dtype, shape, _ in tensors:
                    with suppress(PublicationError):
                        layout.place(name, dtype, shape)  # the message says how much it is
            if not isinstance(problem, OSError):
                raise
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise PublicationError(self._no_room(layout.end)) from None  # not the disk of the run
            raise PublicationError(f"cannot write weights to {path}: {problem}") from problem

    def _no_room(self, needed: int) -> str:
        kept = KEPT_VERSIONS + (self._held is not None)
        needed_mib, both_mib = -(-needed // MIB), -(-kept * needed // MIB)
        usage = shutil.disk_usage(self.directory)
        return (
            f"publishing weights needs {needed_mib:,} MiB in {self.directory}, which has {usage.free // MIB:,} free of "
            f"{usage.total // MIB:,} MiB. {kept} versions are kept: give it {both_mib:,} MiB "
            f"(docker run --shm-size={both_mib}m, compose: ASYNCRL_SHM_SIZE={both_mib}m, else mount -o "
            f"remount,size={both_mib}m {shlex.quote(str(self.directory))}), or train fewer weights: model.lora.rank=16"
        )


def publication_folder() -> Path:
    """The folder that versions are published in: shared memory, or where there is none that for temporary files.

    Raises PublicationError where this process may not write there."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    try:
        tempfile.TemporaryFile(prefix=PREFIX, dir=folder).close()
    except OSError as problem:
        raise PublicationError(
            f"weights cannot be published in {folder}: {problem.strerror}, for user {os.getuid()}. Make it writable: "
            f"chmod 1777 {shlex.quote(str(folder))}; a container gets one of its own by --shm-size=8g (compose: "
            "ASYNCRL_SHM_SIZE=8g), or in Kubernetes by an emptyDir of medium Memory"
        ) from problem
    return folder


def remove_stale(directory: Path) -> list[Path]:
    """Remove files of dead learners from `directory`, and return their paths. Files of living ones stay."""
    removed = []
    for lock in directory.glob(f"{PREFIX}*.lock"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = lock.name.removesuffix(".lock")
            for path in [*directory.glob(f"{owner}-v*"), lock]:
                path.unlink(missing_ok=True)
                removed.append(path)
        except BlockingIOError:
            pass  # its learner is alive
        finally:
            os.close(fd)
    return removed


def _create_locked(path: Path) -> int:
    """Create a file that is locked before it has its name: `remove_stale` of another process never sees it free."""
    unnamed = path.with_name(path.name + ".new")
    try:
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        unnamed.rename(path)
    except OSError as problem:
        raise PublicationError(f"cannot publish weights in {path.parent}: {problem}") from problem
    return fd
