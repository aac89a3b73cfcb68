"""A run in bfloat16 of a model whose routers are all but undecided, with two services and images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from asyncrl.config.schema import RunConfig
from asyncrl.launch.ports import free_port
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.tiny_families import make_expert_or_recurrent
from tests.rigs.two_processes import start_command, with_ports, write_config

STEPS = 3


def test_learner_has_the_log_probs_of_an_engine_that_chose_other_experts(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Without replay log-probs of the same run differ by up to 0.23 nats at its start."""
    folder = make_expert_or_recurrent("qwen3_vl_moe", tmp_path / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in (name for name in weights if "mlp.gate.weight" in name):
        alike = weights[name].mean(0)
        weights[name] = alike + (weights[name] - alike) * 0.01
    save_file(weights, file, {"format": "pt"})
    config = make_config(
        model={"path": str(folder), "dtype": "bfloat16"},
        algorithm={"routing_replay": {}, "router_losses": {"balance_coef": 0.0}},
        batch={"prompts_per_step": 4, "group_size": 4, "tokens_per_microbatch": 1024},
        data={"max_response_length": 16},
        rollout={"weight_update": "drain"},  # a cache that is rebuilt in the middle of a row may choose other experts
        learner={"max_staleness": 1, "gradient_checkpointing": True, "optim": {"lr": 1e-9}},
        trainer={"max_steps": STEPS},
    )
    command = start_command(
        "train", str(write_config(with_ports(config, free_port), tmp_path / "config")), log=tmp_path / "out"
    )
    try:
        assert command.wait(timeout=300) == 0, (tmp_path / "out").read_text()[-3000:]
    finally:
        command.kill()
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == STEPS
    assert all(step["router/other_experts"] > 0.01 for step in steps)
    assert max(step["logprob_diff_max"] for step in steps) < 0.05
