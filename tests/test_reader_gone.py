"""`asyncrl ... | head`: a command ends where nobody reads it any more, without a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.reader_gone import READER_GONE, ends_with_its_reader

PRINTS_FOR_EVER = """
import sys
from asyncrl.reader_gone import ends_with_its_reader

@ends_with_its_reader
def main():
    while True:
        print("one more line")

sys.exit(main())
"""


def read_first_line(*command: str) -> tuple[str, int, str]:
    """With the exit code, and what it says to stderr."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    _, told = process.communicate(timeout=60)
    return line, process.returncode, told


def test_a_command_ends_with_who_reads_it() -> None:
    assert read_first_line(sys.executable, "-c", PRINTS_FOR_EVER) == ("one more line\n", READER_GONE, "")


def test_the_doctor_ends_with_who_reads_it() -> None:
    line, code, told = read_first_line(sys.executable, "-m", "asyncrl", "doctor")
    assert line.startswith("ok ")
    assert (code, told) == (READER_GONE, "")


def test_another_broken_pipe_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    @ends_with_its_reader
    def main() -> int:
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours:
            return ours.send(b"x")

    with pytest.raises(BrokenPipeError):
        main()


def test_without_an_output_a_command_says_what_is_wrong_all_the_same(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m asyncrl export "{tmp_path}" "{tmp_path}/model" >&-'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (2, f"error: there is no checkpoint in {tmp_path}/checkpoints\n")


def test_a_file_has_readers_enough(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-m", "asyncrl", "--help"], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_text().startswith("usage: asyncrl")
