"""`asyncrl keys`: CURVE key pairs as files, which protocol/curve.py reads."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import zmq

from asyncrl.errors import ExitCode, UserError
from protocol.curve import LEARNER_PUBLIC, LEARNER_SECRET, SERVER_SECRET, SERVERS

DEFAULT_SERVER = "server"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


def run(arguments: argparse.Namespace) -> int:
    written = make_keys(arguments.folder, arguments.server)
    print("\n".join(f"wrote {path}" for path in written))
    print(copying_advice(arguments.folder, arguments.server))
    return ExitCode.FINISHED


def make_keys(folder: Path, server: str | None = None) -> list[Path]:
    """Make a learner's pair and one server's pair, or the pair of one more `server`, which can be withdrawn alone.

    Returns the files. Nothing is overwritten. Raises UserError.
    """
    if server is None:
        servers = (folder / SERVER_SECRET, folder / SERVERS / f"{DEFAULT_SERVER}.public")
        return _write_pairs((folder / LEARNER_SECRET, folder / LEARNER_PUBLIC), servers)
    if not _NAME.match(server) or server in ("learner", DEFAULT_SERVER):
        raise UserError(f"{server!r} cannot name a server's key: use letters, digits, '_', '-' and '.'")
    if not (folder / LEARNER_PUBLIC).is_file():
        raise UserError(f"{folder / LEARNER_PUBLIC} does not exist. Make the learner's pair first: asyncrl keys DIR")
    return _write_pairs((folder / f"{server}.secret", folder / SERVERS / f"{server}.public"))


def _write_pairs(*pairs: tuple[Path, Path]) -> list[Path]:
    """Write new pairs of a secret and a public file."""
    paths = [path for pair in pairs for path in pair]
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise UserError(
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
                raise UserError(f"cannot write {path}: {problem.strerror}. Name another folder") from problem
    return paths


def copying_advice(folder: Path, server: str | None) -> str:
    """Explain which new file belongs on which machine."""
    public = folder / SERVERS / f"{server or DEFAULT_SERVER}.public"
    return f"""\
Set network.keys_dir on both sides; it is a folder with
  on the learner's machine:         {LEARNER_SECRET}, {LEARNER_PUBLIC}, {SERVERS}/{public.name}
  on each rollout server's machine: {LEARNER_PUBLIC}, and {public.stem}.secret as {SERVER_SECRET}
One machine for both needs nothing copied. Keep *.secret out of version control and off other machines.
To withdraw this server's key, delete {public} on the learner's machine: it cannot connect again."""
