"""`asyncrl ... | head`: a command ends where nobody reads it any more, without a traceback."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.launch.broken_pipe import READER_GONE, ends_with_its_reader
from tests.tools.test_panel import write_run

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


@pytest.mark.parametrize("words", [["doctor"], ["config-reference"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_a_command_ends_with_who_reads_it(words: list[str]) -> None:
    assert run_unread(*ASYNCRL, *words) == (READER_GONE, "")


def test_so_do_those_that_print_by_rich(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert run_unread(*ASYNCRL, "watch", str(tmp_path / "run")) == (READER_GONE, "")


def test_another_broken_pipe_is_an_error() -> None:
    @ends_with_its_reader
    def main() -> int:
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours:
            return ours.send(b"x")

    with pytest.raises(BrokenPipeError):
        main()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["export", "{folder}", "{folder}/model"], 2, "error: there is no checkpoint in {folder}/checkpoints\n"),
        (["watch", "{folder}/run"], 0, ""),
        (["config-reference"], 0, ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_without_an_output_a_command_does_its_work_all_the_same(
    tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    write_run(tmp_path / "run").status(phase="finished")
    command = shlex.join([*ASYNCRL, *(word.format(folder=tmp_path) for word in words)])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (code, told.format(folder=tmp_path))


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_service_without_an_output_keeps_its_exit_code(closed: str) -> None:
    command = f'"{sys.executable}" -c "from asyncrl.entry import _quit; _quit(4)" {closed}'
    assert subprocess.run(["bash", "-c", command], check=False, timeout=60).returncode == 4


def test_a_file_has_readers_enough(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        subprocess.run([*ASYNCRL, "--help"], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_text().startswith("usage: asyncrl")
