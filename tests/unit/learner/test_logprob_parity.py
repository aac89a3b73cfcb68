"""Engine and learner agree on log-probs, and what only log-probs show: other pixels, stale features, other tokens."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.models.published import load_published, published_tensors
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.loop.logprob_parity import compare
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.packing import build_micro_batch
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.errors import ProtocolError
from protocol.messages import Group, TicketKind
from rollout_server.engines.base import Completion
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import (
    answer,
    answers,
    learner_engine,
    limit_of,
    pair_config,
    parity_judge,
    parity_tickets,
    verify,
)
from tests.rigs.tiny_families import make_llava

__all__ = ["pair_config"]


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"top_k": 5, "min_p": 0.02}])
def test_engine_and_learner_agree_under_the_runs_own_sampling(
    pair_config: RunConfig, sampling: dict[str, float]
) -> None:
    rollout = pair_config.rollout.model_copy(update=sampling)
    config = pair_config.model_copy(update={"rollout": rollout})
    processor = PromptProcessor(config.model)
    items = parity_tickets(config, processor)
    assert [len(item.ticket.prompt.image_hashes) for item in items] == [2, 2], "rows with images come first"
    assert {item.ticket.kind for item in items} == {TicketKind.PARITY}
    received = answer(HFEngine(config, processor), processor, items)
    for one in received:
        verify(one)
    parity = compare(learner_engine(config), processor, received, config.batch.microbatch_tokens)
    assert parity.token_ids.size == sum(one.group.token_ids.size for one in received) > 8
    assert parity.mean <= parity.largest < 1e-4


@pytest.mark.parametrize("tower", ["siglip", "dinov2"])
def test_a_llava_model_is_sampled_verified_and_trained_alike(
    pair_config: RunConfig, tmp_path: Path, tower: Literal["siglip", "dinov2"]
) -> None:
    """Its positions count tokens, its images have one size; groups share their prompt and images all the same."""
    model = pair_config.model.model_copy(update={"path": str(make_llava(tmp_path / tower, tower))})
    config = pair_config.model_copy(update={"model": model})
    processor = PromptProcessor(model)
    received = answer(HFEngine(config, processor), processor, parity_tickets(config, processor))
    for one in received:
        verify(one)
    assert [one.group.image_grids.tolist() for one in received] == 2 * [[[1, 4, 4], [1, 4, 4]]]
    engine = learner_engine(config)
    parity = compare(engine, processor, received, config.batch.microbatch_tokens)
    assert parity.mean <= parity.largest < 1e-4
    batch = make_batch(received, processor)
    packed = build_micro_batch(engine.unwrap_model(), batch.train_groups, engine.device)
    engine.backward(-engine.forward(packed).logprobs.mean())
    moved = {name.split(".")[1] for name, p in engine.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved >= {"vision_tower", "multi_modal_projector", "language_model"}


def test_other_pixels_behind_an_equal_fingerprint_fail_the_parity_check(pair_config: RunConfig) -> None:
    """Ids, grids and hashes are right: only the log-probs show it."""
    processor, theirs = PromptProcessor(pair_config.model), PromptProcessor(pair_config.model)
    theirs.processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    received = answer(HFEngine(pair_config, processor), theirs, items := parity_tickets(pair_config, processor))
    assert len(items) == 2
    for one in received:
        verify(one)
    assert compare(learner_engine(pair_config), processor, received, 512).largest > limit_of(pair_config)


# --- faults: a stale encoder cache ------------------------------------------------------------------


class KeepsOldFeatures(HFEngine):
    """Its encoder cache is keyed by the image alone, and no weight update clears it."""

    def _load(self) -> None:
        super()._load()
        tower, cache = self._model.model.visual, {}
        compute = tower.forward

        def forward(pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            key = content_hash(pixels.numpy().tobytes())
            if key not in cache:
                cache[key] = compute(pixels, *args, **kwargs)
            return copy.copy(cache[key])  # the caller splits it in place

        tower.forward = forward


def with_other_vision_tower(engine: TorchEngine) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (name, t + 0.3 * torch.randn(t.shape, generator=generator) if ".visual." in name and t.ndim > 1 else t.clone())
        for name, t in published_tensors(engine.model)
    ]


@pytest.mark.parametrize("engine_class", [HFEngine, KeepsOldFeatures])
def test_a_stale_encoder_cache_is_seen_by_the_diagnostics_of_the_first_step_and_by_a_check_after_the_update(
    pair_config: RunConfig, caplog: pytest.LogCaptureFixture, engine_class: type[HFEngine]
) -> None:
    stale = engine_class is KeepsOldFeatures
    processor, limit = (
        PromptProcessor(pair_config.model),
        limit_of(pair_config),
    )
    items = parity_tickets(pair_config, processor)
    engine, learner = engine_class(pair_config, processor), learner_engine(pair_config)
    weights = with_other_vision_tower(learner)

    async def around_an_update() -> list[list[ReceivedGroup]]:
        await engine.start()
        before = await answers(engine, processor, items)
        await engine.update_weights(1, weights)
        after = await answers(engine, processor, items)
        await engine.close()
        return [before, after]

    first, received = asyncio.run(around_an_update())
    assert compare(learner, processor, first, 512).largest < limit, "as the server joins, nothing is stale"
    load_published(learner.model, weights)
    for one in received:
        verify(one, version=1)  # ids, grids and hashes cannot show it
    after = compare(learner, processor, received, 512)
    assert (after.largest > limit) == stale

    values = LearnerStep(Roles(learner), pair_config.step_settings)(make_batch(received, processor), version=1)
    nothing: Any = None
    shake = Mock()
    judge = parity_judge(pair_config, shake, lambda method, *words: method(*words), learner, processor, nothing)
    judge.watch(1, values)
    assert shake.check_again.call_count == stale
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == stale
    assert all("on tokens of the learner's own version" in record.getMessage() for record in warned)


# --- faults: text that is tokenised again -----------------------------------------------------------


class TokenisesAgain(HFEngine):
    """Hands the text of a completion on, as an HTTP front end without token ids would."""

    def __init__(self, config: RunConfig, processor: PromptProcessor):
        super().__init__(config, processor)
        self._processor = processor

    async def generate(self, requests: Any) -> Any:
        async for completion in super().generate(requests):
            yield self._again(completion)

    def _again(self, completion: Completion) -> Completion:
        tokenizer = self._processor.tokenizer
        text = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[: self._config.data.max_response_length]  # as a front end would that knows the limit
        return dataclasses.replace(
            completion,
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.resize(completion.logprobs, len(ids)),
            versions=np.resize(completion.versions, len(ids)),
        )


def test_text_that_is_tokenised_again_is_refused_by_row(pair_config: RunConfig) -> None:
    processor = PromptProcessor(pair_config.model)
    items = [
        dataclasses.replace(item, ticket=item.ticket.model_copy(update={"group_size": 64}))
        for item in parity_tickets(pair_config, processor)
    ]
    received = answer(TokenisesAgain(pair_config, processor), processor, items)
    caught = r"row rows.jsonl:\d from server-1: completion \d+ (ended by|was cut at)"
    for one in received:
        with pytest.raises(ProtocolError, match=caught):
            verify(one)


def test_text_that_is_tokenised_again_to_the_same_length_fails_the_parity_check(pair_config: RunConfig) -> None:
    """One id has become another of the same text, which no look at a sample shows."""
    processor = PromptProcessor(pair_config.model)
    received = answer(HFEngine(pair_config, processor), processor, parity_tickets(pair_config, processor))
    group = received[1].group
    ids = group.token_ids.copy()
    ids[2] = 7 if ids[2] != 7 else 8
    changed = [received[0], dataclasses.replace(received[1], group=group.model_copy(update={"token_ids": ids}))]
    verify(changed[1])
    parity = compare(learner_engine(pair_config), processor, changed, 512)
    assert parity.largest > limit_of(pair_config)
    assert "row rows.jsonl:2 (completion 0), token" in parity.worst


# --- the verdict ------------------------------------------------------------------------------------


def test_the_judge_accepts_refuses_with_the_numbers_and_repeats(pair_config: RunConfig) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(HFEngine(pair_config, processor), processor, items)
    logprobs = received[1].group.logprobs.copy()
    logprobs[1] -= 0.25
    wrong = dataclasses.replace(received[1], group=received[1].group.model_copy(update={"logprobs": logprobs}))
    good, bad = (
        SimpleNamespace(server_id=name, groups=dict(enumerate(groups)), tickets=(0, 1))
        for name, groups in (("good", received), ("bad", [received[0], wrong]))
    )
    shake, reporter = Mock(**{"take_complete.return_value": [good, bad]}), Mock()
    learner = learner_engine(pair_config)
    judge = parity_judge(pair_config, shake, lambda method, *words: method(*words), learner, processor, reporter)
    judge.judge(version=0)
    assert [call.args[0] for call in reporter.parity.call_args_list] == ["good", "bad"]
    shake.accept_server.assert_called_once_with(good, once=False)
    (refused, reason, fix), _ = shake.refuse.call_args
    assert refused is bad
    assert re.search("differ by at most 0.25 nats, .* on average", reason)
    assert "0.001 is accepted, and 0.0001 on average (alignment.max_logprob_difference)" in reason
    assert "Largest at row rows.jsonl:2 (completion 0), token 1 (" in reason
    assert "images that the engine does not see" in fix
    judge.judge(version=1)
    assert shake.repeat.call_args_list == [((good,),), ((bad,),)]


def test_a_mean_over_a_tenth_of_the_limit_is_refused_where_no_token_is_over_it(pair_config: RunConfig) -> None:
    """Rounding in bfloat16 moves rare tokens far and the mean little; another distribution moves all a little."""
    processor = PromptProcessor(pair_config.model)
    received = answer(HFEngine(pair_config, processor), processor, parity_tickets(pair_config, processor))
    shake, learner = Mock(), learner_engine(pair_config)
    judge = parity_judge(pair_config, shake, lambda method, *words: method(*words), learner, processor, Mock())
    for far, refused in ((0.05, 0), (0.2, 1)):
        shifted = [
            dataclasses.replace(
                one, group=with_logprobs(one.group, np.full_like(one.group.logprobs, far * judge.limit))
            )
            for one in received
        ]
        check = SimpleNamespace(server_id=f"{far}", groups=dict(enumerate(shifted)), tickets=(0, 1))
        shake.take_complete.return_value = [check]
        judge.judge(version=0)
        assert shake.refuse.call_count == refused


def test_a_later_check_refuses_by_the_mean_and_warns_of_single_tokens(
    pair_config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounding grows with a policy: one token over the limit is to stop no run at work."""
    processor = PromptProcessor(pair_config.model)
    received = answer(HFEngine(pair_config, processor), processor, parity_tickets(pair_config, processor))
    shake = Mock()
    learner = learner_engine(pair_config)
    judge = parity_judge(pair_config, shake, lambda method, *words: method(*words), learner, processor, Mock())
    tokens = sum(len(one.group.logprobs) for one in received)
    for far, refused in ((0.0, 0), (0.05 * tokens, 0), (0.2 * tokens, 1)):
        by = np.append(np.float32(far * judge.limit), np.zeros(len(received[0].group.logprobs) - 1, np.float32))
        shifted = dataclasses.replace(received[0], group=with_logprobs(received[0].group, by))
        check = SimpleNamespace(server_id="a", groups={0: shifted, 1: received[1]}, tickets=(0, 1))
        shake.take_complete.return_value = [check]
        judge.judge(version=0)
        assert shake.refuse.call_count == refused
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warned) == (far > 0)
        assert all("Largest at row rows.jsonl:1 (completion 0), token 0" in said for said in warned)
    assert "cache that is not cleared" in shake.refuse.call_args.args[2]


@pytest.mark.parametrize("moves", [False, True])
def test_an_engine_that_stays_while_the_learner_moves_is_refused_within_the_limit(
    pair_config: RunConfig, moves: bool
) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    engine, learner = HFEngine(pair_config, processor), learner_engine(pair_config)
    weights = [(name, tensor * (1 + 1e-6)) for name, tensor in published_tensors(learner.model)]

    async def around_an_update() -> list[list[ReceivedGroup]]:
        await engine.start()
        before = await answers(engine, processor, items)
        await engine.update_weights(1, weights if moves else list(published_tensors(learner.model)))
        after = await answers(engine, processor, items)
        await engine.close()
        return [before, after]

    rounds = asyncio.run(around_an_update())
    shake = Mock()
    judge = parity_judge(pair_config, shake, lambda method, *words: method(*words), learner, processor, Mock())
    for version, received in enumerate(rounds):
        if version == 1:
            load_published(learner.model, weights)
        groups = dict(enumerate(received))
        shake.take_complete.return_value = [SimpleNamespace(server_id="a", groups=groups, tickets=(0, 1))]
        judge.judge(version)
    assert (shake.accept_server.call_count, shake.refuse.call_count) == ((2, 0) if moves else (1, 1))
    if not moves:
        reason = shake.refuse.call_args.args[1]
        assert "nearer to those of version 0: they have moved by 0 nats" in reason
        assert float(re.findall(r"at most (\S+) nats", reason)[0]) < judge.limit


def with_logprobs(group: Group, by: np.ndarray) -> Group:
    return group.model_copy(update={"logprobs": (group.logprobs - by).astype(np.float32)})
