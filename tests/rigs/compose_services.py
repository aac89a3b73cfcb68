"""The services of docker-compose.yml as processes of this machine: the same commands, health checks and signals.

What a container has of its own is replaced: absolute folders, the learner's name on the network, and ports.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.rigs.prefork import Service, fork_module

ROOT = Path(__file__).parents[2]
COMPOSE = shutil.which("docker-compose")


def resolved(*profiles: str, folder: Path = ROOT, **environment: str) -> dict[str, Any]:
    """docker-compose.yml of the folder as Compose understands it: variables, .env, anchors and extensions filled in."""
    assert COMPOSE is not None
    flags = [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [COMPOSE, *flags, "config"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    services = found["services"].items()  # older versions print those of other profiles, too
    chosen = {name: one for name, one in services if not one.get("profiles") or set(profiles) & set(one["profiles"])}
    return {**found, "services": chosen}


def seconds(text: str) -> float:
    """Seconds of a duration as Compose writes it, such as 1m30s."""
    total, number = 0.0, ""
    for letter in text:
        if letter in "hms":
            total += float(number) * {"h": 3600, "m": 60, "s": 1}[letter]
            number = ""
        else:
            number += letter
    return total


@dataclass
class Container:
    """One instance of a service. `replaced` are texts of its commands and what stands for them here."""

    service: dict[str, Any]
    replaced: dict[str, str]
    bin: Path
    """Folder with the image's own commands; first in PATH."""
    log: Path
    exits: list[int] = field(default_factory=list)
    process: Service | None = None
    _is_wanted: bool = False
    _watcher: threading.Thread | None = None

    def words(self, command: list[str]) -> list[str]:
        for before, after in self.replaced.items():
            command = [word.replace(before, after) for word in command]
        return command

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **self.service.get("environment", {})}

    def start(self) -> None:
        """Start, and start again after failures as the restart policy says."""
        self._is_wanted = True
        self._spawn()
        self._watcher = threading.Thread(target=self._restart_on_failure, daemon=True)
        self._watcher.start()

    def _spawn(self) -> None:
        words = self.words(self.service["command"])
        if words[0] == "asyncrl":
            self.process = fork_module("asyncrl", words[1:], self.log, self.environment, str(ROOT))
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    def _restart_on_failure(self) -> None:
        policy, _, most = str(self.service.get("restart", "no")).partition(":")
        left, delay_s = int(most or 1000), 0.1
        while self.process is not None:
            code = self.process.wait()
            self.exits.append(code)
            if not self._is_wanted or policy == "no" or (policy == "on-failure" and code == 0) or not left:
                return
            left, delay_s = left - 1, 2 * delay_s
            time.sleep(delay_s)
            if self._is_wanted:
                self._spawn()

    def run(self, timeout_s: float) -> int:
        """Run to the end; returns the exit code."""
        self._spawn()
        assert self.process is not None
        return self.process.wait(timeout=timeout_s)

    def is_healthy(self) -> bool:
        time.sleep(0.5)
        check = self.service["healthcheck"]
        kind, command, *words = self.words(check["test"])
        assert (kind, command) == ("CMD", "asyncrl")
        done = fork_module("asyncrl", words, self.log.with_suffix(".health"), self.environment, str(ROOT))
        try:
            return done.wait(seconds(check["timeout"])) == 0
        except subprocess.TimeoutExpired:
            done.kill()
            return False

    def stop(self) -> float:
        """Stop as `docker compose stop` does. Raises TimeoutExpired after its grace period."""
        self._is_wanted = False
        began = time.monotonic()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(getattr(signal, self.service.get("stop_signal", "SIGTERM")))
            self.process.wait(timeout=seconds(self.service["stop_grace_period"]))
        if self._watcher is not None:
            self._watcher.join(timeout=30)  # one that is late would see a later start as its own, and start a second
        return time.monotonic() - began

    def kill(self) -> None:
        self._is_wanted = False
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def image_commands(folder: Path) -> Path:
    """`asyncrl` and `python` as the images have them in PATH."""
    folder.mkdir()
    for name, words in (("asyncrl", f"{sys.executable} -m asyncrl"), ("python", sys.executable)):
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder
