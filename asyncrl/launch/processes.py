"""A service as a child process: started, maybe again, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.devices.gpu_assignment import assign_gpus, gpu_environment
from asyncrl.errors import ExitCode
from asyncrl.journal import JOURNAL_FILE
from asyncrl.process_end import die_with_parent

LAST_LINES = 30
LOG_BYTES = 8 << 20
"""Size at which a log is moved to `<name>.log.1`, over an earlier one: a run's logs never fill its disk."""
LAST_BYTES = 1 << 20
"""End of a log in which its last words are looked for."""
_STARTED_AGAIN = "; it is started again"
_ERROR_LINE = re.compile(
    r"(?:[-\d]+ [:\d]+ .+? (?:ERROR|CRITICAL) +\S+: |error: |(?:\[rank\d+\]: )?(?=[\w.]*(?:Error|Exception)\b))"
    r"(?P<message>.+)"
)
"""A record of that level, the last line of a service, or of a traceback, before which torch puts the rank."""


@dataclass
class ServiceProcess:
    """One child process and its log."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    restart_arguments: Callable[[], Sequence[str]] = tuple
    """Return further arguments of every start but the first."""
    failure: Path | None = None
    """The file in which it saves why it stopped, unless it holds the run directory and saves it there."""
    process: subprocess.Popen[bytes] | None = None
    _group_is_gone: bool = False
    _started_at: float = 0.0

    def start(self) -> None:
        """Start the process, or start it again, once it has ended."""
        self.kill()
        again = self.process is not None
        self._group_is_gone, self._started_at = False, time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as output:
            if again:
                with contextlib.suppress(OSError):  # the disk may be full
                    output.write(f"--- {self.ending()}{_STARTED_AGAIN}\n".encode())
            self.process = subprocess.Popen(
                [*self.command, *(self.restart_arguments() if again else ())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C reaches us alone; we decide the order of stopping
                preexec_fn=partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None,
            )

    def rotate_log(self) -> None:
        """Move the log's last LOG_BYTES to `<name>.log.1` and empty it, once it is longer.

        The process, and those that it started, hold the file itself, opened for appending: no renaming reaches them.
        What is written in the instant between copy and truncation is lost.
        """
        with contextlib.suppress(OSError):  # no log yet, or a full disk: the next look tries again
            if self.log.stat().st_size > LOG_BYTES:
                self._rotated.write_bytes(_end_of(self.log, LOG_BYTES))
                os.truncate(self.log, 0)

    @property
    def _rotated(self) -> Path:
        return self.log.with_name(f"{self.log.name}.1")

    @property
    def age_s(self) -> float:
        """Seconds since it was started last."""
        return time.monotonic() - self._started_at

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process else None

    def terminate(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the whole tree: descendants with own sessions while the parent lives, and in any case its group."""
        if self.process is None or self._group_is_gone:
            return
        if self.process.poll() is None:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self.process.wait()
        # A service that crashed leaves its children in the group that it led.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._group_is_gone = True  # from now on the system may give the number to somebody else

    def ending(self) -> str:
        """Describe the exit code or signal; few users know that -9 may mean that memory ran out."""
        if self.code is None or self.code >= 0:
            return f"{self.name} ended with code {self.code}"
        name = signal.Signals(-self.code).name
        return f"{self.name} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def last_error(self) -> str:
        """The newest line of its log, since it was started last, that says what went wrong: logged as an error, or the
        end of a traceback. Empty where there is none, and where it was killed: it has not said that."""
        said = ""
        if self.code is not None and self.code < 0:
            return said
        for line in self._log_lines():
            if line.startswith("--- ") and line.endswith(_STARTED_AGAIN):
                said = ""
            elif found := _ERROR_LINE.match(line):
                said = found["message"]
        return said

    def last_words(self) -> str:
        """The end of its log: from the last `error:` line on if the exit code promises one, else LAST_LINES lines."""
        lines = self._log_lines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        explained = self.code in (ExitCode.USER_ERROR, ExitCode.BAD_STATE) and errors
        return "\n".join(lines[errors[-1] :] if explained else lines[-LAST_LINES:])

    def _log_lines(self) -> list[str]:
        ends = [_end_of(log, LAST_BYTES) for log in (self._rotated, self.log) if log.exists()]
        return b"".join(ends).decode(errors="replace").splitlines()


def learner_service(
    config: RunConfig, config_file: Path, *, resume: bool, accept_changes: bool = False, gpus: Sequence[str] = ()
) -> ServiceProcess:
    """Describe `python -m learner`. After a crash it resumes, unless it crashed before it had written anything.

    `gpus` are all that the launcher sees.
    """

    def resume_flag() -> Sequence[str]:
        return ("--resume",) if not resume and (config.run_path / JOURNAL_FILE).is_file() else ()

    flags = [*(["--resume"] if resume else []), *(["--accept-changes"] if accept_changes else [])]
    command = [sys.executable, "-m", "learner", "--config", str(config_file), *flags]
    ranks, sharing_device = config.learner.num_processes, config.trainer.mode == "sync"
    environment = service_variables(config.learner.cpu_threads, sharing=ranks, sharing_device=sharing_device)
    environment |= gpu_environment(config.learner.device, assign_gpus(config, len(gpus)).learner, gpus)
    return ServiceProcess("learner", command, config.run_path / "logs" / "learner.log", environment, resume_flag)


def server_services(config: RunConfig, config_file: Path, *, gpus: Sequence[str] = ()) -> list[ServiceProcess]:
    """Describe `python -m rollout_server`, rollout.servers times, each with its own log, metrics port and GPUs."""
    count = config.rollout.servers
    command = [sys.executable, "-m", "rollout_server", "--config", str(config_file)]
    sharing_device = config.trainer.mode == "sync"
    environment = service_variables(config.rollout.cpu_threads, sharing=count, sharing_device=sharing_device)
    services = []
    for number, numbers in enumerate(assign_gpus(config, len(gpus)).servers):
        name = "rollout_server" if count == 1 else f"rollout_server-{number + 1}"
        log, failure = (config.run_path / "logs" / f"{name}.{kind}" for kind in ("log", "failure.json"))
        port = [f"telemetry.rollout_port={config.telemetry.rollout_port + number}"] if number else []
        arguments = ["--failure-file", str(failure), *port]
        visible = gpu_environment(config.rollout.device, numbers, gpus)
        services.append(ServiceProcess(name, [*command, *arguments], log, {**environment, **visible}, failure=failure))
    return services


def service_variables(threads: int, sharing: int = 1, *, sharing_device: bool = False) -> dict[str, str]:
    """Give half of the cores to `sharing` services, or all to one that takes turns, unless `threads` says.

    Idle threads sleep, because spinning ones stall the other side.
    """
    cores = available_cores() if sharing_device else available_cores() // 2
    return {
        "OMP_NUM_THREADS": str(threads or max(1, cores // sharing)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_of(log: Path, nbytes: int) -> bytes:
    with log.open("rb") as file:
        file.seek(-min(nbytes, log.stat().st_size), os.SEEK_END)
        return file.read(nbytes)
