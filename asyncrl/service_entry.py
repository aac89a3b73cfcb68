"""Start a service: arguments, configuration, logging, and its exit code.

0 finished, 1 crashed (the launcher starts the service again), 2 the user can fix it, 3 bad state (not started again),
4 a rollout server whose learner left before the end, 130 interrupted. Of 2 and 3 the last line says why.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from asyncrl.config.load import load_config
from asyncrl.config.run_sections import NetworkConfig
from asyncrl.config.schema import RunConfig
from asyncrl.errors import ExitCode, LearnerLeftError, RestartError, UserError
from asyncrl.process_end import leave
from asyncrl.run_folder.failure import ReservedFailureFile, failure_of
from asyncrl.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartMode:
    """The way a service is started, beside its configuration."""

    resume: bool = False
    unattended: bool = False
    """Started by a machine, which starts it again after failures."""
    accept_changes: bool = False
    """A resumed run takes rows and rewards that have changed as they are now."""


QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables for libraries that are imported later, and for children: a log has no progress bars, a fork no warning."""
Main = Callable[[RunConfig, StartMode], None]


def run_service(name: str, main: Main) -> NoReturn:
    """Parse `--config FILE [--resume [--accept-changes]] [--unattended] [key=value ...]`, run `main`, and exit."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, type=Path, help="YAML configuration")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of run_dir")
    parser.add_argument("--accept-changes", action="store_true", help="with rows and rewards as they are now")
    parser.add_argument("--unattended", action="store_true", help="started by a machine, again after failures")
    parser.add_argument("--failure-file", type=Path, help="where to save why it stopped, for a launcher")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    try:
        code = _guarded(name, main, arguments)
    except Exception as crash:
        sys.excepthook(type(crash), crash, crash.__traceback__)
        code = ExitCode.CRASHED
    leave(code)


def _guarded(name: str, main: Main, arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        config = load_config(arguments.config, arguments.overrides)
        configure_logging(name, config.telemetry.log_level)
        config = resolved(config)
        start = StartMode(arguments.resume, arguments.unattended, arguments.accept_changes)
        return _run(name, main, config, start, arguments.failure_file)
    except UserError as error:
        _print_error(error)
        return ExitCode.USER_ERROR
    except RestartError as error:
        _print_error(error)
        return ExitCode.CRASHED
    except LearnerLeftError as error:
        logger.info("the learner left before the end of the run (%s). Start this server again when it continues", error)
        return ExitCode.LEARNER_LEFT
    except KeyboardInterrupt:
        logger.info("interrupted")
        return ExitCode.INTERRUPTED


def resolved(config: RunConfig) -> RunConfig:
    """Decide model.dtype=auto once, for all that this service loads and says."""
    from asyncrl.devices.device import resolve_dtype

    decided = resolve_dtype(config)
    if decided != config:
        logger.info("model.dtype: auto is %s here", decided.model.dtype)
    return decided


def _run(name: str, main: Main, config: RunConfig, start: StartMode, failure_file: Path | None) -> int:
    """Run `main` until it ends, well or in bad state. Any other exception is a crash, with its traceback in the log."""
    with ExitStack() as resources:
        reserved: ReservedFailureFile | None = None
        try:
            reserved = resources.enter_context(ReservedFailureFile(failure_file)) if failure_file else None
            main(config, start)
        except Exception as error:
            failure = failure_of(error, name, config.run_path)
            if failure and reserved:
                reserved.save(failure)
            if failure is None or failure.kind == "user_error":
                raise
            logger.error("stopped: %s", failure.reason)
            logger.debug("the error", exc_info=True)
            _print_error(failure.reason)
            return ExitCode.BAD_STATE
    return ExitCode.FINISHED


def _print_error(reason: object) -> None:
    """Say why the service ends, as the last line of its log."""
    with suppress(OSError):  # of a log on a full disk; the exit code says enough
        logging.shutdown()  # what was counted and not said comes before
        print(f"error: {reason}", file=sys.stderr, flush=True)


def require_fixed_ports(network: NetworkConfig) -> None:
    """Refuse ports of 0: the other side would not know the free port that a service on its own takes."""
    for key in ("control_port", "weights_port"):
        if getattr(network, key) == 0:
            raise UserError(
                f"network.{key} is 0, which only `asyncrl train` can resolve. Set the same port on both sides"
            )
