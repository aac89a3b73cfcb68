"""A group of trajectories of several turns, made without an engine: text and images of tools between the turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.environments.observation import Message, Observation
from asyncrl.environments.recording import recorded
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.tickets.ticket_writer import TicketWriter
from protocol.messages import (
    ConversationLimits,
    FinishReason,
    Group,
    GroupTimings,
    TokenSource,
    ToolCall,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
)
from tests.rigs.pictures import picture

LIMITS = ConversationLimits(turns=3, tokens_per_turn=4, images=2)
MOST_TOKENS = 100
WIDE, TALL = picture(42, 28), picture(28, 56)
SHOWN: tuple[tuple[Observation, ...], ...] = (
    (Observation((Message("tool", ("see ", WIDE)),)), Observation((Message("tool", (TALL, "and")),))),
    (Observation((Message("tool", ("<|im_end|> nothing",)), Message("user", ("go on",)))),),
    (),
    (Observation((Message("tool", (TALL,)),)),),
)
"""Messages that each trajectory was shown after its turns but the last."""
OPENING = Observation((Message("user", ("so: ", WIDE)),))


def conversation_ticket(config: RunConfig, processor: PromptProcessor) -> PreparedTicket:
    """The first ticket of a run, as one of a conversation."""
    stop = processor.tokenizer.eos_token_id
    item = TicketWriter(config.ticket_settings, processor, (stop,)).write(TicketSlot(0, 0, version=0, bound=2))
    ticket = item.ticket.model_copy(
        update={
            "conversation": LIMITS,
            "sampling": item.ticket.sampling.model_copy(update={"max_new_tokens": MOST_TOKENS}),
            "group_size": len(SHOWN),
        }
    )
    return replace(item, ticket=ticket, bridge=TurnBridge(processor, (stop,)))


def conversation(config: RunConfig, processor: PromptProcessor, *, opening: bool = True) -> ReceivedGroup:
    """Random turns, as long as allowed or shorter; the last one of trajectory 1 was cut. Turn k is of version k."""
    item, draw = conversation_ticket(config, processor), np.random.default_rng(0)
    stop = processor.tokenizer.eos_token_id
    assert item.bridge is not None
    usable = [i for i in range(len(processor.tokenizer)) if i not in processor.placeholder_ids]
    usable.remove(stop)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("token_ids", "source", "logprobs", "versions")}
    records: list[TrajectoryRecord] = []
    blobs = {content_hash(image): memoryview(image) for image in (WIDE, TALL)}

    def add(ids: Sequence[int] | np.ndarray, source: TokenSource, version: int) -> int:
        logprobs = -draw.random(len(ids)) if source is TokenSource.POLICY else np.zeros(len(ids))
        made = (ids, np.full(len(ids), source), logprobs, np.full(len(ids), version))
        for (name, parts), column in zip(columns.items(), made, strict=True):
            dtype = {"source": np.uint8, "logprobs": np.float32}.get(name, np.int32)
            parts.append(np.asarray(column, dtype))
        return len(ids)

    lengths: list[int] = []
    for index, shown in enumerate(SHOWN):
        turns, place = [], 0
        for number, observation in enumerate([*shown, None]):
            is_cut = index == 1 and observation is None
            said = [*draw.choice(usable, 4 if is_cut else 3).tolist(), *([] if is_cut else [stop])]
            end = place + add(said, TokenSource.POLICY, number)
            facts = item.bridge.measure(said[-1], observation) if observation else None
            turns.append(
                Turn(
                    start=place,
                    end=end,
                    finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
                    reward=0.25 * number,
                    state_key=f"{number:02x}",
                    calls=(ToolCall(name="look", arguments='{"at": 1}', seconds=0.5),) if observation else (),
                    info='{"hit": true}' if observation else "",
                    observation=recorded(observation, facts.image_grids) if observation and facts else (),
                )
            )
            place = end + (add(facts.token_ids, TokenSource.OBSERVATION, number) if facts else 0)
        lengths.append(place)
        is_cut = turns[-1].finish_reason is FinishReason.LENGTH
        records.append(
            TrajectoryRecord(
                status=TrajectoryStatus.TRUNCATED if is_cut else TrajectoryStatus.FINISHED,
                finish_reason=turns[-1].finish_reason,
                rewards={"exact_match": float(index == 0)},
                reward=float(index == 0),
                turns=tuple(turns),
            )
        )
    shown_first = recorded(OPENING, item.bridge.processor.measure_text("<|image_pad|>", [WIDE], "x").image_grids)
    prompt, images = item.ticket.prompt, dict(item.blobs)
    if opening:
        prompt, images = item.bridge.opened(prompt, OPENING), {**images, content_hash(WIDE): WIDE}
    facts = processor.measure(prompt, images)
    group = Group(
        ticket_id=0,
        server_id="s",
        prompt_ids=facts.token_ids,
        opening=shown_first if opening else (),
        blobs=blobs,
        image_grids=facts.image_grids,
        image_hashes=facts.image_hashes,
        lengths=np.asarray(lengths, np.int32),
        token_ids=np.concatenate(columns["token_ids"]),
        source=np.concatenate(columns["source"]),
        logprobs=np.concatenate(columns["logprobs"]),
        versions=np.concatenate(columns["versions"]),
        trajectories=tuple(records),
        timings=GroupTimings(generate_s=0, reward_s=0, environment_s=0.5),
    )
    return ReceivedGroup(item, group)
