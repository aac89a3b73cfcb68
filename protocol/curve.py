"""CURVE key pairs as files: the learner's own, and those of the rollout servers that may connect.

    DIR/learner.secret          the learner's machine only (mode 0600)
    DIR/learner.public          every machine
    DIR/server.secret           rollout servers' machines only (mode 0600)
    DIR/servers/<name>.public   the learner's machine: the servers that may connect

A file holds one key: 40 characters of Z85 (https://rfc.zeromq.org/spec/32).
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

LEARNER_SECRET, LEARNER_PUBLIC, SERVER_SECRET = "learner.secret", "learner.public", "server.secret"
SERVERS = "servers"
DEFAULT_SERVER = "server"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_KEY_LENGTH = 40


class KeyFileError(ValueError):
    """A key that cannot be read or made; the message names the file and the fix."""


@dataclass(frozen=True)
class LearnerKeys:
    """The learner's own pair, and the folder of the servers' public keys."""

    secret: bytes = field(repr=False)
    public: bytes
    servers: Path

    def authorised(self) -> dict[bytes, str]:
        """Raw public key (32 bytes) -> name. Read anew each time: keys may come and go during a run.

        A file that holds no key is skipped.
        """
        found: dict[bytes, str] = {}
        for path in sorted(self.servers.glob("*.public")):
            try:
                found[z85.decode(_read(path))] = path.stem
            except KeyFileError:
                continue
        return found


@dataclass(frozen=True)
class ServerKeys:
    """A rollout server's own pair, and the public key of the only learner that it accepts."""

    secret: bytes = field(repr=False)
    public: bytes
    learner_public: bytes
    folder: Path


def make_keys(folder: Path) -> list[Path]:
    """Make a learner's pair and one server's pair, and return the files. Nothing is overwritten.

    Raises KeyFileError.
    """
    secret, public = folder / LEARNER_SECRET, folder / LEARNER_PUBLIC
    server_secret, server_public = folder / SERVER_SECRET, folder / SERVERS / f"{DEFAULT_SERVER}.public"
    _check_absent(secret, public, server_secret, server_public)
    return [*_write_pair(secret, public), *_write_pair(server_secret, server_public)]


def make_server_key(folder: Path, name: str) -> list[Path]:
    """Make one more server's pair, which can be withdrawn alone: `<name>.secret` and `servers/<name>.public`."""
    if not _NAME.match(name) or name in ("learner", DEFAULT_SERVER):
        raise KeyFileError(f"{name!r} cannot name a server's key: use letters, digits, '_', '-' and '.'")
    if not (folder / LEARNER_PUBLIC).is_file():
        raise KeyFileError(f"{folder / LEARNER_PUBLIC} does not exist. Make the learner's pair first: asyncrl keys DIR")
    secret, public = folder / f"{name}.secret", folder / SERVERS / f"{name}.public"
    _check_absent(secret, public)
    return _write_pair(secret, public)


def copying_advice(folder: Path, server: str | None) -> str:
    """Explain which new file belongs on which machine."""
    source = folder / (f"{server}.secret" if server else SERVER_SECRET)
    public = folder / SERVERS / f"{server or DEFAULT_SERVER}.public"
    return "\n".join(
        [
            "Set network.keys_dir on both sides; it is a folder with",
            f"  on the learner's machine:         {LEARNER_SECRET}, {LEARNER_PUBLIC}, {SERVERS}/{public.name}",
            f"  on each rollout server's machine: {LEARNER_PUBLIC}, and {source.name} as {SERVER_SECRET}",
            "One machine for both needs nothing copied. Keep *.secret out of version control and off other machines.",
            f"To withdraw this server's key, delete {public} on the learner's machine: it cannot connect again.",
        ]
    )


def read_learner_keys(folder: Path) -> LearnerKeys:
    """Read the learner's keys. Raises KeyFileError for a missing, public or damaged file, or no server key."""
    secret = _read_secret(folder / LEARNER_SECRET)
    keys = LearnerKeys(secret, zmq.curve_public(secret), folder / SERVERS)
    if not keys.authorised():
        raise KeyFileError(
            f"{keys.servers} holds no public key, so no rollout server could connect. Copy each server's "
            "*.public there, or make keys with: asyncrl keys DIR"
        )
    return keys


def read_server_keys(folder: Path) -> ServerKeys:
    """Read a server's keys. Raises KeyFileError if a file is missing, public or damaged."""
    secret = _read_secret(folder / SERVER_SECRET)
    return ServerKeys(secret, zmq.curve_public(secret), _read(folder / LEARNER_PUBLIC), folder)


def _write_pair(secret_path: Path, public_path: Path) -> list[Path]:
    public, secret = zmq.curve_keypair()
    for folder in (secret_path.parent, public_path.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as problem:
            raise KeyFileError(f"cannot make {folder}: {problem.strerror}. Name another folder") from problem
    return [_write(secret_path, secret, 0o600), _write(public_path, public, 0o644)]


def _check_absent(*paths: Path) -> None:
    there = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise KeyFileError(
            f"{', '.join(there)} exists already and is not overwritten: peers that hold its other half could no "
            "longer connect. Name another folder, or remove the old keys on every machine"
        )


def _write(path: Path, key: bytes, mode: int) -> Path:
    """Write a new file. O_EXCL keeps one that appeared a moment ago."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)  # independent of the umask
            file.write(key + b"\n")
    except OSError as problem:
        raise KeyFileError(f"cannot write {path}: {problem.strerror}") from problem
    return path


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    if path.stat().st_mode & 0o007:
        raise KeyFileError(f"every user of this machine can read the secret key {path}. Run: chmod 600 {path}")
    return key


def _read(path: Path) -> bytes:
    """Read a key in Z85. The text of the file never appears in a message."""
    try:
        key = path.read_bytes()[: 4 * _KEY_LENGTH].strip()
    except OSError as problem:
        raise KeyFileError(
            f"cannot read the key {path}: {problem.strerror}. Make keys with: asyncrl keys DIR, copy what it "
            "names to each machine, and set network.keys_dir"
        ) from problem
    try:
        whole = len(key) == _KEY_LENGTH and len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):
        whole = False
    if not whole:
        raise KeyFileError(f"{path} does not hold a key (40 characters of Z85). Copy it again")
    return key
