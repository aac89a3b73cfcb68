"""Rows that are parked between two turns: what they save, what they never change, and when they are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.environments.observation import Message, Observation, Part
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.model_inputs import joined_row, sampled_piece
from asyncrl.processing.processor import EncodedPrompt, PromptProcessor
from protocol.messages import FinishReason, Sampling
from rollout_server.engines.base import Completion, GenerationRequest, Parking
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.pictures import picture
from tests.rigs.policies import complete_all, encoded_prompt, gaps, initial_weights, moved, until_running
from tests.rigs.tiny_families import make_family, make_llava
from tests.rigs.tiny_tiled import make_tiled

T = TypeVar("T")
MakeConfig = Callable[..., RunConfig]
WIDE, TALL = picture(42, 28), picture(28, 56)
SHOWN: tuple[tuple[tuple[Part, ...], ...], ...] = (
    (("see ", WIDE), ("go on",), (TALL, "and", WIDE)),
    ((TALL,), (TALL,), (TALL,)),
    (("1 2 3",), (WIDE, TALL), ("so",)),
)
"""What three trajectories are shown after each turn: pieces of other lengths and of one length, images and none."""


class Turn(NamedTuple):
    request: GenerationRequest
    sampled: Completion


class Talk:
    """Trajectories of one ticket, of which each goes on as long as it ends its turns."""

    def __init__(self, config: RunConfig, *, parks: bool = True, size: int = 3, temperature: float = 0.8):
        self.processor = PromptProcessor(config.model)
        eos = self.processor.tokenizer.eos_token_id
        stops = (eos, *range(0, eos, 2))  # a policy that knows nothing ends its turns, too
        self._bridge = TurnBridge(self.processor, stops)
        prompt = encoded_prompt(self.processor, "What is the largest digit?", WIDE)
        sampling = Sampling(
            temperature=temperature,
            max_new_tokens=12,
            stop_token_ids=stops,
            banned_token_ids=self.processor.placeholder_ids,
        )
        self.places = [Parking() for _ in range(size)]
        self.first = GenerationRequest(7, prompt, size, 1, sampling, parking=tuple(self.places) if parks else ())
        self.rows: dict[int, EncodedPrompt] = {}

    async def begin(self, engine: HFEngine) -> list[Turn]:
        done = await complete_all(engine, [self.first])
        return self._took([Turn(self.first, one) for one in sorted(done, key=lambda one: one.index)])

    def _took(self, turns: list[Turn]) -> list[Turn]:
        for request, sampled in turns:
            index = request.stream[0] if request.stream else sampled.index
            self.rows.pop(index, None)
            if sampled.finish_reason is FinishReason.STOP:
                prompt = request.prompt
                assert isinstance(prompt, EncodedPrompt)
                self.rows[index] = joined_row(prompt, [sampled_piece(sampled.token_ids)])
        return turns

    def later(self, shown: Sequence[tuple[Part, ...]], number: int) -> list[GenerationRequest]:
        """Requests for the next turns of those that go on."""
        requests: list[GenerationRequest] = []
        for index, row in self.rows.items():
            observation = Observation((Message("tool", shown[index]),))
            prompt = joined_row(row, [self._bridge.encode(int(row.token_ids[-1]), observation)])
            parking = (self.places[index],) if self.first.parking else ()
            requests.append(replace(self.first, prompt=prompt, group_size=1, stream=(index, number), parking=parking))
        return requests

    async def go_on(self, engine: HFEngine, shown: Sequence[tuple[Part, ...]], number: int) -> list[Turn]:
        requests = self.later(shown, number)
        done = {one.stream: one for one in await complete_all(engine, requests)}
        return self._took([Turn(request, done[request.stream]) for request in requests])


def with_engine(config: RunConfig, use: Callable[[HFEngine], Awaitable[T]]) -> T:
    async def scenario() -> T:
        engine = HFEngine(config, PromptProcessor(config.model))
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def converse(config: RunConfig, **settings: Any) -> tuple[list[Turn], float]:
    """All turns of a conversation, and the share of its prompts that was not computed again."""

    async def use(engine: HFEngine) -> tuple[list[Turn], float]:
        talk = Talk(config, **settings)
        turns = await talk.begin(engine)
        for number, shown in enumerate(SHOWN, 1):
            turns += await talk.go_on(engine, shown, number)
        return turns, engine.usage.prefill_reused_ratio

    return with_engine(config, use)


def kept_tokens(turns: Sequence[Turn]) -> tuple[int, int]:
    """Prompt tokens that parked rows have, and all of them."""
    known = {t.sampled.index: t for t in turns if not t.request.stream}
    reused = 0
    for turn in turns:
        if turn.request.stream:
            index = turn.request.stream[0]
            before = known[index]
            reused += len(before.request.prompt.token_ids) + len(before.sampled.token_ids) - 1
            known[index] = turn
    requests = {id(turn.request): len(turn.request.prompt.token_ids) for turn in turns}
    return reused, sum(requests.values())


@pytest.mark.parametrize("temperature", [0.8, 0.0], ids=["sampled", "greedy"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_turn_behind_a_parked_row_is_that_of_a_plain_forward_pass(
    make_config: MakeConfig, tmp_path: Path, family: Any, temperature: float
) -> None:
    config = make_config(model={"path": str(make_family(family, tmp_path / family))})
    turns, ratio = converse(config, temperature=temperature)
    reused, all_tokens = kept_tokens(turns)
    assert ratio == pytest.approx(reused / all_tokens)
    assert ratio > 0.5
    assert max(turn.request.stream[1] for turn in turns if turn.request.stream) == 3
    weights = initial_weights(config)
    for request, sampled in turns:
        assert gaps(config, [weights], request, sampled).max() < 1e-5
    whole, none = converse(config, temperature=temperature, parks=False)
    assert none == 0
    assert [t.sampled.token_ids.tolist() for t in turns] == [t.sampled.token_ids.tolist() for t in whole]


def test_a_model_that_counts_tokens_goes_on_behind_images_too(make_config: MakeConfig, tmp_path: Path) -> None:
    check_equal(make_config(model={"path": str(make_llava(tmp_path / "llava"))}))


def check_equal(config: RunConfig) -> None:
    turns, ratio = converse(config)
    whole, _ = converse(config, parks=False)
    assert ratio > 0.5
    for one, other in zip(turns, whole, strict=True):
        np.testing.assert_array_equal(one.sampled.token_ids, other.sampled.token_ids)
        np.testing.assert_allclose(one.sampled.logprobs, other.sampled.logprobs, atol=1e-5)


def test_a_window_of_attention_counts_no_padding(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of several lengths are padded, and this model looks back 12 columns."""
    monkeypatch.setattr(
        "tests.unit.rollout_server.test_parked_rows.SHOWN",
        ((("1",), ("1 2 3 4 5 6 7 8 9",), ("2 3",)), (("so",), ("1 2 3 4",), ("9 8 7 6 5 4 3 2 1",))),
    )
    check_equal(make_config(model={"path": str(make_tiled("gemma3", tmp_path / "gemma3"))}))


@pytest.mark.parametrize("mode", ["recompute", "drain", "keep"])
def test_new_weights_drop_parked_rows_or_are_told_apart_from_them(make_config: MakeConfig, mode: str) -> None:
    config = make_config(rollout={"weight_update": mode})
    base = initial_weights(config)
    policies = [base, moved(base, 1), moved(base, 2)]

    async def use(engine: HFEngine) -> list[list[Turn]]:
        talk = Talk(config)
        turns = [await talk.begin(engine)]
        for number in (1, 2):
            assert engine._decoding.parked.tokens > 0
            await engine.update_weights(number, policies[number].items())
            assert (engine._decoding.parked.tokens > 0) == (mode == "keep")
            turns.append(await talk.go_on(engine, SHOWN[number], number))
        return turns

    for number, turns in enumerate(with_engine(config, use)):
        assert turns
        for request, sampled in turns:
            assert set(sampled.versions) == {number}
            gap = gaps(config, policies, request, sampled)
            if mode == "keep" and number:
                assert sampled.kv_versions is not None
                assert set(sampled.kv_versions) == {0}, "the oldest that is in it"
                assert gap.max() > 1e-3
            else:
                assert sampled.kv_versions is None
                assert gap.max() < 1e-5


def test_parked_and_running_rows_have_the_memory_of_running_ones(make_config: MakeConfig) -> None:
    config = make_config(rollout={"max_concurrent_sequences": 4})

    async def use(engine: HFEngine) -> None:
        talk, loop = Talk(config, size=4), engine._decoding
        await talk.begin(engine)
        assert sorted(talk.rows) == [0, 1, 2, 3]
        oldest_first = list(loop.parked._kept())
        assert [len(row) for row in loop.parked._kept().values()] == [25, 25, 26, 30]
        loop._row_tokens, most = 41, 4 * 41
        sampling = talk.first.sampling.model_copy(update={"stop_token_ids": (), "max_new_tokens": 20})
        beside = replace(talk.first, request_id=8, group_size=2, sampling=sampling, parking=())
        running = asyncio.create_task(complete_all(engine, [beside]))
        await until_running(engine)
        assert [place.kept is not None for place in oldest_first] == [False, True, True, True], "they joined"
        while not running.done():
            async with loop._turn:
                assert loop.parked.tokens + loop.batch.cached_tokens <= most
            await asyncio.sleep(0)
        assert [place.kept is not None for place in oldest_first] == [False, False, False, True], "they grew"
        await talk.go_on(engine, SHOWN[0][:1] * 4, 1)
        assert loop.parked.tokens <= most

    with_engine(config, use)


def test_what_ends_a_trajectory_frees_its_row(make_config: MakeConfig) -> None:
    config = make_config()

    async def use(engine: HFEngine) -> None:
        parked = engine._decoding.parked

        async def begun(**settings: Any) -> Talk:
            talk = Talk(config, **settings)
            await talk.begin(engine)
            assert parked.tokens == sum(len(row.token_ids) - 1 for row in talk.rows.values()) > 0
            return talk

        await begun()
        await engine.interrupt([6])
        assert parked.tokens > 0
        await engine.interrupt([7])
        assert parked.tokens == 0, "interrupted"

        await begun()
        await engine.sleep()
        assert parked.tokens == 0, "asleep"
        await engine.wake()

        talk = await begun()
        for place in talk.places:
            place.close()
        assert parked.tokens == 0, "ended"

        talk = Talk(config)
        for place in talk.places:
            place.is_open = False
        await talk.begin(engine)
        assert parked.tokens == 0, "the last turn that is allowed"

        talk = Talk(config)
        cut = replace(talk.first, sampling=talk.first.sampling.model_copy(update={"stop_token_ids": ()}))
        await complete_all(engine, [cut])
        assert parked.tokens == 0, "cut off: the conversation is over"

        long = replace(cut, sampling=cut.sampling.model_copy(update={"max_new_tokens": 400}))
        both: Any = engine.generate([replace(talk.first, request_id=8), long])
        async with aclosing(both) as arriving:
            assert (await anext(arriving)).request_id == 8
        await complete_all(engine, [replace(talk.first, request_id=9, parking=())])
        left = {row.request_id for row in parked._kept().values()}
        assert left <= {8}, "nobody takes what has been aborted"

    with_engine(config, use)


def test_only_the_same_tokens_and_images_go_on(make_config: MakeConfig) -> None:
    config = make_config()

    async def use(engine: HFEngine) -> None:
        talk = Talk(config)
        await talk.begin(engine)
        (request, *_) = talk.later(SHOWN[0], 1)
        prompt, known = request.prompt, engine._decoding.parked.known
        assert isinstance(prompt, EncodedPrompt)
        row = known(request)
        assert row is not None

        def changed(**columns: Any) -> GenerationRequest:
            return replace(request, prompt=replace(prompt, **columns))

        token_ids = prompt.token_ids.copy()
        token_ids[len(row) - 1] += 1
        assert known(changed(token_ids=token_ids)) is None
        assert known(changed(image_hashes=("0" * 64, *prompt.image_hashes[1:]))) is None
        assert known(changed(video_hashes=("0" * 64,))) is None
        assert (
            known(changed(token_ids=prompt.token_ids[: len(row)], token_types=prompt.token_types[: len(row)])) is None
        )
        other = await complete_all(engine, [changed(token_ids=token_ids)])
        assert engine.usage.prefill_reused_ratio == 0
        assert len(other[0].token_ids)
        assert request.parking[0].kept is not row, "its place has been taken"

    with_engine(config, use)


def test_rows_that_cannot_go_on_are_prefilled(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(DecodeBatch, "prefill_behind", fail)
    config = make_config()
    turns, ratio = converse(config)
    assert ratio == 0
    assert "out of memory" in caplog.text
    whole, _ = converse(config, parks=False)
    assert [t.sampled.token_ids.tolist() for t in turns] == [t.sampled.token_ids.tolist() for t in whole]


def test_other_sequences_run_beside_rows_that_go_on(make_config: MakeConfig) -> None:
    """Neither changes the other: admission order does not matter."""
    config = make_config()

    async def use(engine: HFEngine) -> list[list[int]]:
        talk = Talk(config)
        turns = await talk.begin(engine)
        prompt = encoded_prompt(talk.processor, "answer 1 2 3")
        sampling = talk.first.sampling.model_copy(update={"stop_token_ids": (), "max_new_tokens": 300})
        beside = GenerationRequest(9, prompt, 2, 5, sampling)
        running = asyncio.create_task(complete_all(engine, [beside]))
        await until_running(engine)
        for number, shown in enumerate(SHOWN, 1):
            turns += await talk.go_on(engine, shown, number)
        assert not running.done()
        weights = initial_weights(config)
        for one in await running:
            assert gaps(config, [weights], beside, one).max() < 1e-5
        return [turn.sampled.token_ids.tolist() for turn in turns]

    alone, _ = converse(config)
    assert with_engine(config, use) == [turn.sampled.token_ids.tolist() for turn in alone]
