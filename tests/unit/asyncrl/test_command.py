"""`asyncrl ... | head`: a command ends where nobody reads it any more, without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from asyncrl.launch.command import READER_GONE, command

CHANGES_WHAT_IS_PRINTED = ("PYTHONUNBUFFERED", "COLUMNS")
ASYNCRL = (sys.executable, "-m", "asyncrl")


def run_unread(*command: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose reader has gone before it begins."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name not in CHANGES_WHAT_IS_PRINTED}
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, check=False, timeout=120
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_a_command_ends_with_who_reads_it() -> None:
    assert run_unread(*ASYNCRL, "--help") == (READER_GONE, "")
    assert run_unread(*ASYNCRL, "train", "--help") == (READER_GONE, "")


def test_another_broken_pipe_is_an_error() -> None:
    @command
    def main() -> int:
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours:
            return ours.send(b"x")

    with pytest.raises(BrokenPipeError):
        main()


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", rb"\xb1 \u6f22"), ("latin-1", b"\xb1 \\u6f22"), ("utf-8", "± 漢".encode())]
)
def test_what_the_terminal_cannot_show_is_escaped(encoding: str, shown: bytes) -> None:
    prints = r"from asyncrl.launch.command import command; command(lambda: print('\xb1 \u6f22', 'a\ud83d') or 0)()"
    done = subprocess.run(
        [sys.executable, "-c", prints],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == shown + rb" a\ud83d"
