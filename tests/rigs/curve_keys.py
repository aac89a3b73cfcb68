"""CURVE key pairs of a learner and one server, as `asyncrl keys` lays them out."""

from __future__ import annotations

from pathlib import Path

import zmq

from protocol.curve import LEARNER_PUBLIC, LEARNER_SECRET, SERVER_SECRET, SERVERS


def make_keys(folder: Path) -> None:
    (folder / SERVERS).mkdir(parents=True)
    for secret_file, public_file in (
        (folder / LEARNER_SECRET, folder / LEARNER_PUBLIC),
        (folder / SERVER_SECRET, folder / SERVERS / "server.public"),
    ):
        public, secret = zmq.curve_keypair()
        secret_file.touch(0o600)
        secret_file.write_bytes(secret + b"\n")
        public_file.write_bytes(public + b"\n")
