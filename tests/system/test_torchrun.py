"""A learner whose ranks torchrun starts: a run from its first group to the export, across the death of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from protocol import faults
from tests.rigs.ports import own_port
from tests.rigs.prefork import Service, fork_module
from tests.rigs.small_runs import assert_every_prompt_trained_once, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow
STEPS = 8
TORCHRUN = "torch.distributed.run"


@pytest.mark.parametrize(
    ("restarts", "crash_at"),
    [(0, ""), (1, ""), (0, "checkpoint.writing:2"), (0, "checkpoint.renamed:2")],
    ids=["started again by hand", "started again by torchrun", "all in a checkpoint", "rank 0 after a checkpoint"],
)
def test_a_run_of_torchruns_ranks_goes_on_after_the_death_of_one(
    make_config: Callable[..., RunConfig], tmp_path: Path, restarts: int, crash_at: str
) -> None:
    config = with_ports(
        small(
            make_config,
            learner={"engine": "fsdp2", "max_staleness": 1},
            trainer={"max_steps": STEPS, "save_freq": 1},
            network={"timeout_s": 10.0, "reconnect_timeout_s": 120.0},
        )
    )
    run, log, file = Path(config.run_dir), tmp_path / "torchrun.log", write_config(config, tmp_path)
    server = start("rollout_server", file)
    learner = start_ranks(file, log, restarts, crash_at=crash_at)
    try:
        if crash_at:
            assert learner.wait(timeout=240) == 1
            assert "Signal 9 (SIGKILL)" in log.read_text()
            learner = start_ranks(file, log, restarts)
        else:
            wait_until(lambda: steps_of(run) >= 2, "two steps of two ranks", tmp_path, timeout_s=180)
            _, second = sorted(psutil.Process(learner.pid).children(), key=lambda rank: rank.pid)
            second.kill()
        if not restarts and not crash_at:
            assert learner.wait(timeout=120) == 1
            assert "rank      : 1 (local_rank: 1)" in log.read_text(), "torchrun names the first that failed"
            assert "rank 1 has gone: the learner ends" in log.read_text()
            learner = start_ranks(file, log, restarts, anew=True)
        assert learner.wait(timeout=240) == 0, log.read_text()[-6000:]
        assert server.wait(timeout=60) == 0
    finally:
        end(learner, server)
    assert_every_prompt_trained_once(run, STEPS)
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert all(
            line[f"{name}/{rank}"] > 0 for name in ("rank_busy_s", "rank_tokens", "rank_peak_gib") for rank in "01"
        )
    assert (run / "export" / "model.safetensors").is_file()


def start_ranks(
    file: Path,
    log: Path,
    restarts: int,
    place: Sequence[str] = ("--standalone", "--nproc-per-node=2"),
    crash_at: str = "",
    words: Sequence[str] = ("learn", "--unattended"),
    anew: bool = False,
) -> Service:
    """A torchrun of ranks; `anew`: it and they are started as a user's are, and import what they need."""
    arguments = [*place, f"--max-restarts={restarts}", "-m", "asyncrl", words[0], str(file), *words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {faults.VARIABLE: crash_at}
    if not anew:
        return fork_module(TORCHRUN, arguments, log, environment)
    with log.open("ab") as output:
        command = [sys.executable, "-m", TORCHRUN, *arguments]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def end(*processes: Service) -> None:
    """Kill what is still there, with the ranks of a torchrun."""
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
            process.wait()


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.parametrize("without", [0, 1])
def test_a_model_that_one_machine_lacks_ends_both_with_the_reason(
    make_config: Callable[..., RunConfig], tmp_path: Path, without: int
) -> None:
    config = with_ports(small(make_config, learner={"engine": "fsdp2"}))
    missing = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "absent")})})
    files = [write_config(missing if number == without else config, tmp_path / str(number)) for number in range(2)]
    logs = [tmp_path / "node-0.log", tmp_path / "node-1.log"]
    place = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={own_port()}"]
    nodes = [
        start_ranks(file, log, 0, [*place, f"--node-rank={number}"])
        for number, (file, log) in enumerate(zip(files, logs, strict=True))
    ]
    try:
        codes = [node.wait(timeout=240) for node in nodes]
    finally:
        end(*nodes)
    said = [log.read_text() for log in logs]
    assert codes == [1, 1], said
    reason = f"model.path is '{tmp_path}/absent'"
    assert f"error: {reason}" in said[without], said[without][-3000:]
    assert f"error: rank {without}: {reason}" in said[1 - without], said[1 - without][-3000:]
    assert not Path(config.run_dir).exists(), "nothing of the run is left"
