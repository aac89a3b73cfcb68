"""`max_staleness: 0` through two processes is a plain generate-then-train loop, bit for bit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.loading import load_model, stop_token_ids
from asyncrl.models.processing import PromptProcessor
from asyncrl.models.published import published_tensors
from asyncrl.rewards.pool import RewardPool
from learner.tickets.ticket import ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.messages import Group
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.group_producer import GroupProducer
from tests.rigs.two_processes import run_both

CPU = torch.device("cpu")


async def plain_loop(config: RunConfig) -> tuple[list[dict[str, float]], list[Group], dict[str, torch.Tensor]]:
    """Generate, score, train, copy the weights over; no protocol, no processes, no threads of ours."""
    torch.manual_seed(config.trainer.seed)
    processor = PromptProcessor(config.model)
    writer = TicketWriter(config, processor, stop_token_ids(config.model, processor.tokenizer))
    engine, rewards = HFEngine(config, processor), RewardPool(config.reward)
    trainer = TorchEngine(config, config.learner.optim, config.trainer.max_steps)
    trainer.prepare()
    step = LearnerStep(Roles(trainer), config)
    await rewards.start()
    await engine.start()
    producer = GroupProducer(engine, rewards, processor, "plain")
    metrics: list[dict[str, float]] = []
    groups: list[Group] = []
    per_step = config.batch.prompts_per_step
    for version in range(config.trainer.max_steps):
        slots = [TicketSlot(i, i, version, bound=0) for i in range(version * per_step, (version + 1) * per_step)]
        prepared = [writer.write(slot) for slot in slots]
        blobs = {digest: memoryview(data) for item in prepared for digest, data in item.blobs.items()}
        produced = {g.ticket_id: g async for g in producer.produce([item.ticket for item in prepared], blobs)}
        received = [ReceivedGroup(item, produced[item.ticket.ticket_id]) for item in prepared]
        metrics.append(step(make_batch(received, processor), version))
        groups += [item.group for item in received]
        await engine.update_weights(version + 1, trainer.published_state())
    await engine.close()
    await rewards.close()
    return metrics, groups, {name: tensor.clone() for name, tensor in trainer.published_state()}


@pytest.mark.slow
def test_two_processes_equal_the_plain_loop_bit_for_bit(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = make_config(algorithm={"updates_per_batch": 2})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        metrics, groups, weights = asyncio.run(plain_loop(config))
    finally:
        torch.set_num_threads(threads)
    codes = run_both(config, tmp_path / "run")
    logs = [(tmp_path / "run" / f"{name}.log").read_text()[-3000:] for name in ("learner", "rollout_server")]
    assert codes == (0, 0), "\n".join(logs)

    recorded = read_lines(tmp_path / "run" / "metrics.jsonl")
    for plain, line in zip(metrics, recorded, strict=True):
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_max"):
            assert line[name] == plain[name], name
        assert line["staleness/max"] == 0
        assert line["logprob_diff_max"] < 1e-4  # engine against learner, fp32, with images

    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    sampled = [ids for line in samples for c in line["completions"] for ids in c["token_ids"]]
    assert sampled == [int(i) for group in groups for i in group.token_ids]
    rewards = [c["reward"] for line in samples for c in line["completions"]]
    assert rewards == [record.reward for group in groups for record in group.trajectories]

    exported = load_model(config.model.model_copy(update={"path": str(tmp_path / "run" / "export")}), device=CPU)
    theirs = dict(published_tensors(exported))
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], weights[name]) for name in weights)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
