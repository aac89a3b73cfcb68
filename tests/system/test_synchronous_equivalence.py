"""`max_staleness: 0` through two processes equals a plain generate-then-train loop, bit for bit: with several turns in
an environment, on two devices and on one. test_recipe.py has one turn."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.loading import load_model
from asyncrl.models.published import published_tensors
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.telemetry.jsonl import read_lines
from learner.groups.ticket import ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.messages import Group
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.environments import environment_workers, environments_of
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both

CPU = torch.device("cpu")


async def plain_loop(config: RunConfig) -> tuple[list[dict[str, float]], list[Group], dict[str, torch.Tensor]]:
    """Generate, score, train, copy the weights over; no protocol, no processes, no threads of ours."""
    torch.manual_seed(config.trainer.seed)
    processor = PromptProcessor(config.model)
    writer = TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids)
    engine, rewards = HFEngine(config, processor), RewardScorer(config.reward)
    trainer = TorchEngine(config.model_settings, config.learner.optim, config.trainer.max_steps)
    trainer.prepare()
    step = LearnerStep(Roles(trainer), config.step_settings)
    pool = environment_workers(config.environment, processor)
    await rewards.start()
    await engine.start()
    if pool:
        await pool.start()
    producer = GroupProducer(
        engine,
        rewards,
        processor,
        "plain",
        environments_of(
            pool,
            config.environment,
            prompt_tokens=config.data.max_prompt_length,
            in_rounds=config.samples_in_rounds,
        )
        if pool
        else None,
    )
    metrics: list[dict[str, float]] = []
    groups: list[Group] = []
    per_step = config.batch.prompts_per_step
    for version in range(config.trainer.max_steps):
        slots = [TicketSlot(i, i, version, bound=0) for i in range(version * per_step, (version + 1) * per_step)]
        prepared = [writer.write(slot) for slot in slots]
        blobs = {digest: memoryview(data) for item in prepared for digest, data in item.blobs.items()}
        answers = [answer async for answer in producer.produce([item.ticket for item in prepared], blobs)]
        produced = {answer.ticket_id: answer for answer in answers if isinstance(answer, Group)}
        received = [ReceivedGroup(item, produced[item.ticket.ticket_id]) for item in prepared]
        metrics.append(step(make_batch(received, processor), version))
        groups += [item.group for item in received]
        await engine.update_weights(version + 1, trainer.published_state())
    await engine.close()
    await rewards.close()
    if pool:
        await pool.close()
    return metrics, groups, {name: tensor.clone() for name, tensor in trainer.published_state()}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_several_turns_equal_the_plain_loop_on_two_devices_and_on_one(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path
) -> None:
    """The environment answers after times that differ; a third of all tokens end a turn. Half of the rows run at a
    time, so that there is room for some of those that are suspended, and not for all."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    stops = {"eos_token_id": [*range(0, 330, 3), PromptProcessor(make_config().model).tokenizer.eos_token_id]}
    (model / "generation_config.json").write_text(json.dumps(stops))
    config = make_config(
        model={"path": str(model)},
        environment={
            "name": str(ROOT / "tests" / "rigs" / "lamp.py:SlowLamp"),
            "limits": {"turns": 4, "tokens_per_turn": 8, "images": 4},
            "workers": 2,
            "instances_per_worker": 8,
        },
        data={"max_response_length": 120},
        algorithm={"updates_per_batch": 2},
        rollout={"max_concurrent_sequences": 8},
        trainer={"max_steps": 2},
    )
    plain = asyncio.run(plain_loop(config))
    assert max(len(record.turns) for group in plain[1] for record in group.trajectories) == 3
    check_run(config, tmp_path / "run", *plain)
    shared = config.model_copy(update={"trainer": config.trainer.model_copy(update={"mode": "sync"})})
    check_run(shared, tmp_path / "shared", *plain)


def check_run(
    config: RunConfig,
    run: Path,
    metrics: list[dict[str, float]],
    groups: list[Group],
    weights: dict[str, torch.Tensor],
) -> None:
    """Run the configuration in two processes, and compare with the plain loop."""
    config = config.model_copy(update={"run_dir": str(run)})
    assert run_both(config, run) == (0, 0), logs(run)
    recorded = read_lines(run / "metrics.jsonl")
    for plain, line in zip(metrics, recorded, strict=True):
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_max"):
            assert line[name] == plain[name], name
        assert line["staleness/max"] == 0
        assert line["logprob_diff_max"] < 1e-4  # engine against learner, fp32, with images

    samples = read_lines(run / "samples.jsonl")
    sampled = [ids for line in samples for c in line["completions"] for ids in c["token_ids"]]
    assert sampled == [int(i) for group in groups for i in group.token_ids]
    rewards = [c["reward"] for line in samples for c in line["completions"]]
    assert rewards == [record.reward for group in groups for record in group.trajectories]

    exported = load_model(config.model.model_copy(update={"path": str(run / "export")}), device=CPU)
    theirs = dict(published_tensors(exported))
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], weights[name]) for name in weights)
