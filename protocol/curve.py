"""CURVE key pairs as files: the learner's own, and those of the rollout servers that may connect.

    DIR/learner.secret          the learner's machine only (mode 0600)
    DIR/learner.public          every machine
    DIR/server.secret           rollout servers' machines only (mode 0600)
    DIR/servers/<name>.public   the learner's machine: the servers that may connect

A file holds one key: 40 characters of Z85 (https://rfc.zeromq.org/spec/32).
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

LEARNER_SECRET, LEARNER_PUBLIC, SERVER_SECRET = "learner.secret", "learner.public", "server.secret"
SERVERS = "servers"
DEFAULT_SERVER = "server"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


class KeyFileError(ValueError):
    """A key that cannot be read or made; the message names the file and the fix."""


@dataclass(frozen=True)
class LearnerKeys:
    """The learner's own pair, and the folder of the servers' public keys."""

    secret: bytes = field(repr=False)
    servers: Path

    def authorised(self) -> dict[bytes, str]:
        """Public key -> name. Read anew each time: keys may come and go during a run; what holds no key is skipped."""
        found: dict[bytes, str] = {}
        for path in sorted(self.servers.glob("*.public")):
            with suppress(KeyFileError):
                found[_read(path)] = path.stem
        return found

    @property
    def where(self) -> str:
        """Place of the keys of known peers, for a log line."""
        return str(self.servers)


@dataclass
class RelayKeys:
    """A server's own pair as the keys of an endpoint of its own, at which other servers fetch weights."""

    secret: bytes = field(repr=False)
    peers: frozenset[bytes] = frozenset()
    """Public keys of the servers that may connect, as the learner has named them last."""
    where = "the keys that the learner has named"

    def authorised(self) -> frozenset[bytes]:
        return self.peers


@dataclass(frozen=True)
class ServerKeys:
    """A rollout server's own pair, and the public key of the only learner that it accepts."""

    secret: bytes = field(repr=False)
    public: bytes
    peer_public: bytes
    folder: Path


def make_keys(folder: Path, server: str | None = None) -> list[Path]:
    """Make a learner's pair and one server's pair, or the pair of one more `server`, which can be withdrawn alone.

    Returns the files. Nothing is overwritten. Raises KeyFileError.
    """
    if server is None:
        servers = (folder / SERVER_SECRET, folder / SERVERS / f"{DEFAULT_SERVER}.public")
        return _write((folder / LEARNER_SECRET, folder / LEARNER_PUBLIC), servers)
    if not _NAME.match(server) or server in ("learner", DEFAULT_SERVER):
        raise KeyFileError(f"{server!r} cannot name a server's key: use letters, digits, '_', '-' and '.'")
    if not (folder / LEARNER_PUBLIC).is_file():
        raise KeyFileError(f"{folder / LEARNER_PUBLIC} does not exist. Make the learner's pair first: asyncrl keys DIR")
    return _write((folder / f"{server}.secret", folder / SERVERS / f"{server}.public"))


def copying_advice(folder: Path, server: str | None) -> str:
    """Explain which new file belongs on which machine."""
    public = folder / SERVERS / f"{server or DEFAULT_SERVER}.public"
    return f"""\
Set network.keys_dir on both sides; it is a folder with
  on the learner's machine:         {LEARNER_SECRET}, {LEARNER_PUBLIC}, {SERVERS}/{public.name}
  on each rollout server's machine: {LEARNER_PUBLIC}, and {public.stem}.secret as {SERVER_SECRET}
One machine for both needs nothing copied. Keep *.secret out of version control and off other machines.
To withdraw this server's key, delete {public} on the learner's machine: it cannot connect again."""


def read_learner_keys(folder: Path) -> LearnerKeys:
    """Read the learner's keys. Raises KeyFileError for a missing, public or damaged file, or no server key."""
    keys = LearnerKeys(_read_secret(folder / LEARNER_SECRET), folder / SERVERS)
    if not keys.authorised():
        raise KeyFileError(
            f"{keys.servers} holds no public key, so no rollout server could connect. Copy each server's "
            "*.public there, or make keys with: asyncrl keys DIR"
        )
    return keys


def read_server_keys(folder: Path) -> ServerKeys:
    """Read a server's keys for the learner. Raises KeyFileError if a file is missing, public or damaged."""
    secret = _read_secret(folder / SERVER_SECRET)
    return ServerKeys(secret, zmq.curve_public(secret), _read(folder / LEARNER_PUBLIC), folder)


def _write(*pairs: tuple[Path, Path]) -> list[Path]:
    """Write new pairs of a secret and a public file."""
    paths = [path for pair in pairs for path in pair]
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise KeyFileError(
            f"{', '.join(there)} exists already and is not overwritten: peers that hold its other half could no "
            "longer connect. Name another folder, or remove the old keys on every machine"
        )
    for secret_path, public_path in pairs:
        public, secret = zmq.curve_keypair()
        for path, key, mode in ((secret_path, secret, 0o600), (public_path, public, 0o644)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.touch(mode, exist_ok=False)
                path.chmod(mode)  # independent of the umask
                path.write_bytes(key + b"\n")
            except OSError as problem:
                raise KeyFileError(f"cannot write {path}: {problem.strerror}. Name another folder") from problem
    return paths


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    if path.stat().st_mode & 0o007:
        raise KeyFileError(f"every user of this machine can read the secret key {path}. Run: chmod 600 {path}")
    return key


def _read(path: Path) -> bytes:
    """Read a key in Z85. The text of the file never appears in a message."""
    try:
        key = path.read_bytes().strip()
        if len(z85.decode(key)) == 32:
            return key
    except OSError as problem:
        raise KeyFileError(
            f"cannot read the key {path}: {problem.strerror}. Make keys with: asyncrl keys DIR, copy what it "
            "names to each machine, and set network.keys_dir"
        ) from problem
    except (KeyError, ValueError, struct.error):
        pass  # not Z85
    raise KeyFileError(f"{path} does not hold a key (40 characters of Z85). Copy it again")
