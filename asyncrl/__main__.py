"""`python -m asyncrl` is the `asyncrl` command."""

import atexit
import os
import sys
from typing import NoReturn

from asyncrl.cli import main
from asyncrl.errors import ExitCode


def run() -> NoReturn:
    """Run the command, and end this process with its exit code.

    Threads are joined and exit handlers are called, as ever, but torch and transformers are not taken apart object by
    object, which takes over a second.
    """
    code: int = ExitCode.CRASHED

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)
    try:
        code = main()
    except SystemExit as ending:  # of argparse
        code = ending.code if isinstance(ending.code, int) else ExitCode.FINISHED
    sys.exit(code)


if __name__ == "__main__":
    run()
