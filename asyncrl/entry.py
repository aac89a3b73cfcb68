"""How both services start: arguments, configuration, logging, and what an exit code means.

0 finished, 1 crashed (the launcher starts the service again), 2 the user can mend it (the last line says how), 3 bad
state (not started again), 4 a rollout server whose learner left before the end, 130 interrupted. The reason of 2 and
3 is in failure.json, where there is a run directory; not that of a refused --resume, which is no failure of the run.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, ExitCode, LearnerLeftError, ResumeRefusedError, RunTakenError, UserError
from asyncrl.telemetry.failure import (
    describe_full_disk,
    failure_of,
    kind_of,
    release,
    reserve,
    save_failure,
)
from asyncrl.telemetry.logs import configure_logging
from asyncrl.telemetry.recorder import read_status

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """How a service is started, beside its configuration."""

    resume: bool = False
    unattended: bool = False
    """By a machine, which starts it again after failures."""


Main = Callable[[RunConfig, Start], None]
ENDING_S = 3.0
"""For threads and exit handlers, after `main`. Together with the time that trackers have, less than a launcher gives a
service before it kills it."""


def run_service(name: str, main: Main, *, leave: bool = False) -> None:
    """Parse `--config FILE [--resume] [--unattended] [key=value ...]`, run `main` and exit.

    `leave`: nothing is left to do then but exit handlers: `main` closes its sockets, and waits for what they send.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, type=Path, help="YAML configuration")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of run_dir")
    parser.add_argument("--unattended", action="store_true", help="end where run_dir says that the run is finished")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    if not leave:
        sys.exit(_guarded(name, main, arguments))
    try:
        code = _guarded(name, main, arguments)
    except Exception as crash:
        sys.excepthook(type(crash), crash, crash.__traceback__)
        code = ExitCode.CRASHED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End as the interpreter does, threads and exit handlers first, but do not take its modules apart: extension
    modules tell their leaks at that (nanobind, in triton) below the log's last word, or crash a run that is finished.

    What is not done after ENDING_S is left: W&B waits 90 s for a server that does not answer.
    """
    patience = threading.Timer(ENDING_S, _quit, (code,))
    patience.daemon = True
    patience.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it ends already, and an exit handler may be in the middle of it
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    patience.cancel()
    _quit(code)


def _quit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(code)


def _guarded(name: str, main: Main, arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = load_config(arguments.config, arguments.overrides)
        configure_logging(name, config.telemetry.log_level)
        return _run(name, main, config, Start(arguments.resume, arguments.unattended))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except LearnerLeftError as error:
        logger.info("the learner left before the end of the run (%s). Start this server again when it continues", error)
        return ExitCode.LEARNER_LEFT
    except KeyboardInterrupt:
        logger.info("interrupted")
        return ExitCode.INTERRUPTED


def _run(name: str, main: Main, config: RunConfig, start: Start) -> int:
    """Until it ends, well or in bad state. Everything else that is raised is a crash, with its traceback in the log."""
    earlier, is_new, is_taken = failure_of(config.run_path, name), True, False
    try:
        is_new = reserve(config.run_path, name)
        main(config, start)
    except RunTakenError:
        is_taken = not is_new  # what is reserved there is the other's
        raise
    except (ResumeRefusedError, LearnerLeftError):
        raise
    except UserError as error:
        if config.run_path.is_dir():  # a run that could not begin leaves nothing behind
            save_failure(config.run_path, name, str(error), kind="user_error", instead_of=earlier)
        raise
    except Exception as error:
        kind = kind_of(error)
        if kind is None:
            raise
        reason = describe_full_disk(error, config.run_path) if kind == "disk_full" else str(error)
        logger.error("the run stops: %s", reason, exc_info=not isinstance(error, BadStateError))
        print(f"error: {reason}", file=sys.stderr)
        if kind != "timed_out" or _is_under_way(config):
            save_failure(config.run_path, name, reason, kind=kind, instead_of=earlier)
        return ExitCode.BAD_STATE
    finally:
        if not is_taken:
            release(config.run_path, name)
    return ExitCode.FINISHED


def _is_under_way(config: RunConfig) -> bool:
    """Else a server has waited for a learner that never came: no run has begun, or it is finished, not failed."""
    return config.run_path.is_dir() and read_status(config.run_path).get("phase") != "finished"


def require_fixed_ports(config: RunConfig) -> None:
    """A service on its own cannot take a free port: the other side would not know it."""
    for key in ("control_port", "weights_port"):
        if getattr(config.network, key) == 0:
            raise UserError(
                f"network.{key} is 0, which only `asyncrl train` can resolve. Set the same port on both sides"
            )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
