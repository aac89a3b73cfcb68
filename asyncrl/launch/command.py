"""The frame of a command: errors as a line and an exit code, and a quiet end where its reader has gone (`| head`).

A command may also leave its process to a module of ours (`become`).
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

from asyncrl.errors import BadStateError, ExitCode, UserError
from asyncrl.telemetry.logs import quiet_deepspeed

P = ParamSpec("P")
READER_GONE = 128 + signal.SIGPIPE
"""Exit code, as a shell has it of a program that the signal ended."""


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command: UserError and BadStateError become a line on stderr and their exit codes, an interruption
    130, and a broken stdout READER_GONE. Other broken pipes are raised. What stdout's encoding has not is escaped."""

    @wraps(main)
    def framed(*arguments: P.args, **named: P.kwargs) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does from the start
        quiet_deepspeed()
        try:
            try:
                return main(*arguments, **named)
            except (UserError, BadStateError) as error:
                print(f"error: {error}", file=sys.stderr)
                return ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.BAD_STATE
            except KeyboardInterrupt:
                return ExitCode.INTERRUPTED
            finally:
                print(end="", flush=True)  # also after argparse has printed its help and raised SystemExit
        except BrokenPipeError:
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if not poll.poll(0):  # an error of the descriptor is always reported: this pipe is another one
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
            return READER_GONE

    return framed


def become(module: str, *arguments: str) -> NoReturn:
    """Replace this process: signals and the exit code are the module's own."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
