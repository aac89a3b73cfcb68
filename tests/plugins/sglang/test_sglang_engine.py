"""The real SGLang on a CPU, in processes and an environment of its own: a Qwen2.5-VL, weights published as a learner
does. The run in test_sglang_end_to_end.py is of a Qwen2-VL."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from prometheus_client import REGISTRY

from asyncrl.errors import BadStateError, UserError
from asyncrl.processing.encoded_prompt import VideoFrames
from asyncrl_plugins.sglang.client import SGLangRefused
from protocol.messages import FinishReason
from rollout_server.engines.arrived_weights import ArrivedWeights
from rollout_server.engines.base import Completion, EngineDied
from tests.plugins.sglang.sglang_rig import NEEDS_SGLANG, SGLangRig
from tests.rigs.engine_checks import (
    behind_begun,
    check_bans,
    check_drain,
    check_goes_on,
    check_recorded_prompts,
    check_requests,
    check_stop_id,
)
from tests.rigs.engine_rig import FP32, QUESTION, gap_to, with_images
from tests.rigs.policies import complete_all, encoded_prompt, gaps, moved, picture

pytestmark = NEEDS_SGLANG


# --- sampling -------------------------------------------------------------------------------


def stops(rig: SGLangRig) -> tuple[int, ...]:
    """A common id, and the end of text, at which SGLang ends in any case."""
    return 7, rig.processor.tokenizer.eos_token_id


def test_recorded_prompts_get_the_tokens_and_logprobs_of_the_hf_engine(sglang: SGLangRig) -> None:
    check_recorded_prompts(sglang, stops(sglang))


def test_logprobs_are_of_the_distribution_that_was_sampled_from(sglang: SGLangRig) -> None:
    requests = [
        sglang.request(QUESTION, picture(1), tokens=40, size=4, temperature=0.7),
        sglang.request("read", tokens=40, size=4, temperature=1.3),
    ]
    done = sglang.sample(*requests)
    for request in requests:
        completions = [done[request.request_id, index] for index in range(4)]
        assert all(gap_to(sglang, sglang.initial, request, one) < FP32 for one in completions)
        assert len({tuple(one.token_ids.tolist()) for one in completions}) == 4


def test_a_later_turn_is_sampled_from_the_whole_row_token_for_token(sglang: SGLangRig) -> None:
    """Its row has tokens that another reading of its text would not give, between two images."""
    sizes = (picture(1), picture(2, 56, 84))
    parts = [encoded_prompt(sglang.processor, QUESTION, image) for image in sizes]
    sampled = np.asarray([72, 101, 108, 108, 111, 300, 7], np.int32)
    assert sglang.processor.tokenizer.encode(sglang.processor.tokenizer.decode(sampled)) != sampled.tolist()

    def row(name: str, between: np.ndarray) -> np.ndarray:
        first, second = (getattr(part, name) for part in parts)
        return np.concatenate([first, between, second])

    prompt = dataclasses.replace(
        parts[0],
        images=sizes,
        row_id="two turns",
        token_ids=row("token_ids", sampled),
        unexpanded_ids=row("unexpanded_ids", sampled),
        token_types=row("token_types", np.zeros_like(sampled)),
        image_grids=np.concatenate([part.image_grids for part in parts]),
        image_hashes=parts[0].image_hashes + parts[1].image_hashes,
        pixel_values=torch.cat([part.pixel_values for part in parts if part.pixel_values is not None]),
    )
    plain = sglang.request(QUESTION, *sizes, tokens=12, temperature=1.0)
    request = dataclasses.replace(plain, prompt=prompt, stream=(0, 1))
    done = sglang.sample(request)[request.request_id, 0]
    assert gap_to(sglang, sglang.initial, request, done) < FP32


def test_requests_are_followed_as_the_hf_engine_follows_them(sglang: SGLangRig) -> None:
    check_requests(sglang, stops(sglang))


def test_a_stop_id_ends_a_completion_and_belongs_to_it(sglang: SGLangRig) -> None:
    check_stop_id(sglang)


def test_a_banned_id_is_never_sampled_even_by_a_policy_that_wants_nothing_else(sglang: SGLangRig) -> None:
    check_bans(sglang)


def test_what_it_cannot_honour_is_refused_with_the_reason_and_alone(sglang: SGLangRig) -> None:
    good = sglang.request("read", tokens=3)
    film = sglang.request(QUESTION)
    film = dataclasses.replace(film, prompt=dataclasses.replace(film.prompt, videos=(VideoFrames((picture(1),), 1.0),)))
    wrong = {
        r"allows image placeholder ids \[\d+": sglang.request(QUESTION, picture(1), banned_token_ids=()),
        "top_p 0.9, top_k 0 and min_p 0, and SGLang's": sglang.request(QUESTION, temperature=0.7, top_p=0.9),
        "has videos, which the sglang engine does not": film,
        r"row .* are more than the \d+ that SGLang": sglang.request(QUESTION, tokens=5000),
    }

    async def beside_it() -> list[Any]:
        return [item async for item in sglang.engine.generate([*wrong.values(), good])]

    *failed, done = sglang.run(beside_it())
    for one, message in zip(failed, wrong, strict=True):
        with pytest.raises(UserError, match=message):
            raise one.error
    assert (done.request_id, len(done.token_ids)) == (good.request_id, 3)


def test_a_prompt_that_sglang_expands_otherwise_names_its_row(sglang: SGLangRig) -> None:
    request = sglang.request(QUESTION, picture(1), picture(2), tokens=2)
    square = with_images(request, picture(1), picture(2, 28, 28))
    with pytest.raises(UserError, match=rf"{request.prompt.row_id}: SGLang and the processor make .* at position"):
        sglang.sample(square)


def test_closing_the_iterator_aborts_what_still_runs(sglang: SGLangRig) -> None:
    async def take_one() -> Completion:
        long = [sglang.request(QUESTION, picture(n), tokens=300, size=4, temperature=1.0) for n in range(3)]
        completions = sglang.engine.generate([sglang.request("read", tokens=2), *long])
        done = await anext(completions)
        await completions.aclose()
        return done

    assert len(sglang.run(take_one()).token_ids) == 2
    assert sglang.engine.usage.sequences_running == 0
    assert len(sglang.answers) == 1

    async def nothing_is_left() -> None:
        assert sglang.engine._client is not None
        while True:
            with suppress(SGLangRefused):  # while anything runs; a sequence ends at its next token
                return await sglang.engine._client.call("/flush_cache", timeout_s=10)
            await asyncio.sleep(0.05)

    sglang.run(nothing_is_left(), timeout_s=5)


def test_what_is_interrupted_goes_on_behind_its_own_tokens(sglang: SGLangRig) -> None:
    request = sglang.request(QUESTION, picture(1), tokens=300, size=3, temperature=0.8)

    async def scenario() -> dict[int, tuple[Completion, Completion]]:
        work = asyncio.create_task(complete_all(sglang.engine, [request]))
        await sglang.sampled(40, [request])
        await sglang.engine.interrupt([request.request_id])
        return await behind_begun(sglang, request, await work)

    parts = sglang.run(scenario())
    assert all(start.finish_reason is None and len(start.token_ids) for start, _ in parts.values())
    assert all(end.finish_reason is FinishReason.LENGTH and len(end.token_ids) == 300 for _, end in parts.values())
    check_goes_on(sglang, request, parts)


# --- new weights under running sequences ---------------------------------------------------------


def test_recompute_gives_every_token_the_policy_of_its_version_by_sglangs_own_record(sglang: SGLangRig) -> None:
    requests = [
        sglang.request(QUESTION, picture(1), picture(2), tokens=300, size=2, temperature=0.8),
        sglang.request("read", tokens=300, size=2, temperature=0.8),
    ]
    old, new, pause = sglang.version, moved(sglang.initial, 1), sglang.engine.usage.update_pause_s
    done = sglang.run(sglang.update_after(new, 60, requests))
    policies = {old: sglang.initial, sglang.version: new}
    records = {answer["meta_info"]["id"].rpartition("-")[0]: answer["meta_info"] for answer in sglang.answers}
    for request in requests:
        for index in range(2):
            completion = done[request.request_id, index]
            spans = records[f"{request.request_id}-{index}"]["weight_versions"]
            assert completion.versions.tolist() == [
                int(span["version"]) for span in spans for _ in range(span["start"], span["end"])
            ]
            assert set(completion.versions.tolist()) == {old, old + 1}
            assert gaps(sglang.config, policies, request, completion).max() < FP32
    assert 0 < sglang.engine.usage.update_pause_s - pause < 10


def test_nothing_of_an_old_policy_is_served_from_a_cache(sglang: SGLangRig) -> None:
    request = sglang.request("read 0 1 2 3 4 5 6 7 8 9 " * 4, picture(5), tokens=8)
    for seed, part in ((4, "visual"), (5, "language_model"), (6, "visual")):
        sglang.sample(request)  # fills the caches of prefixes and images
        new = moved(sglang.initial, seed, only=part, by=0.5)
        sglang.run(sglang.update(new))
        assert gap_to(sglang, new, request, sglang.sample(request)[request.request_id, 0]) < FP32


def test_an_image_of_a_running_sequence_is_seen_by_the_new_vision_tower(sglang: SGLangRig) -> None:
    request = sglang.request(QUESTION, picture(5), tokens=300, temperature=0.8)
    old, new = sglang.version, moved(sglang.initial, 7, only="visual", by=0.5)
    (done,) = sglang.run(sglang.update_after(new, 60, [request])).values()
    assert set(done.versions.tolist()) == {old, old + 1}
    assert gaps(sglang.config, {old: sglang.initial, old + 1: new}, request, done).max() < FP32


def test_drain_finishes_what_runs_with_the_old_policy(sglang: SGLangRig) -> None:
    check_drain(sglang, tokens=200)


# --- metrics, sleep and damage -----------------------------------------------------------------------


def test_its_own_metrics_are_among_the_servers(sglang: SGLangRig) -> None:
    sglang.sample(sglang.request("read", tokens=3))
    families = {family.name: family for family in REGISTRY.collect() if family.name.startswith("sglang:")}
    assert sum(sample.value for sample in families["sglang:generation_tokens"].samples) >= 3
    assert "sglang:token_usage" in families


def test_it_wakes_up_as_it_was_and_what_comes_meanwhile_waits(sglang: SGLangRig) -> None:
    request = sglang.request(QUESTION, picture(1), tokens=8)
    before = sglang.sample(request)[request.request_id, 0]

    async def scenario() -> Completion:
        await sglang.engine.sleep()
        with pytest.raises(BadStateError, match="the sglang engine is asleep: wake it before it takes new weights"):
            await sglang.update(sglang.initial)
        sampling = asyncio.create_task(sglang.complete([dataclasses.replace(request, request_id=904)]))
        await asyncio.sleep(0.2)
        assert not sampling.done()
        await sglang.engine.wake()
        return (await sampling)[904, 0]

    after = sglang.run(scenario())
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert np.abs(after.logprobs - before.logprobs).max() < FP32


def test_a_version_that_it_cannot_load_ends_the_engine_and_nothing_of_a_dead_one_stays(sglang: SGLangRig) -> None:
    assert sglang.engine._process is not None
    leader = sglang.engine._process.pid
    group = [process for process in psutil.process_iter() if os.getpgid(process.pid) == leader]
    assert len(group) >= 3  # HTTP server, scheduler, detokenizer
    (scheduler,) = [process for process in group if "scheduler" in " ".join(process.cmdline())]

    async def scenario() -> None:
        task = asyncio.create_task(sglang.complete([sglang.request(QUESTION, tokens=380, temperature=1.0)]))
        await sglang.complete([sglang.request("read", tokens=5)])
        name = next(name for name in sglang.initial if name.endswith("embed_tokens.weight"))
        broken = {**sglang.initial, name: sglang.initial[name][:, 1:]}
        manifest = sglang.publish(broken)
        with pytest.raises(Exception, match="SGLang"):
            await sglang.engine.update_weights(manifest.version, ArrivedWeights(manifest, pieces_of(broken)))
        with pytest.raises(EngineDied):
            await task
        with pytest.raises(EngineDied, match="SGLang"):
            await sglang.complete([sglang.request("read", tokens=2)])
        with pytest.raises(EngineDied, match="SGLang"):
            await sglang.update(sglang.initial)
        sglang.engine._failure = None
        with suppress(psutil.NoSuchProcess):
            scheduler.kill()
        with pytest.raises(EngineDied, match=r"SGLang's server .*\. Its last output"):
            await until_noticed(sglang)
        await sglang.engine.close()

    sglang.run(scenario())
    _, alive = psutil.wait_procs(group, timeout=10)
    assert not alive


async def until_noticed(sglang: SGLangRig) -> None:
    while True:
        sglang.engine.check_alive()
        await asyncio.sleep(0.05)


def pieces_of(weights: dict[str, torch.Tensor]) -> dict[str, memoryview]:
    return {name: memoryview(tensor.contiguous().view(-1).numpy()).cast("B") for name, tensor in weights.items()}
