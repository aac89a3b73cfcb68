"""Trajectories of several turns: what is not exactly what its ticket and environment allow is refused; what is right is
packed, images in its middle included, and trains every turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.environments.observation import key_of
from asyncrl.errors import UserError
from asyncrl.journal.data_files import pack_frames, unpack_group
from asyncrl.processing.processor import PromptProcessor
from learner.groups.group_verification import verify_group
from learner.groups.recorded_batch import as_journaled
from learner.groups.ticket import ReceivedGroup
from learner.training.batch import describe_batch, make_batch
from learner.training.engine import TorchEngine
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.codec import Limits, decode, encode
from protocol.errors import ProtocolError
from protocol.messages import FinishReason, Group, ObservedImage, TextPart, TokenSource, ToolCall, TrajectoryStatus
from tests.rigs.conversations import LIMITS, OPENING, SHOWN, TALL, conversation
from tests.rigs.made_up_batch import KeepGradients
from tests.rigs.pictures import picture
from tests.rigs.separate_rows import check_packing

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config(data={"max_prompt_length": 64}, batch={"prompts_per_step": 1, "group_size": len(SHOWN)})


_MADE: dict[str, tuple[PromptProcessor, ReceivedGroup]] = {}


@pytest.fixture
def made(config: RunConfig) -> tuple[PromptProcessor, ReceivedGroup]:
    """Processor and group, the same for all tests of one model."""
    if config.model.path not in _MADE:
        processor = PromptProcessor(config.model)
        _MADE[config.model.path] = processor, conversation(config, processor)
    return _MADE[config.model.path]


def verify(item: ReceivedGroup, group: Group, **more: Any) -> None:
    measured, vocabulary = item.prepared.measured_of(group), 500
    arguments: dict[str, Any] = {"sender": "s", "version": 2, "vocabulary": vocabulary, "components": ("exact_match",)}
    verify_group(group, item.ticket, measured, **arguments, bridge=item.prepared.bridge, **more)


def with_column(group: Group, name: str, place: int, value: float) -> Group:
    column = getattr(group, name).copy()
    column[place] = value
    return group.model_copy(update={name: column})


def with_record(group: Group, index: int, **changes: Any) -> Group:
    records = [*group.trajectories]
    records[index] = records[index].model_copy(update=changes)
    return group.model_copy(update={"trajectories": tuple(records)})


def with_turn(group: Group, index: int, number: int, **changes: Any) -> Group:
    turns = [*group.trajectories[index].turns]
    turns[number] = turns[number].model_copy(update=changes)
    return with_record(group, index, turns=tuple(turns))


def with_shown(group: Group, index: int, number: int, **changes: Any) -> Group:
    """Another first image in an observation."""
    message = group.trajectories[index].turns[number].observation[0]
    image = next(part for part in message.content if isinstance(part, ObservedImage))
    parts = tuple(part.model_copy(update=changes) if part is image else part for part in message.content)
    return with_turn(group, index, number, observation=(message.model_copy(update={"content": parts}),))


def retold(group: Group) -> Group:
    message = group.trajectories[1].turns[0].observation[0]
    other = message.model_copy(update={"content": (TextPart(text="something"),)})
    return with_turn(group, 1, 0, observation=(other, *group.trajectories[1].turns[0].observation[1:]))


def with_pixel(group: Group, digest: str) -> Group:
    data = bytearray(group.blobs[digest])
    data[-20] ^= 1
    return group.model_copy(update={"blobs": {**group.blobs, digest: memoryview(bytes(data))}})


def end_of(group: Group, index: int, number: int) -> int:
    """Place in the columns of the first token behind a turn."""
    return int(group.lengths[:index].sum()) + group.trajectories[index].turns[number].end


def extra_turn(group: Group) -> Group:
    """Two turns where one was sampled."""
    turn = group.trajectories[2].turns[0]
    halves = (turn.model_copy(update={"end": 2}), turn.model_copy(update={"start": 2}))
    return with_record(group, 2, turns=halves)


HASH = content_hash(TALL)
OTHER = picture(42, 28, "BMP")
TAMPERED: dict[str, tuple[Callable[[Group], Group], str]] = {
    "observation token": (
        lambda g: with_column(g, "token_ids", end_of(g, 0, 0) + 3, 77),
        "completion 0: after turn 0 stand other tokens than those of the recorded observation, from place 3",
    ),
    "observation text": (retold, "completion 1: after turn 0 stand other tokens"),
    "image byte": (lambda g: with_pixel(g, HASH), f"completion 0: after turn 1 the bytes of the image {HASH[:12]}"),
    "image left out": (
        lambda g: g.model_copy(update={"blobs": {k: v for k, v in g.blobs.items() if k != HASH}}),
        f"completion 0: after turn 1 the image {HASH[:12]} of an observation came without its bytes",
    ),
    "another image": (
        lambda g: with_shown(
            g.model_copy(update={"blobs": {**g.blobs, content_hash(picture(70, 28)): memoryview(picture(70, 28))}}),
            3, 0, content_hash=content_hash(picture(70, 28)),
        ),
        "completion 3: after turn 0 stand other tokens",
    ),
    "an image that nobody showed": (
        lambda g: g.model_copy(update={"blobs": {**g.blobs, content_hash(OTHER): memoryview(OTHER)}}),
        "that no environment showed",
    ),
    "grid": (lambda g: with_shown(g, 0, 0, grid=(1, 6, 4)), r"completion 0: after turn 0 the image grids differ"),
    "mask of a turn": (
        lambda g: with_column(g, "source", 1, TokenSource.OBSERVATION),
        "completion 0: turn 0 has another source than the policy at a token that it sampled",
    ),
    "mask of an observation": (
        lambda g: with_column(g, "source", end_of(g, 1, 0), TokenSource.POLICY),
        "completion 1: after turn 0 a token of the observation has another source or a log-prob",
    ),
    "log-prob of an observation": (
        lambda g: with_column(g, "logprobs", end_of(g, 1, 0), -1),
        "completion 1: after turn 0 a token of the observation has another source or a log-prob",
    ),
    "version of an observation": (
        lambda g: with_column(g, "versions", end_of(g, 0, 1), 2),
        "after turn 1 a token of the observation has another version",
    ),
    "turn's span": (lambda g: with_turn(g, 0, 1, start=5), "completion 0: after turn 0 stand other tokens"),
    "turn's end": (lambda g: with_turn(g, 2, 0, end=3), "completion 2: turn 0 ended by a stop token, but its last"),
    "turns that overlap": (lambda g: with_turn(g, 3, 1, start=1), "completion 3: turn 1 begins at token 1, inside"),
    "two turns for one": (extra_turn, "completion 2: turn 0 ended by a stop token, but its last token is"),
    "no turn": (lambda g: with_record(g, 2, turns=()), "completion 2: it has no turn"),
    "turn's ending": (
        lambda g: with_turn(g, 0, 0, finish_reason=FinishReason.LENGTH),
        "completion 0: turn 0 was cut, and yet the conversation goes on",
    ),
    "trajectory's ending": (
        lambda g: with_record(g, 0, finish_reason=FinishReason.LENGTH),
        "completion 0: its last turn ended by stop, and it by length",
    ),
    "status": (
        lambda g: with_record(g, 1, status=TrajectoryStatus.FINISHED),
        "completion 1: it is finished, and ended by length",
    ),
    "turn's reward": (lambda g: with_turn(g, 0, 1, reward=float("nan")), "completion 0: turn 1 has the reward nan"),
    "what follows the last turn": (
        lambda g: with_turn(g, 2, 0, observation=g.trajectories[1].turns[0].observation),
        "completion 2: something stands behind its last turn",
    ),
    "opening": (lambda g: g.model_copy(update={"opening": ()}), "the engine saw 2 image"),
}  # fmt: skip


def test_a_right_conversation_passes_also_after_the_wire_and_the_journal(
    made: tuple[PromptProcessor, ReceivedGroup],
) -> None:
    _, item = made
    verify(item, item.group)
    travelled = decode(encode(item.group), (Group,), Limits())
    assert isinstance(travelled, Group)
    kept = unpack_group(b"".join(bytes(piece) for piece in pack_frames(encode(travelled))))
    verify(item, kept)
    assert kept.trajectories == item.group.trajectories
    assert {digest: bytes(data) for digest, data in kept.blobs.items()} == item.group.blobs
    assert as_journaled(item.prepared, kept).group is kept


@pytest.mark.parametrize(
    "changes",
    [{"info": '{"a": "' + "x" * 5000 + '"}'}, {"info": "[1]"}, {"info": "{"}, {"calls": (ToolCall(name="a"),) * 65}],
    ids=["long", "no object", "no JSON", "calls"],
)
def test_calls_and_facts_over_their_size_are_refused_on_the_wire(
    made: tuple[PromptProcessor, ReceivedGroup], changes: dict[str, Any]
) -> None:
    frames = encode(with_turn(made[1].group, 0, 0, **changes))
    with pytest.raises(ProtocolError, match=r"info|calls"):
        decode(frames, (Group,), Limits())


@pytest.mark.parametrize("name", TAMPERED)
def test_a_conversation_that_was_tampered_with_is_refused(
    made: tuple[PromptProcessor, ReceivedGroup], name: str
) -> None:
    _, item = made
    tamper, reason = TAMPERED[name]
    with pytest.raises((ProtocolError, UserError), match=reason):
        verify(item, tamper(item.group))


def test_limits_of_the_ticket_are_checked(made: tuple[PromptProcessor, ReceivedGroup]) -> None:
    _, item = made
    for changes, reason in (
        ({"turns": 2}, "completion 0: it has 3 turns, over the limit of 2"),
        ({"images": 1}, "completion 0: it was shown 2 images, over the limit of 1"),
        ({"tokens_per_turn": 3}, "completion 0: turn 0 has 4 tokens, over the limit of 3"),
        ({"tokens_per_turn": 5}, "completion 1: turn 1 was cut at 4 tokens, before the limit of 5"),
    ):
        limits = LIMITS.model_copy(update=changes)
        prepared = replace(item.prepared, ticket=item.ticket.model_copy(update={"conversation": limits}))
        with pytest.raises(ProtocolError, match=reason):
            verify(replace(item, prepared=prepared), item.group)


def test_an_opening_that_makes_the_prompt_longer_than_the_limit_is_refused(
    made: tuple[PromptProcessor, ReceivedGroup],
) -> None:
    _, item = made
    tokens = len(item.group.prompt_ids)
    verify(item, item.group, max_prompt_length=tokens)
    with pytest.raises(ProtocolError, match=f"opening the prompt has {tokens} tokens, over data.max_prompt_length"):
        verify(item, item.group, max_prompt_length=tokens - 1)


def test_a_conversation_where_one_turn_was_asked_for_is_refused(
    config: RunConfig, made: tuple[PromptProcessor, ReceivedGroup]
) -> None:
    processor, item = made
    ticket = item.ticket.model_copy(update={"conversation": None})
    single = replace(item, prepared=replace(item.prepared, ticket=ticket, bridge=None))
    with pytest.raises(UserError, match="an environment opened, and the ticket asks for none"):
        verify(single, item.group)
    with pytest.raises(ProtocolError, match="its ticket asks for one turn"):
        verify(single, conversation(config, processor, opening=False).group)


def test_a_journaled_conversation_of_another_template_is_refused(made: tuple[PromptProcessor, ReceivedGroup]) -> None:
    _, item = made
    with pytest.raises(UserError, match="after turn 0 stand other tokens"):
        as_journaled(item.prepared, retold(item.group))


# --- training ---------------------------------------------------------------------------------------


def test_packed_conversations_equal_separate_passes(
    config: RunConfig, made: tuple[PromptProcessor, ReceivedGroup]
) -> None:
    """Log-probs and gradients, with images of the opening and in the middle of trajectories, vision tower included."""
    processor, item = made
    batch = make_batch([item], processor)
    assert sum(len(c.observed) for g in batch.train_groups for c in g.completions) == 2
    for budget, micro_batches in ((4096, 1), (110, 3)):
        assert check_packing(config, processor, batch, budget) >= micro_batches


def test_the_first_turn_learns_from_a_reward_at_the_end_and_from_what_it_was_shown_nothing(
    config: RunConfig, made: tuple[PromptProcessor, ReceivedGroup]
) -> None:
    processor, item = made
    batch = make_batch([item], processor)
    engine = KeepTokenGradients(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    metrics = LearnerStep(Roles(engine), config.step_settings)(batch, 2)
    assert np.isfinite(metrics["loss"])
    gradients = torch.zeros(len(item.group.token_ids))
    assert engine.logprobs.grad is not None
    gradients[batch.trained.flat] = engine.logprobs.grad
    turns, first = item.group.trajectories[0].turns, int(item.group.lengths[0])
    for turn in turns:
        assert bool((gradients[turn.start : turn.end] != 0).all())
    sampled = torch.from_numpy(item.group.is_sampled[:first])
    assert not gradients[:first][~sampled].any()
    assert int(sampled.sum()) == sum(turn.end - turn.start for turn in turns)


def test_turns_of_the_trained_tokens_are_those_of_the_records(made: tuple[PromptProcessor, ReceivedGroup]) -> None:
    """Turn k earned k / 4 and left state k; trajectory 0 is scored with 1, the others with 0. The third is one turn."""
    processor, item = made
    numbers = [0, 1, 2, 0, 1, 0, 0, 1]
    turns = make_batch([item], processor).turns(zero_over_limit=False)
    assert turns.turn.tolist() == turns.state.tolist() == [number for number in numbers for _ in range(4)]
    assert turns.turn_rewards.tolist() == [x for number in numbers for x in (0.0, 0.0, 0.0, number / 4)]
    assert turns.outcomes.tolist() == [0.25, -0.25, 0.0, -0.25]

    source, turn = item.group.source.copy(), item.group.trajectories[0].turns[1]
    source[turn.start : turn.end] = TokenSource.OBSERVATION
    limited = with_record(item.group, 3, limit="turns", status=TrajectoryStatus.TRUNCATED)
    limited = with_turn(limited, 1, 0, state_key="").model_copy(update={"source": source})
    turns = make_batch([replace(item, group=limited)], processor).turns(zero_over_limit=True)
    assert turns.turn.tolist() == [number for number in (0, 2, 0, 1, 0, 0, 1) for _ in range(4)]
    assert turns.turn_rewards[turns.turn_rewards > 0].tolist() == [0.5, 0.25], "what is not trained gives no credit"
    assert turns.state[8:16].tolist() == [0, 0, 0, 0, -1, -1, -1, -1]
    assert turns.outcomes.tolist() == [0.25, -0.25, 0.0, 0.0], "a limit took what its turns had earned"


def test_who_comes_back_to_the_opening_is_in_its_state_again(made: tuple[PromptProcessor, ReceivedGroup]) -> None:
    _, item = made
    assert item.group.opening
    back = with_turn(item.group, 0, 0, state_key=key_of(OPENING).hex())
    turns = make_batch([replace(item, group=back)], made[0]).turns(zero_over_limit=False)
    assert turns.state[:12].tolist() == [number for number in (0, 0, 1) for _ in range(4)]


def test_estimators_see_turns_where_there_is_an_environment(
    config: RunConfig, made: tuple[PromptProcessor, ReceivedGroup]
) -> None:
    processor, item = made
    batch = make_batch([item], processor)
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    seen: list[Trajectories] = []

    def estimator(t: Trajectories, _: AlgorithmConfig) -> Credit:
        seen.append(t)
        return Credit(torch.ones(len(t.row)))

    for name in ("", "some.py:Where"):
        environment = config.environment.model_copy(update={"name": name})
        step = LearnerStep(Roles(engine), config.model_copy(update={"environment": environment}).step_settings)
        step.estimator = estimator
        step(batch, 2)
    plain, several = seen
    assert (plain.turn, plain.turn_rewards, plain.state, plain.outcomes) == (None, None, None, None)
    assert several.turn is not None
    assert several.turn.tolist() == batch.turns(zero_over_limit=False).turn.tolist()
    sums = torch.zeros(4).index_add(0, several.row, several.rewards)
    assert sums.tolist() == batch.scores.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_what_a_limit_ended_is_trained_or_masked_at_its_place(
    config: RunConfig, made: tuple[PromptProcessor, ReceivedGroup]
) -> None:
    """It counts in the group's mean and in the denominator: masked, it changes no other token's gradient."""
    processor, item = made
    limited = with_record(item.group, 3, limit="turns", status=TrajectoryStatus.TRUNCATED, reward=0.5)
    batch = make_batch([replace(item, group=limited)], processor)
    gradients: dict[str, torch.Tensor] = {}
    for over_limit in ("score", "mask"):
        environment = config.environment.model_copy(update={"name": "some.py:Where", "over_limit": over_limit})
        asked = config.model_copy(update={"environment": environment})
        engine = KeepTokenGradients(asked.model_settings, asked.learner.optim, 1)
        engine.prepare()
        LearnerStep(Roles(engine), asked.step_settings)(batch, 2)
        assert engine.logprobs.grad is not None
        gradients[over_limit] = engine.logprobs.grad
    ended = batch.trained.row == 3
    assert bool((gradients["score"] != 0).all())
    assert torch.equal(gradients["mask"], torch.where(ended, 0.0, gradients["score"]))


class KeepTokenGradients(KeepGradients):
    logprobs: torch.Tensor

    def forward(self, micro_batch: Any, **asked: Any) -> Any:
        outputs = super().forward(micro_batch, **asked)
        if outputs.logprobs.requires_grad:
            outputs.logprobs.retain_grad()
            self.logprobs = outputs.logprobs
        return outputs


def test_a_step_says_how_its_conversations_went(made: tuple[PromptProcessor, ReceivedGroup]) -> None:
    processor, item = made
    lost = {"status": TrajectoryStatus.ERROR, "error_kind": "environment_died", "reward": None}
    group = with_record(with_record(item.group, 2, **lost), 3, limit="images")
    calls = [call for record in group.trajectories for turn in record.turns for call in turn.calls]
    group = with_turn(group, 0, 0, calls=(calls[0], calls[0].model_copy(update={"error_kind": "tool"})))
    batch = make_batch([replace(item, group=group)], processor)
    described = describe_batch(batch, 3, "exact_match")
    said = {name: value for name, value in described.items() if name.startswith("env/") and value}
    ends = {"env/ends/done": 1, "env/ends/cut": 1, "env/ends/images": 1, "env/ends/failed": 1, "env/errors/died": 1}
    ends |= {"env/calls": (len(calls) + 1) / 4, "env/call_error_rate": 1 / (len(calls) + 1), "env/call_errors/tool": 1}
    observed = 1 - sum(t.end - t.start for r in group.trajectories for t in r.turns) / int(group.lengths.sum())
    assert said.pop("env/observed_share") == pytest.approx(observed)
    assert 0.5 < observed < 1
    lengths = [sum(turn.end - turn.start for turn in record.turns) for record in group.trajectories]
    assert (described["tokens"], described["response_length/max"]) == (sum(lengths), max(lengths)), "what it sampled"
    assert described["response_length/mean"] == pytest.approx(sum(lengths) / 4)
    assert said.pop("env/reward_with_calls") == pytest.approx(1 / 3), "of the three that have a reward"
    told = {"env/turns": 2, "env/turns_max": 3, "env/segments": 1, "env/seconds": 0.125, "env/error_rate": 0.25}
    assert said == told | ends
    silent = with_turn(group, 0, 0, calls=())
    for number in range(1, len(silent.trajectories[0].turns)):
        silent = with_turn(silent, 0, number, calls=())
    described = describe_batch(make_batch([replace(item, group=silent)], processor), 3, "exact_match")
    assert (described["env/reward_with_calls"], described["env/reward_without_calls"]) == (0.0, 1.0)
