"""The vllm engine with the real vLLM on a CPU: one started engine for all of these tests, which run in this order."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.errors import BadStateError, UserError
from asyncrl_plugins.vllm.start import engine_arguments
from rollout_server.engines.arrived_weights import ArrivedWeights
from rollout_server.engines.base import Completion, EngineDied
from tests.plugins.vllm.vllm_rig import NEEDS_VLLM
from tests.rigs.cuda_stand_in import made_by_runner
from tests.rigs.engine_checks import (
    behind_begun,
    check_bans,
    check_drain,
    check_goes_on,
    check_recorded_prompts,
    check_requests,
    check_stop_id,
)
from tests.rigs.engine_rig import FP32, QUESTION, Rig, gap_to, with_images
from tests.rigs.policies import complete_all, gaps, moved, picture

pytestmark = NEEDS_VLLM


# --- sampling -------------------------------------------------------------------------------


def test_recorded_prompts_get_the_tokens_and_logprobs_of_the_hf_engine(rig: Rig) -> None:
    check_recorded_prompts(rig, stops=(7,))


def test_logprobs_are_of_the_distribution_that_was_sampled_from(rig: Rig) -> None:
    truncated: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
    requests = [
        rig.request(QUESTION, picture(1), tokens=40, size=2, temperature=0.7),
        rig.request(QUESTION, picture(2), tokens=40, size=2, **truncated),
        rig.request("read", tokens=40, size=2, temperature=1.3, min_p=0.05),
    ]
    done = rig.sample(*requests)
    for request in requests:
        for index in range(2):
            assert gap_to(rig, rig.initial, request, done[request.request_id, index]) < FP32


def test_equal_seeds_give_equal_completions_whoever_else_runs(rig: Rig) -> None:
    alone = rig.request(QUESTION, picture(1), tokens=30, size=3, temperature=1.0, seed=7)
    once = rig.sample(alone)
    others = [rig.request("read", picture(n), tokens=20, size=3, temperature=1.0) for n in range(4)]
    again = dataclasses.replace(alone, request_id=900)
    neighbour = dataclasses.replace(alone, request_id=901, seed=8)
    both = rig.sample(*others, again, neighbour)
    completions = [once[alone.request_id, i].token_ids.tolist() for i in range(3)]
    assert [both[900, i].token_ids.tolist() for i in range(3)] == completions
    everything = completions + [both[901, i].token_ids.tolist() for i in range(3)]
    assert len({tuple(ids) for ids in everything}) == 6  # seed 8 does not repeat seed 7's second completion


def test_what_is_interrupted_goes_on_behind_its_own_tokens(rig: Rig) -> None:
    request = rig.request(QUESTION, picture(1), tokens=200, size=3, temperature=0.8, stop_token_ids=(7,), seed=7)
    neighbour = rig.request("read", tokens=20)

    async def scenario() -> dict[int, tuple[Completion, Completion]]:
        work = asyncio.create_task(complete_all(rig.engine, [request, neighbour]))
        began = rig.engine.usage.tokens_generated
        while rig.engine.usage.tokens_generated < began + 30:
            await asyncio.sleep(0.001)
        await rig.engine.interrupt([request.request_id])
        begun = [done for done in await work if done.request_id == request.request_id]
        return await behind_begun(rig, request, begun)

    parts = rig.run(scenario())
    assert any(start.finish_reason is None and len(start.token_ids) for start, _ in parts.values())
    check_goes_on(rig, request, parts)


def test_requests_are_followed_as_the_hf_engine_follows_them(rig: Rig) -> None:
    plain, ordered = check_requests(rig, stops=(7,))
    assert ordered[700, 0].token_ids.tolist() == rig.sample(plain)[plain.request_id, 0].token_ids.tolist()


def test_a_stop_id_ends_a_completion_and_belongs_to_it(rig: Rig) -> None:
    stop = check_stop_id(rig)
    assert stop != rig.processor.tokenizer.eos_token_id  # only the ticket's ids stop, not vLLM's idea of an end


def test_the_model_runner_that_cuda_gets_takes_the_ban_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own checks and construction for Model Runner V2, which a CPU does not use."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker.gpu.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
        build_custom_logits_processors_params_validator,
    )

    banned = list(rig.processor.placeholder_ids)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    turns = rig.config.model_copy(update={"trainer": rig.config.trainer.model_copy(update={"mode": "sync"})})
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert known >= set(engine_arguments(turns, cuda=True, text_config=None, banned=[]))
    named: Any = engine_arguments(rig.config, cuda=True, text_config=None, banned=banned)
    build_custom_logits_processors_params_validator(named["logits_processors"])(SamplingParams())
    vllm_config = SimpleNamespace(additional_config=named["additional_config"])
    ban = made_by_runner(vllm_config, named["logits_processors"])
    assert ban.add_request(0, SamplingParams()), "else V2 leaves the request's logits as they are"
    logits = torch.zeros(2, max(banned) + 2)
    after = ban.apply(logits, None)
    assert after.isneginf().nonzero()[:, 1].unique().tolist() == sorted(banned)
    assert after.isneginf().sum() == 2 * len(banned)


def test_a_banned_id_is_never_sampled_even_by_a_policy_that_wants_nothing_else(rig: Rig) -> None:
    check_bans(rig)


def test_a_ticket_with_other_bans_or_over_the_length_is_refused(rig: Rig) -> None:
    lax = rig.request(QUESTION, picture(1), banned_token_ids=())
    with pytest.raises(UserError, match=r"bans the token ids \[\], and this engine bans"):
        rig.sample(lax)
    with pytest.raises(UserError, match=r"row .* are more than the 512 that vLLM was started for"):
        rig.sample(rig.request(QUESTION, tokens=510))
    good = rig.request("read", tokens=3)

    async def beside_it() -> list[Any]:
        return [item async for item in rig.engine.generate([lax, good])]

    failed, done = rig.run(beside_it())
    assert (failed.request_id, type(failed.error)) == (lax.request_id, UserError)
    assert (done.request_id, len(done.token_ids)) == (good.request_id, 3), "it fails alone"


def test_a_prompt_that_vllm_expands_otherwise_names_its_row(rig: Rig) -> None:
    request = rig.request(QUESTION, picture(1), picture(2))
    square = with_images(request, picture(1), picture(2, 28, 28))
    with pytest.raises(UserError, match=rf"{request.prompt.row_id}: vLLM and the processor make .* at position"):
        rig.sample(square)
    turned = with_images(request, picture(1), picture(2, 28, 56))
    with pytest.raises(UserError, match=rf"{request.prompt.row_id}: vLLM .* patches of the images"):
        rig.sample(turned)


def test_closing_the_iterator_aborts_what_still_runs(rig: Rig) -> None:
    async def take_one() -> Completion:
        long = [rig.request(QUESTION, picture(n), tokens=300, size=4, temperature=1.0) for n in range(3)]
        completions = rig.engine.generate([rig.request("read", tokens=2), *long])
        done = await anext(completions)
        await completions.aclose()
        return done

    before = rig.engine.usage.tokens_generated
    assert len(rig.run(take_one()).token_ids) == 2
    assert not rig.engine._llm.output_processor.request_states
    assert rig.engine.usage.tokens_generated - before < 12 * 300
    assert rig.engine.usage.sequences_running == 0
    request = rig.request("read", tokens=3)
    assert len(rig.sample(request)[request.request_id, 0].token_ids) == 3


# --- new weights under running sequences ---------------------------------------------------------


def test_recompute_gives_every_token_the_policy_of_its_version(rig: Rig) -> None:
    requests = [
        rig.request(QUESTION, picture(1), picture(2), tokens=120, size=2, temperature=0.8),
        rig.request("read", tokens=120, size=2, temperature=0.8),
    ]
    old, new, pause = rig.version, moved(rig.initial, 1), rig.engine.usage.update_pause_s
    done = rig.run(rig.update_after(new, 100, requests))
    policies = {old: rig.initial, rig.version: new}
    for request in requests:
        for index in range(2):
            completion = done[request.request_id, index]
            assert completion.versions.tolist() == sorted(completion.versions.tolist())
            assert set(completion.versions.tolist()) == {old, old + 1}
            assert gaps(rig.config, policies, request, completion).max() < FP32
    assert 0.02 < rig.engine.usage.update_pause_s - pause < 10


def test_keep_goes_on_behind_an_old_cache_and_new_requests_get_none_of_it(rig: Rig) -> None:
    rig.mode("keep")
    long = "read 0 1 2 3 4 5 6 7 8 9 " * 12
    request = rig.request(long, picture(1), tokens=120, temperature=0.8)
    assert len(request.prompt.token_ids) > 128  # a block of the prefix cache
    old, new = rig.version, moved(rig.initial, 2)
    completion = rig.run(rig.update_after(new, 50, [request]))[request.request_id, 0]
    assert set(completion.versions.tolist()) == {old, old + 1}
    mixed = gaps(rig.config, {old: rig.initial, old + 1: new}, request, completion)
    assert mixed[completion.versions == old].max() < FP32
    assert mixed[completion.versions == old + 1].max() > 0.01  # no single policy explains these
    later = dataclasses.replace(request, request_id=902)
    done = rig.sample(later)[902, 0]
    assert gap_to(rig, new, later, done) < FP32


def test_drain_finishes_what_runs_with_the_old_policy(rig: Rig) -> None:
    check_drain(rig, tokens=100)


def test_embeddings_of_an_old_vision_tower_are_not_served_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.mode("keep")
    request = rig.request(QUESTION, picture(5), tokens=8)
    assert gap_to(rig, rig.initial, request, rig.sample(request)[request.request_id, 0]) < FP32
    new = moved(rig.initial, 4, only="visual", by=0.5)
    rig.run(rig.update(new))
    assert gap_to(rig, new, request, rig.sample(request)[request.request_id, 0]) < FP32

    async def forget_nothing() -> None:
        pass

    monkeypatch.setattr(rig.engine._llm, "reset_encoder_cache", forget_nothing)
    newer = moved(rig.initial, 5, only="visual", by=0.5)
    rig.run(rig.update(newer))
    assert gap_to(rig, newer, request, rig.sample(request)[request.request_id, 0]) > 100 * FP32


# --- sleep and damage -----------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_samples_nothing_until_it_is_awake_and_has_weights(rig: Rig, level: int) -> None:
    new = moved(rig.initial, 8)
    rollout = rig.config.rollout.model_copy(update={"sleep_level": level})
    rig.engine._config = rig.config.model_copy(update={"rollout": rollout})
    request = rig.request(QUESTION, picture(1), tokens=8)

    async def scenario() -> tuple[bool, bool, Completion]:
        long = [rig.request(QUESTION, tokens=100, temperature=1.0, size=4) for _ in range(12)]  # more than fit
        running = asyncio.create_task(rig.complete(long))
        await asyncio.sleep(0.05)
        await rig.engine.sleep()  # what was admitted is finished first
        assert {len(done.token_ids) for done in (await running).values()} == {100}
        waiting = asyncio.create_task(rig.complete([request]))
        with pytest.raises(BadStateError, match="asleep: wake it before it takes new weights"):
            await rig.update(new)
        await asyncio.sleep(0.3)
        asleep = waiting.done()
        await rig.engine.wake()
        await asyncio.wait({waiting}, timeout=30 if level == 1 else 0.3)
        awake = waiting.done()
        await rig.update(new)
        (done,) = (await waiting).values()
        return asleep, awake, done

    asleep, awake, done = rig.run(scenario())
    assert (asleep, awake) == (False, level == 1)  # level 2 has forgotten its weights
    policy = {1: rig.initial, 2: new}[level]
    assert gap_to(rig, policy, request, done) < FP32


def test_weights_that_changed_in_its_sleep_are_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.run(rig.engine.sleep())
    asleep = rig.engine._asleep
    assert asleep.before is not None
    rig.engine._asleep = dataclasses.replace(asleep, before=asleep.before + 1e-6)

    async def not_for_good(error: BaseException) -> None:
        pass

    monkeypatch.setattr(rig.engine, "_fail", not_for_good)
    with pytest.raises(BadStateError, match="the vllm engine is not what it was before it slept: the log-prob"):
        rig.run(rig.engine.wake())
    rig.engine._asleep = asleep
    rig.run(rig.engine.wake())


def test_a_half_loaded_update_ends_the_engine_and_so_does_the_death_of_its_core(rig: Rig) -> None:
    async def scenario() -> None:
        started = rig.engine.usage.tokens_generated
        task = asyncio.create_task(rig.complete([rig.request(QUESTION, tokens=300, temperature=1.0)]))
        while rig.engine.usage.tokens_generated < started + 10:
            await asyncio.sleep(0.001)
        manifest = rig.publish(rig.initial)
        part = manifest.model_copy(update={"tensors": manifest.tensors[: len(manifest.tensors) // 2]})
        with pytest.raises(Exception, match="the publication does not fill"):
            await rig.engine.update_weights(manifest.version, ArrivedWeights(part, {}, manifest.shm_path))
        with pytest.raises(EngineDied, match="the vllm engine has stopped"):
            await task
        with pytest.raises(EngineDied, match="the vllm engine has stopped"):
            await rig.complete([rig.request("read", tokens=2)])
        with pytest.raises(EngineDied, match="the vllm engine has stopped"):
            await rig.update(rig.initial)

    rig.run(scenario())

    async def until_noticed() -> None:
        while True:
            rig.engine.check_alive()
            await asyncio.sleep(0.05)

    rig.engine._failure = None
    (core,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    core.kill()
    with pytest.raises(EngineDied, match="engine process has died"):
        rig.run(until_noticed(), timeout_s=30)
