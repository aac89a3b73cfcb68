"""`python -m asyncrl` is the `asyncrl` command."""

import sys
from typing import NoReturn

from asyncrl.cli import main
from asyncrl.errors import ExitCode
from asyncrl.process_end import leave


def run() -> NoReturn:
    """Run the command, and end this process with its exit code.

    It ends as a service does: taking torch and transformers apart object by object would take over a second.
    """
    try:
        code = main()
    except SystemExit as ending:  # of argparse
        code = ending.code if isinstance(ending.code, int) else ExitCode.FINISHED
    except Exception as crash:
        sys.excepthook(type(crash), crash, crash.__traceback__)
        code = ExitCode.CRASHED
    leave(code)


if __name__ == "__main__":
    run()
