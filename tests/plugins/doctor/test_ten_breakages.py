"""Ten things that go wrong on rented machines, really broken: one line names each, with its fix."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.run_folder.lock import LEARNER_LOCK
from asyncrl.telemetry.recorder import read_status
from asyncrl_plugins.doctor import machine, versions
from asyncrl_plugins.doctor.findings import MARKS
from protocol.messages import PROTOCOL_MAJOR
from rollout_server.link import LearnerLink
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import LearnerRig, small_config
from tests.rigs.prefork import RUN_FIRST
from tests.rigs.small_disks import needs_mount, small_disks
from tests.rigs.small_runs import small
from tests.rigs.two_processes import start_command, write_config
from tests.rigs.waiting import wait_until

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def examined(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """The one problem that `asyncrl doctor CONFIG --quick` finds, besides those with the names in `besides`."""
    no_devices = json.dumps({"torch": "", "cuda": None, "devices": []})
    monkeypatch.setattr(machine, "LIST_DEVICES", f"print({no_devices!r})")  # spares each test an import of torch

    def examine(besides: tuple[str, ...] = (), **sections: dict[str, Any]) -> str:
        file = write_config(small(make_config, **sections), tmp_path / "config")
        code = asyncrl(["doctor", str(file), "--quick"])
        return the_problem(capsys.readouterr().out, code, besides)

    return examine


def the_problem(printed: str, code: int, besides: tuple[str, ...] = ()) -> str:
    """One line has it, and the exit code says that there is one."""
    others = tuple(f"{MARKS['problem']} {name}" for name in besides)
    lines = [line for line in printed.splitlines() if line.startswith(MARKS["problem"])]
    lines = [line for line in lines if not others or not line.startswith(others)]
    assert len(lines) == 1, printed
    assert code == 1
    return lines[0]


def assert_says(line: str, what: str, value: str, fix: str) -> None:
    """`value` and `fix` are regular expressions."""
    pattern = rf"{MARKS['problem']} +{what} +.*{value}.*\. Fix: .*{fix}"
    assert re.fullmatch(f"{pattern}.*", line), f"{line}\n{pattern}"


def test_1_port_taken(examined: Callable[..., str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = examined(network={"control_port": port})
    holder = re.escape(f"{psutil.Process().name()} (process {os.getpid()})")
    value = rf"port {port} \(network.control_port\) on 127.0.0.1 is held by {holder}"
    assert_says(line, "ports", value, "set network.control_port to another port")


def test_2_dataset_column_missing(examined: Callable[..., str]) -> None:
    line = examined(data={"answer_key": "anser"})
    value = r"rl.parquet has no column 'anser' \(data.answer_key\)"
    assert_says(line, "training data", value, r"Did you mean data.answer_key=answer\?")


def test_3_template_without_image_placeholder(examined: Callable[..., str], tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    blind = template.read_text().replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    assert blind != template.read_text()
    template.write_text(blind)
    line = examined(model={"path": str(folder)})
    value = r"64 of 64 training rows .* has 0 image tokens, but its 1 image\(s\) need \d+"
    assert_says(line, "bad rows", value, "one image placeholder per image")


def test_4_wrong_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an upgrade of one of the two leaves behind."""
    other = tmp_path / "torchvision-0.15.2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.15.2\nRequires-Dist: torch (==2.0.1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(versions, "installed_version", versions.installed_version.__wrapped__)  # not a kept one
    code = asyncrl(["doctor"])
    line = the_problem(capsys.readouterr().out, code)
    assert_says(line, "torchvision", r"0.15.2 needs torch==2.0.1, and torch is \d", "bash scripts/install.sh")


@pytest.mark.slow
@needs_mount
def test_5_tiny_disk_and_6_shm_too_small(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    config = small(make_config, trainer={"journal_limit_mib": 1}).model_copy(update={"run_dir": str(disk / "run")})
    monkeypatch.setenv(RUN_FIRST, small_disks(tmp_path, {str(disk): "3m", "/dev/shm": "600k"}))
    file, log = write_config(config, tmp_path / "config"), tmp_path / "doctor.log"
    code = start_command("doctor", str(file), "--quick", log=log).wait(timeout=120)
    printed = log.read_text()
    line = the_problem(printed, code, besides=("room to publish",))
    value = rf"3.0 MiB free in {disk}; the run writes up to \d+\.\d MiB: 1 checkpoint of "
    assert_says(line, "disk of run_dir", value, "set run_dir on a larger disk")
    line = the_problem(printed, code, besides=("disk of run_dir",))
    value = r"published weights need \d\.\d MiB in /dev/shm, which has 0.6 MiB free"
    assert_says(line, "room to publish", value, "--shm-size=2g")


def test_shared_memory_that_may_not_be_written(examined: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.weights.SHARED_MEMORY", Path("/proc"))
    assert_says(examined(), "room to publish", "weights cannot be published in /proc", "chmod 1777 /proc")


def test_5_tiny_disk_by_a_limit_on_file_sizes(examined: Callable[..., str]) -> None:
    """A limit of the process in place of a small disk, for users that may not mount."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        line = examined()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_says(line, "file sizes", "may write files of 0.5 MiB, and a checkpoint has one of", "ulimit -f unlimited")


def test_7_no_memory(examined: Callable[..., str], tiny_model: Path, tmp_path: Path) -> None:
    """A model of 400 billion parameters. Its weights are not looked at."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    (described.get("text_config") or described)["intermediate_size"] = 2**30
    (folder / "config.json").write_text(json.dumps(described))
    line = examined(
        ("disk of run_dir", "room to publish"),  # it fits nowhere
        model={"path": str(folder)},
        learner={"device": "cpu"},
        rollout={"device": "cpu"},
    )
    assert_says(line, "host memory", r"needs [\d,.]+ GiB .*, [\d.]+ GiB are available", "use a smaller model")


@pytest.mark.slow
def test_8_dead_server(make_config: MakeConfig, tmp_path: Path) -> None:
    slow = {"mean_length": 8, "length_sigma": 0.5, "seconds_per_token": 0.05}
    config = small(make_config, rollout={"engine": "scripted", "engine_args": slow}, launch={"max_restarts": 0})
    file, log = write_config(config, tmp_path / "config"), tmp_path / "launcher.log"
    run = start_command("train", str(file), log=log)
    try:
        wait_until(lambda: bool(read_status(config.run_path).get("servers")), "a server", config.run_path / "logs")
        learner = int((config.run_path / LEARNER_LOCK).read_text())
        (server,) = [child for child in psutil.Process(run.pid).children() if child.pid != learner]
        server.send_signal(signal.SIGKILL)
        assert run.wait(timeout=60) == 1
    finally:
        run.kill()
        run.wait()
    printed = log.read_text()
    (line,) = [line for line in printed.splitlines() if "rollout_server was killed by SIGKILL" in line]
    assert "(out of memory?). Continue with --resume, and raise launch.max_restarts" in line
    assert "rollout_server.log" in line


def test_9_reward_crash(examined: Callable[..., str], tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("def score(sample):\n    return 1 / len(sample.columns['no such'])\n")
    line = examined(reward={"functions": [{"function": f"{reward}:score"}]})
    value = r"reward component 'score': KeyError: 'no such' \(my_reward.py:2 in score\)"
    assert_says(line, "reward", value, "fix the function")


def test_10_version_mismatch(tmp_path: Path) -> None:
    """A rollout server whose `protocol` is of the next major."""

    async def connect(config: RunConfig) -> None:
        link = LearnerLink(
            config.link_settings, engine="scripted", fingerprints=(content.MODEL, content.PROCESSOR), in_work=tuple
        )
        link._hello = link._hello.model_copy(update={"protocol_major": PROTOCOL_MAJOR + 1})
        try:
            await link.connect()
        finally:
            link.close()

    refusal = (
        rf"the learner refuses this server: server '\S+' speaks protocol {PROTOCOL_MAJOR + 1}\.\d+, the learner "
        rf"speaks {PROTOCOL_MAJOR}\.\d+\. Upgrade the learner: both sides need the same major protocol version"
    )
    rig = LearnerRig(small_config(), tmp_path)
    rig.start()
    try:
        with pytest.raises(UserError, match=refusal):
            asyncio.run(connect(rig.config))
    finally:
        rig.close()
