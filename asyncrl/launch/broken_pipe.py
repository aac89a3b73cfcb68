"""Exit quietly when the pipe that reads a command's output closes (`| head`)."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")
READER_GONE = 128 + signal.SIGPIPE
"""Exit code, as a shell has it of a program that the signal ended."""


def ends_with_its_reader(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command to return READER_GONE on a broken stdout. Other broken pipes are raised."""

    @wraps(main)
    def ended(*arguments: P.args, **named: P.kwargs) -> int:
        try:
            try:
                return main(*arguments, **named)
            finally:
                print(end="", flush=True)  # also after argparse has printed its help and raised SystemExit
        except BrokenPipeError:
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if not poll.poll(0):  # an error of the descriptor is always reported: this pipe is another one
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
            return READER_GONE

    return ended
