"""Who reads what a command prints may stop early, as `head` does: the command then ends, and nothing is wrong."""

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
    """A command that ends with READER_GONE where it cannot print any more. Other broken pipes are raised."""

    @wraps(main)
    def ended(*arguments: P.args, **named: P.kwargs) -> int:
        if sys.stdout is None:  # it was closed before, as by `>&-`
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
        output = sys.stdout
        try:
            try:
                code = main(*arguments, **named)
            except SystemExit:  # of argparse, which has printed its help
                output.flush()
                raise
            output.flush()
            return code
        except BrokenPipeError:
            if not _is_nobody_reading(output.fileno()):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # the interpreter flushes once more
            return READER_GONE

    return ended


def _is_nobody_reading(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))  # an error is always reported
