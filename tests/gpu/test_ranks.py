"""A learner of two ranks, started by two torchruns as on two machines, against a learner of one process.

NCCL refuses two ranks on one GPU of one machine. NCCL_HOSTID says that they are on two, so that their messages go over
a socket and every collective of a run is NCCL's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.ports import own_port
from tests.rigs.prefork import Service, fork_module
from tests.rigs.small_runs import assert_every_prompt_trained_once, small
from tests.rigs.two_processes import with_ports, write_config
from tests.rigs.zero import HAS_ZERO, zero

pytestmark = pytest.mark.slow
STEPS = 3
DEADLINE_S = 240
FSDP2 = {"engine": "fsdp2"}
ZERO = pytest.mark.skipif(not HAS_ZERO, reason="deepspeed is not installed")


ON_CUDA = [
    pytest.param("cuda", learner, dtype, id=f"cuda-{name}-{dtype}", marks=[pytest.mark.gpu, *marks])
    for name, learner, marks in (("fsdp2", FSDP2, []), ("zero2", zero(2), [ZERO]), ("zero3", zero(3), [ZERO]))
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(
    ("device", "learner", "dtype"), [pytest.param("cpu", FSDP2, "float32", id="cpu-fsdp2"), *ON_CUDA]
)
def test_ranks_of_two_torchruns_train_as_one_process_does(
    make_config: Callable[..., RunConfig], tmp_path: Path, device: str, learner: dict[str, Any], dtype: str
) -> None:
    """The first step has the same samples and weights; the runs end with every prompt trained once, and an export."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, sections in {"one": {}, "two": learner}.items():
        learning = {**sections, "device": device}
        config = small(make_config, model={"dtype": dtype}, learner=learning, trainer={"max_steps": STEPS})
        config = with_ports(config.model_copy(update={"run_dir": str(tmp_path / name / "run")}))
        found[name] = run(config, tmp_path / name, ranks=1 if name == "one" else 2)
        assert_every_prompt_trained_once(Path(config.run_dir), STEPS)
    one, two = found["one"], found["two"]
    relative, absolute, mismatch = (1e-3, 1e-5, 1e-6) if dtype == "float32" else (0.05, 1e-2, 0.02)
    assert [line["step"] for line in two] == list(range(1, STEPS + 1))
    for measured in ("reward/mean", "loss", "grad_norm"):
        assert two[0][measured] == pytest.approx(one[0][measured], rel=relative, abs=absolute)
    for line in two:
        assert line["mismatch_kl_k3"] < mismatch, "the server's log-probs of published weights are the ranks'"
        assert all(line[f"rank_tokens/{rank}"] > 0 for rank in "01")
    first, last = (load_file(tmp_path / name / "run" / "export" / "model.safetensors") for name in found)
    assert first.keys() == last.keys()
    assert all(torch.isfinite(tensor).all() for tensor in last.values())


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_ranks_take_turns_with_a_server_on_their_device(
    make_config: Callable[..., RunConfig], tmp_path: Path, device: str
) -> None:
    """Started by hand: torchrun would say that they are on two machines, which no lock spans."""
    learning = {**FSDP2, "device": device, "max_staleness": 0}
    config = small(make_config, learner=learning, trainer={"max_steps": STEPS, "mode": "sync"})
    config = with_ports(config.model_copy(update={"run_dir": str(tmp_path / "run")}))
    lines = run(config, tmp_path, ranks=2, by_torchrun=False)
    assert_every_prompt_trained_once(Path(config.run_dir), STEPS)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["sleep_bytes/learner"] > 0 and line["sleep_bytes/rollout"] > 0 for line in lines[1:])
    assert all(line["mismatch_kl_k3"] < 1e-6 for line in lines)


def run(config: RunConfig, folder: Path, ranks: int, *, by_torchrun: bool = True) -> list[dict[str, Any]]:
    """Run it to its end, with a server on the same device. Returns the metrics of its steps."""
    file = write_config(config, folder)
    python, learn = [sys.executable, "-m"], ["asyncrl", "learn", str(file), "--unattended"]
    port = str(own_port())
    place = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    processes = [start("server", [*python, "rollout_server", "--config", str(file)], folder)]
    for rank in range(ranks):
        torchrun = [*python, "torch.distributed.run", *place, f"--node-rank={rank}"]
        command = [*(torchrun if ranks > 1 and by_torchrun else python[:1]), "-m", *learn]
        joined = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_PORT": port}
        given = {} if ranks == 1 or by_torchrun else {**joined, "MASTER_ADDR": "127.0.0.1"}
        processes.append(start(f"rank-{rank}", command, folder, given))
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
        assert codes == [0] * len(codes), "\n".join(log.read_text()[-4000:] for log in folder.glob("*.log"))
    finally:
        for process in processes:
            process.terminate()  # torchrun passes it on
            process.wait(timeout=60)
    return read_lines(Path(config.run_dir) / "metrics.jsonl")


def start(name: str, command: Sequence[str], folder: Path, given: Mapping[str, str] | None = None) -> Service:
    """A process of `python -m MODULE ARGUMENTS`; a fork where there is no GPU, which a fork could not use."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", **(given or {})}
    log = folder / f"{name}.log"
    if not torch.cuda.is_available():
        return fork_module(command[2], command[3:], log, environment)
    with log.open("wb") as output:
        return Popen(command, env=environment, stdout=output, stderr=STDOUT, text=True)
