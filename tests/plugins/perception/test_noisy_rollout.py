"""NoisyRollout: some trajectories see distorted images, and all are trained on the clean ones."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.loading import load_model
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.perception.noisy_images import annealing, noisy_image
from asyncrl_plugins.perception.settings import NoisyRolloutConfig
from benchmarks.staleness.workload import OneForAll
from learner.groups.group_verification import verify_group
from learner.groups.ticket import ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from learner.training.batch import make_batch
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.errors import ProtocolError
from protocol.messages import Group
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.made_up_batch import KeepGradients
from tests.rigs.policies import CPU, fresh_logits, picture
from tests.rigs.tiny import ROOT

MakeConfig = Callable[..., RunConfig]
NOISY: dict[str, Any] = {
    "algorithm": {
        "noisy_rollout": {"share": 0.5, "steps": 900},
        "correction": {"kind": "token_tis", "masks": [{"kind": "veto"}]},
    },
    "batch": {"group_size": 4, "prompts_per_step": 2},
    "trainer": {"max_steps": 6},
}


def test_the_noise_falls_as_published() -> None:
    vector = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())["noisy_sigmoid"]["v"]
    settings = NoisyRolloutConfig(steepness=30, midpoint=40 / 60)
    for step, expected in vector.items():
        assert annealing(settings, int(step) / 60) == pytest.approx(expected, rel=1e-6)
    linear = NoisyRolloutConfig(schedule="linear")
    assert [annealing(linear, done) for done in (0, 0.25, 1)] == [1, 0.75, 0]


def test_a_noisy_image_is_as_large_the_same_again_and_noisier_with_more_steps() -> None:
    clean = picture(3)
    pixels = np.asarray(Image.open(io.BytesIO(clean)), np.float64)
    errors = []
    for steps in (1, 250, 1000):
        data = noisy_image(clean, steps, (1, 2, 3), "row")
        assert data == noisy_image(clean, steps, (1, 2, 3), "row") != noisy_image(clean, steps, (1, 2, 4), "row")
        noisy = np.asarray(Image.open(io.BytesIO(data)), np.float64)
        assert noisy.shape == pixels.shape
        errors.append(np.abs(noisy - pixels).mean())
    assert errors[0] < 2 < errors[1] < errors[2]


def test_the_engine_sees_noise_and_the_learner_does_not(make_config: MakeConfig) -> None:
    config = make_config(**NOISY)
    processor = PromptProcessor(config.model)
    writer = TicketWriter(config.ticket_settings, processor, (1,))
    items = [writer.write(TicketSlot(number, number, version=0, bound=0)) for number in range(2)]
    assert items[0].ticket == writer.write(items[0].slot).ticket
    assert not writer.write(TicketSlot(9, 9, version=6, bound=0)).ticket.requests, "no noise is left"
    blobs: dict[str, Any] = {digest: data for item in items for digest, data in item.blobs.items()}

    async def produced() -> dict[int, Group]:
        engine = HFEngine(config, processor)
        await engine.start()
        producer = GroupProducer(engine, OneForAll(), processor, "s")  # type: ignore[arg-type]
        groups = [group async for group in producer.produce([item.ticket for item in items], blobs)]
        await engine.close()
        return {group.ticket_id: group for group in groups if isinstance(group, Group)}

    groups = asyncio.run(produced())
    received = [ReceivedGroup(item, groups[item.ticket.ticket_id]) for item in items]
    model = load_model(config.model, device=CPU)
    for item in received:
        order, prompt = item.ticket.requests[-1], item.ticket.prompt
        assert [o.images for o in item.ticket.requests] == [(), (), order.images, order.images]
        assert [record.image_hashes for record in item.group.trajectories] == [(), (), order.images, order.images]
        ends = np.cumsum(item.group.lengths)
        for index, (end, length) in enumerate(zip(ends, item.group.lengths, strict=True)):
            ids, engine = item.group.token_ids[end - length : end], item.group.logprobs[end - length : end]
            clean, noisy = (
                processor.encode(prompt.model_copy(update={"image_hashes": hashes}), item.prepared.blobs)
                for hashes in (prompt.image_hashes, order.images)
            )
            gaps = []
            for seen in (clean, noisy):
                logits = fresh_logits(model, seen, ids[:-1].tolist())
                logprobs = sampling_logprobs(logits, temperature=1.0, banned=torch.tensor(processor.placeholder_ids))
                chosen = gather_logprobs(logprobs, torch.from_numpy(ids).long()).numpy()
                gaps.append(float(np.abs(chosen - engine).max()))
            own, other = gaps if index < 2 else reversed(gaps)
            assert own < 1e-4 < other
    check = {"sender": "s", "version": 0, "vocabulary": 2**16}
    names = set(received[0].group.trajectories[0].rewards)
    verify_group(received[0].group, items[0].ticket, items[0].measured, components=names, **check)
    records = [record.model_copy(update={"image_hashes": ()}) for record in received[0].group.trajectories]
    wrong = received[0].group.model_copy(update={"trajectories": tuple(records)})
    with pytest.raises(ProtocolError, match="saw other images for completion 2"):
        verify_group(wrong, items[0].ticket, items[0].measured, components=names, **check)

    actor = KeepGradients(config.model_settings, config.learner.optim, 1)
    actor.prepare()
    batch = make_batch(received, processor)
    batch = replace(batch, scores=torch.rand(8, generator=torch.Generator().manual_seed(1)))
    assert batch.provenance.saw_other_images.tolist() == [False, False, True, True] * 2
    results = []
    for shift in (0.0, 3.0):  # what the engine says of noisy rows is of no account
        moved = batch.behaviour_logprobs.clone()
        moved[batch.trained.flat[batch.trained_provenance.lacks_behaviour]] -= shift
        metrics = LearnerStep(Roles(actor), config.step_settings)(replace(batch, behaviour_logprobs=moved), 0)
        results.append((metrics, {name: g.clone() for name, g in actor.gradients.items()}))
    (one, gradients), (two, same) = results
    assert one == two
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)
    assert one["grad_norm"] > 0
    assert one["mask_fraction"] == 0
    assert one["logprob_diff_max"] < 1e-4, "of the clean rows alone"


def test_noise_needs_the_learners_own_log_probs(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"Set algorithm.proximal=recompute"):
        make_config(algorithm={"noisy_rollout": {"share": 0.5}, "proximal": "loglinear"})


@pytest.mark.parametrize("size", [2, 4, 5, 16])
def test_half_of_a_group_of_any_size_sees_noise_and_a_clean_one_is_always_left(
    size: int, make_config: MakeConfig
) -> None:
    config = load_config(GRPO, ["noisy_rollout", f"batch.group_size={size}"])
    settings = config.algorithm.settings_of(NoisyRolloutConfig)
    assert settings.number_of(size) == size // 2
    assert NoisyRolloutConfig(share=0.99).number_of(size) < size
    with pytest.raises(ValueError, match="less than 1"):
        make_config(algorithm={"noisy_rollout": {"share": 1.0}})
    with pytest.raises(ValueError, match=r"share is 0.1, which is none of the 4 completions of a group"):
        make_config(algorithm={"noisy_rollout": {"share": 0.1}})
