"""The alignment contract: what each way of breaking it runs into, and that only an aligned server gets work."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import logging
import shutil
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.errors import BadStateError
from asyncrl.models.loading import stop_token_ids
from asyncrl.models.processing import EncodedPrompt, PromptProcessor
from asyncrl.models.published import load_published, published_tensors
from learner.alignment import Alignment
from learner.batch import make_batch
from learner.connections import ServerState
from learner.engines.torch_engine import TorchEngine
from learner.exchange import Exchange
from learner.journal import Journal, TicketSlot
from learner.ledger import TicketLedger
from learner.parity import ParityJudge, compare
from learner.step import LearnerStep
from learner.ticket_writer import PARITY_IDS, TicketWriter
from learner.tickets import PreparedTicket, ReceivedGroup
from learner.verification import verify_group
from protocol.codec import Limits, encode
from protocol.errors import ErrorCode, ProtocolError
from protocol.handshake import check_hello
from protocol.messages import (
    Ack,
    FinishReason,
    Group,
    Prompt,
    Refusal,
    TicketFailed,
    TicketKind,
    Tickets,
    WeightsLoaded,
)
from rollout_server.engines.base import Completion
from rollout_server.engines.hf import HFEngine
from rollout_server.production import GroupProducer
from tests.fuzz import content
from tests.fuzz.rig import write_ticket
from tests.small_runs import failure_of, logs, small
from tests.test_bad_input import png, write_rows
from tests.test_end_to_end import wait_until
from tests.two_processes import start, with_ports, write_config

MakeConfig = Callable[..., RunConfig]
Blobs = Mapping[str, bytes]


@pytest.fixture
def pair_config(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    """Rows of two images of one size: only their content tells them apart."""
    names = []
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png((56, 56), number))
        names.append(f"{number}.png")
    rows = [{"prompt": "<image> or <image>?", "images": names[i : i + 2]} for i in (0, 2)]
    return make_config(
        data={**write_rows(tmp_path, [{"prompt": "no image"}, *rows]), "max_prompt_length": 120},
        rollout={"temperature": 0.8},
    )


def parity_tickets(config: RunConfig, processor: PromptProcessor) -> list[PreparedTicket]:
    return TicketWriter(config, processor, stop_token_ids(config.model, processor.tokenizer)).write_parity()


def answer(
    engine: HFEngine, processor: PromptProcessor, items: Sequence[PreparedTicket], swap: Callable[[Blobs], Blobs] = dict
) -> list[ReceivedGroup]:
    """What a started engine's server makes of the tickets; `swap` may mix up the images on their way."""

    async def produce() -> list[Group]:
        producer = GroupProducer(engine, cast(Any, None), processor, "server-1")
        return [
            group
            for item in items
            async for group in producer.produce(
                [item.ticket], {digest: memoryview(data) for digest, data in swap(item.blobs).items()}
            )
        ]

    groups = asyncio.run(asyncio.wait_for(produce(), 60))
    return [ReceivedGroup(item, group) for item, group in zip(items, groups, strict=True)]


def verify(received: ReceivedGroup, version: int = 0) -> None:
    item = received.prepared
    verify_group(
        received.group, item.ticket, item.facts, sender="server-1", version=version, vocabulary=500, components=()
    )


class Started:
    """An engine with its thread, closed at the end of a test."""

    def __init__(self) -> None:
        self.engines: list[HFEngine] = []

    def __call__(self, engine: HFEngine) -> HFEngine:
        asyncio.run(engine.start())
        self.engines.append(engine)
        return engine


@pytest.fixture
def started() -> Any:
    start = Started()
    yield start
    for engine in start.engines:
        asyncio.run(engine.close())


def learner_engine(config: RunConfig) -> TorchEngine:
    engine = TorchEngine(config, config.learner.optim, 1)
    engine.prepare()
    return engine


# --- agreement ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"top_k": 5, "min_p": 0.02}])
def test_engine_and_learner_agree_under_the_runs_own_sampling(
    pair_config: RunConfig, started: Started, sampling: dict[str, float]
) -> None:
    rollout = pair_config.rollout.model_copy(update=sampling)
    config = pair_config.model_copy(update={"rollout": rollout})
    processor = PromptProcessor(config.model)
    items = parity_tickets(config, processor)
    assert [len(item.ticket.prompt.image_hashes) for item in items] == [2, 2], "rows with images come first"
    assert {item.ticket.kind for item in items} == {TicketKind.PARITY}
    received = answer(started(HFEngine(config, processor)), processor, items)
    for one in received:
        verify(one)
    parity = compare(learner_engine(config), processor, received, config.batch.tokens_per_microbatch)
    assert parity.tokens == sum(one.group.token_ids.size for one in received) > 8
    assert parity.mean <= parity.largest < 1e-4


def test_parity_tickets_are_the_same_every_time_and_no_training_tickets(pair_config: RunConfig) -> None:
    processor = PromptProcessor(pair_config.model)
    first, second = (parity_tickets(pair_config, processor) for _ in range(2))
    assert [item.ticket for item in first] == [item.ticket for item in second]
    assert all(item.ticket.ticket_id >= PARITY_IDS and not item.is_training for item in first)


# --- faults: images ---------------------------------------------------------------------------------


def test_images_in_the_wrong_order_are_caught_by_the_hashes_of_what_was_encoded(
    pair_config: RunConfig, started: Started
) -> None:
    """Both have one size: ids and grids are right, and the ticket's own hashes would be, too."""

    def swapped(blobs: Blobs) -> Blobs:
        return dict(zip(blobs, reversed(blobs.values()), strict=True))

    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(started(HFEngine(pair_config, processor)), PromptProcessor(pair_config.model), items, swapped)
    assert np.array_equal(received[0].group.prompt_ids, items[0].facts.token_ids)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:1 from server-1: the images are in another order"):
        verify(received[0])


class DropsAnImage(PromptProcessor):
    def encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        (message,) = prompt.messages
        first = next(i for i, part in enumerate(message.content) if part.type == "image")
        rest = message.model_copy(update={"content": (*message.content[:first], *message.content[first + 1 :])})
        update = {"messages": (rest,), "image_hashes": prompt.image_hashes[1:]}
        return super().encode(prompt.model_copy(update=update), blobs)


def test_a_wrong_count_of_images_is_caught(pair_config: RunConfig, started: Started) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(started(HFEngine(pair_config, processor)), DropsAnImage(pair_config.model), items)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:1 .* saw 1 image\(s\), the prompt has 2"):
        verify(received[0])


def test_a_wrong_size_of_an_image_is_caught_by_its_grid(pair_config: RunConfig, started: Started) -> None:
    """A server that got past the handshake, and scales its images down."""
    processor, theirs = PromptProcessor(pair_config.model), PromptProcessor(pair_config.model)
    theirs.processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}
    items = parity_tickets(pair_config, processor)
    received = answer(started(HFEngine(pair_config, processor)), theirs, items)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:1 .* image grids .* \[1, 4, 4\].* against .*\[1, 8, 8\]"):
        verify(received[0])


def test_other_bytes_under_the_same_name_are_caught(pair_config: RunConfig, started: Started) -> None:
    other = png((56, 56), 99)
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(
        started(HFEngine(pair_config, processor)),
        PromptProcessor(pair_config.model),
        items,
        lambda blobs: {**blobs, next(iter(blobs)): other},
    )
    with pytest.raises(ProtocolError, match=f"image 0 has other bytes: their hash is {content_hash(other)[:12]}"):
        verify(received[0])


def test_images_travel_once_and_only_with_the_ticket(pair_config: RunConfig, started: Started, tmp_path: Path) -> None:
    """The same image twice in a row is one blob; a group carries hashes and no blob."""
    write_rows(tmp_path, [{"prompt": "<image><image>?", "images": ["0.png", "0.png"]}])
    processor = PromptProcessor(pair_config.model)
    (item,) = parity_tickets(pair_config, processor)
    assert len(item.ticket.prompt.image_hashes) == 2
    assert list(item.blobs) == [item.ticket.prompt.image_hashes[0]]
    (received,) = answer(started(HFEngine(pair_config, processor)), processor, [item])
    verify(received)
    largest = max(memoryview(frame).nbytes for frame in encode(received.group)[1:])
    assert largest < len(item.blobs[item.ticket.prompt.image_hashes[0]])


# --- faults: processor settings ---------------------------------------------------------------------

PROCESSOR_CHANGES: dict[str, Any] = {
    "size": {"shortest_edge": 784, "longest_edge": 50_000},
    "patch_size": 14,
    "merge_size": 1,
    "temporal_patch_size": 1,
    "resample": 2,
    "rescale_factor": 1 / 127,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_rescale": False,
    "do_normalize": False,
    "do_resize": False,
    "do_convert_rgb": False,
}


def fingerprint_problem(mine: PromptProcessor, theirs: PromptProcessor) -> Refusal | None:
    hello = content.hello("s").model_copy(update={"processor_fingerprint": theirs.fingerprint})
    return check_hello(
        hello, model_fingerprint=content.MODEL, processor_fingerprint=mine.fingerprint, live_server_ids={}
    )


@pytest.mark.parametrize("part", ["image_processor", "video_processor"])
@pytest.mark.parametrize("setting", PROCESSOR_CHANGES)
def test_every_processor_setting_is_in_the_fingerprint(pair_config: RunConfig, part: str, setting: str) -> None:
    mine, theirs = PromptProcessor(pair_config.model), PromptProcessor(pair_config.model)
    assert fingerprint_problem(mine, theirs) is None
    assert getattr(getattr(theirs.processor, part), setting) != PROCESSOR_CHANGES[setting]
    setattr(getattr(theirs.processor, part), setting, PROCESSOR_CHANGES[setting])
    refusal = fingerprint_problem(mine, theirs)
    assert refusal is not None
    assert refusal.code is ErrorCode.PROCESSOR_MISMATCH


def _other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def _edited(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content_ = json.loads((folder / name).read_text())
        change(content_)
        (folder / name).write_text(json.dumps(content_))

    return edit


def _added_token(tokenizer: dict[str, Any]) -> None:
    last = tokenizer["added_tokens"][-1]
    number = max(tokenizer["model"]["vocab"].values()) + 1
    tokenizer["added_tokens"].append({**last, "id": max(number, last["id"] + 1), "content": "<|new|>"})


FOLDER_CHANGES: dict[str, Callable[[Path], None]] = {
    "chat template": _other_template,
    "added token": _edited("tokenizer.json", _added_token),
    "normaliser": _edited("tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"})),
    "special token": _edited("tokenizer_config.json", lambda t: t.update(pad_token="<|vision_pad|>")),
}


@pytest.mark.parametrize("name", FOLDER_CHANGES)
def test_tokenizer_and_template_are_in_the_fingerprint(pair_config: RunConfig, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "other"
    shutil.copytree(pair_config.model.path, folder)
    mine = PromptProcessor(pair_config.model)
    other = pair_config.model.model_copy(update={"path": str(folder)})
    assert fingerprint_problem(mine, PromptProcessor(other)) is None, "the folder's own name does not matter"
    FOLDER_CHANGES[name](folder)
    assert fingerprint_problem(mine, PromptProcessor(other)) is not None


def test_other_pixels_behind_an_equal_fingerprint_fail_the_parity_check(
    pair_config: RunConfig, started: Started
) -> None:
    """Ids, grids and hashes are right: only the log-probs show it."""
    processor, theirs = PromptProcessor(pair_config.model), PromptProcessor(pair_config.model)
    theirs.processor.image_processor.image_mean = [0.0, 0.0, 0.0]
    received = answer(
        started(HFEngine(pair_config, processor)), theirs, items := parity_tickets(pair_config, processor)
    )
    assert len(items) == 2
    for one in received:
        verify(one)
    assert compare(learner_engine(pair_config), processor, received, 512).largest > pair_config.max_logprob_difference


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
    pair_config: RunConfig, started: Started, caplog: pytest.LogCaptureFixture, engine_class: type[HFEngine]
) -> None:
    stale = engine_class is KeepsOldFeatures
    processor, limit = PromptProcessor(pair_config.model), pair_config.max_logprob_difference
    items = parity_tickets(pair_config, processor)
    engine, learner = started(engine_class(pair_config, processor)), learner_engine(pair_config)
    before = compare(learner, processor, answer(engine, processor, items), 512)
    assert before.largest < limit, "as the server joins, nothing is stale"

    weights = with_other_vision_tower(learner)
    load_published(learner.model, weights)
    asyncio.run(engine.update_weights(1, weights))
    received = answer(engine, processor, items)
    for one in received:
        verify(one, version=1)  # ids, grids and hashes cannot show it
    after = compare(learner, processor, received, 512)
    assert (after.largest > limit) == stale

    values = LearnerStep(learner, pair_config)(make_batch(received, processor), version=1)
    nothing: Any = None
    ParityJudge(pair_config, nothing, learner, processor, nothing).watch(1, values)
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


def test_text_that_is_tokenised_again_is_refused_by_row(pair_config: RunConfig, started: Started) -> None:
    processor = PromptProcessor(pair_config.model)
    items = [
        dataclasses.replace(item, ticket=item.ticket.model_copy(update={"group_size": 64}))
        for item in parity_tickets(pair_config, processor)
    ]
    received = answer(started(TokenisesAgain(pair_config, processor)), processor, items)
    caught = r"row rows.jsonl:\d from server-1: completion \d+ (ended by|was cut at)"
    for one in received:
        with pytest.raises(ProtocolError, match=caught):
            verify(one)


def test_text_that_is_tokenised_again_to_the_same_length_fails_the_parity_check(
    pair_config: RunConfig, started: Started
) -> None:
    """One id has become another of the same text, which no look at a sample shows."""
    processor = PromptProcessor(pair_config.model)
    received = answer(started(HFEngine(pair_config, processor)), processor, parity_tickets(pair_config, processor))
    group = received[1].group
    ids = group.token_ids.copy()
    ids[2] = 7 if ids[2] != 7 else 8
    changed = [received[0], dataclasses.replace(received[1], group=group.model_copy(update={"token_ids": ids}))]
    verify(changed[1])
    parity = compare(learner_engine(pair_config), processor, changed, 512)
    assert parity.largest > pair_config.max_logprob_difference
    assert "row rows.jsonl:2 (completion 0), token" in parity.worst


# --- who gets work ----------------------------------------------------------------------------------


class FakeConnections:
    """Servers that take everything."""

    def __init__(self, *names: str):
        self.servers = {name: ServerState(content.hello(name), name.encode()) for name in names}
        self.manifest: Any = None
        self.sent: list[tuple[str, Any]] = []
        self.errors: list[str] = []

    def send(self, server_id: str, message: Any) -> bool:
        self.sent.append((server_id, message))
        return True

    def count_error(self, kind: str) -> None:
        self.errors.append(kind)

    def publish(self, version: int) -> None:
        self.manifest = type("Manifest", (), {"version": version})

    def tickets_of(self, server_id: str) -> list[Any]:
        return [t for name, m in self.sent if name == server_id and isinstance(m, Tickets) for t in m.tickets]

    def refusals(self) -> list[Refusal]:
        return [message for _, message in self.sent if isinstance(message, Refusal)]


@pytest.fixture
def items() -> list[PreparedTicket]:
    return [write_ticket(TicketSlot(number, number, version=0, bound=0)) for number in range(2)]


def empty_ledger() -> TicketLedger:
    return TicketLedger(Journal(None), prompts_per_step=1, bound=0, total_groups=1)


def alignment_of(
    connections: FakeConnections,
    items: Sequence[PreparedTicket],
    deadline_s: float = 60.0,
    ledger: TicketLedger | None = None,
) -> Alignment:

    def check(group: Group, ticket: Any, facts: Any, **_: Any) -> None:
        if not content.is_right(group.model_copy(update={"ticket_id": ticket.seed})):
            raise ProtocolError(ErrorCode.REFUSED_GROUP, f"row {ticket.prompt.row_id}: wrong")

    ledger = ledger or empty_ledger()
    return Alignment(cast(Any, connections), ledger, items, check, limits=Limits(), deadline_s=deadline_s)


def send_back(alignment: Alignment, connections: FakeConnections, server_id: str, version: int) -> None:
    for ticket in connections.tickets_of(server_id)[-2:]:
        right = content.group(ticket.seed, version, server_id)
        assert alignment.awaits(server_id, ticket.ticket_id)
        alignment.accept(server_id, right.model_copy(update={"ticket_id": ticket.ticket_id}), version)


def test_a_server_gets_work_only_when_its_parity_groups_are_accepted(items: list[PreparedTicket]) -> None:
    connections = FakeConnections("a")
    alignment = alignment_of(connections, items)
    alignment.work()
    assert not connections.sent, "nothing is published yet"
    connections.publish(3)
    alignment.work()
    alignment.work()
    sent = connections.tickets_of("a")
    assert [ticket.min_version for ticket in sent] == [3, 3]
    assert min(ticket.ticket_id for ticket in sent) >= PARITY_IDS
    assert alignment.holds_step is None, "a server that has no weights yet takes its time"
    connections.servers["a"].loaded = WeightsLoaded(version=3, channel="shm", transfer_s=0, load_s=0)
    assert alignment.holds_step == "a"
    assert not alignment.awaits("b", sent[0].ticket_id), "another server's"
    assert not alignment.take_complete()
    send_back(alignment, connections, "a", 3)
    assert sum(isinstance(message, Ack) for _, message in connections.sent) == 2
    (check,) = alignment.take_complete()
    assert alignment.holds_step == "a"
    assert not connections.servers["a"].aligned
    alignment.accept_server(check)
    assert connections.servers["a"].aligned
    assert alignment.holds_step is None


def test_groups_of_an_older_version_are_asked_for_again(items: list[PreparedTicket]) -> None:
    connections = FakeConnections("a")
    alignment = alignment_of(connections, items)
    connections.publish(0)
    alignment.work()
    send_back(alignment, connections, "a", 0)
    (check,) = alignment.take_complete()
    connections.publish(1)
    alignment.repeat(check)
    tickets = connections.tickets_of("a")
    assert [ticket.min_version for ticket in tickets] == [0, 0, 1, 1]
    assert len({ticket.ticket_id for ticket in tickets}) == 4
    assert [t.seed for t in tickets[2:]] == [t.seed for t in tickets[:2]]


def test_a_reconnection_is_not_checked_again_and_a_new_process_is(items: list[PreparedTicket]) -> None:
    connections = FakeConnections("a")
    alignment = alignment_of(connections, items)
    connections.publish(0)
    alignment.work()
    send_back(alignment, connections, "a", 0)
    alignment.accept_server(alignment.take_complete()[0])
    for session, aligned in (("session-of-a", True), ("another", False)):
        hello = content.hello("a").model_copy(update={"session": session})
        connections.servers["a"] = ServerState(hello, b"new connection")
        alignment.work()
        assert connections.servers["a"].aligned is aligned


def test_a_server_that_still_holds_tickets_is_checked_when_they_are_done(items: list[PreparedTicket]) -> None:
    """Beside them, the parity rows would move the last bits of a training group."""
    connections, ledger = FakeConnections("a"), empty_ledger()
    alignment = alignment_of(connections, items, ledger=ledger)
    connections.publish(0)
    ledger.issue([write_ticket(slot) for slot in ledger.admissible(0)])
    ledger.out.assign([0], "a")
    alignment.work()
    assert not connections.sent
    ledger.out.lose_server("a")
    alignment.work()
    assert len(connections.tickets_of("a")) == 2


def _mismatch(alignment: Alignment, connections: FakeConnections) -> None:
    send_back(alignment, connections, "a", 0)
    alignment.refuse(alignment.take_complete()[0], "they differ by 0.5 nats", "mend it")


def _wrong_group(alignment: Alignment, connections: FakeConnections) -> None:
    ticket = connections.tickets_of("a")[0]
    wrong = content.group(17, 0, "a").model_copy(update={"ticket_id": ticket.ticket_id})
    alignment.accept("a", wrong, 0)


def _three_failures(alignment: Alignment, connections: FakeConnections) -> None:
    for _ in range(3):
        ticket = connections.tickets_of("a")[-1]
        alignment.fail("a", TicketFailed(ticket_id=ticket.ticket_id, error_kind="Broken", error_message="no memory"))


def _silence(alignment: Alignment, connections: FakeConnections) -> None:
    alignment._looked_at -= 10.0
    alignment.work()


REFUSALS: dict[str, tuple[Callable[[Alignment, FakeConnections], None], str]] = {
    "other log-probs": (_mismatch, "they differ by 0.5 nats"),
    "a wrong group": (_wrong_group, "row fuzz:0: wrong"),
    "failures": (_three_failures, "row fuzz:1 from a failed 3 times: Broken: no memory"),
    "silence": (_silence, "it has not answered its parity tickets for 1 s"),
}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_server_that_fails_is_refused_and_the_only_one_ends_the_run(
    items: list[PreparedTicket], name: str, alone: bool
) -> None:
    connections = FakeConnections("a") if alone else FakeConnections("a", "b")
    alignment = alignment_of(connections, items, deadline_s=1.0)
    connections.publish(0)
    alignment.work()
    if not alone:
        send_back(alignment, connections, "b", 0)
    fails, says = REFUSALS[name]
    if alone:
        with pytest.raises(BadStateError, match=f"server 'a' is refused: {says}.*No other rollout server is connected"):
            fails(alignment, connections)
    else:
        fails(alignment, connections)
    (refusal,) = connections.refusals()
    assert refusal.code is ErrorCode.PARITY
    assert says in refusal.reason
    assert connections.servers["a"].refused
    assert connections.errors == ["parity"]
    alignment.work()
    assert not connections.servers["a"].aligned, "it is not asked again"


def test_without_rows_every_server_is_aligned() -> None:
    connections = FakeConnections("a")
    alignment_of(connections, []).work()
    assert connections.servers["a"].aligned


class SaysWhatItIsTold:
    """The exchange as the judge sees it."""

    def __init__(self, *checks: Any):
        self.alignment = self
        self.checks = list(checks)
        self.said: list[tuple[str, ...]] = []

    def take_complete(self) -> list[Any]:
        return self.checks

    def parity(self, server_id: str, largest: float, mean: float) -> None:
        self.said.append(("recorded", server_id))

    def accept_server(self, check: Any) -> None:
        self.said.append(("accepted", check.server_id))

    def repeat_parity(self, check: Any) -> None:
        self.said.append(("repeated", check.server_id))

    def refuse_server(self, check: Any, reason: str, fix: str) -> None:
        self.said.append(("refused", check.server_id, reason, fix))


def test_the_judge_accepts_refuses_with_the_numbers_and_repeats(pair_config: RunConfig, started: Started) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(started(HFEngine(pair_config, processor)), processor, items)

    def check(name: str, groups: Sequence[ReceivedGroup]) -> Any:
        found = {one.ticket.ticket_id: one for one in groups}
        return type("Check", (), {"server_id": name, "groups": found, "tickets": found})

    logprobs = received[1].group.logprobs.copy()
    logprobs[1] -= 0.25
    wrong = dataclasses.replace(received[1], group=received[1].group.model_copy(update={"logprobs": logprobs}))
    exchange: Any = SaysWhatItIsTold(check("good", received), check("bad", [received[0], wrong]))
    judge = ParityJudge(pair_config, cast(Exchange, exchange), learner_engine(pair_config), processor, exchange)
    judge.judge(version=0)
    assert exchange.said[:3] == [("recorded", "good"), ("accepted", "good"), ("recorded", "bad")]
    kind, server, reason, fix = exchange.said[3]
    assert (kind, server) == ("refused", "bad")
    assert "differ by at most 0.25 nats" in reason
    assert "on average" in reason
    assert "0.001 is accepted (alignment.max_logprob_difference)" in reason
    assert "Largest at row rows.jsonl:2 (completion 0), token 1 (" in reason
    assert "stale prefix or encoder cache" in fix
    judge.judge(version=1)
    assert exchange.said[4:] == [("repeated", "good"), ("repeated", "bad")]


def test_a_truncated_completion_of_full_length_is_fine(pair_config: RunConfig, started: Started) -> None:
    processor = PromptProcessor(pair_config.model)
    items = parity_tickets(pair_config, processor)
    received = answer(started(HFEngine(pair_config, processor)), processor, items)
    reasons = {record.finish_reason for one in received for record in one.group.trajectories}
    assert FinishReason.LENGTH in reasons
    for one in received:
        verify(one)


# --- two processes ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_only_server_is_misaligned_stops_with_the_numbers(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = write_config(with_ports(small(make_config)), run)
    services = [start("learner", file), start("tests.misaligned_server", file)]
    try:
        assert [service.wait(timeout=120) for service in services] == [3, 2], logs(run)
    finally:
        for service in services:
            service.kill()
    for said in (failure_of(run).reason, (run / "tests.misaligned_server.log").read_text()):
        assert "differ by at most 0.01 nats, 0.01 on average" in said
        assert "row rl.parquet:" in said
    assert "is aligned" not in (run / "learner.log").read_text()


@pytest.mark.slow
def test_a_late_misaligned_server_is_refused_and_a_late_good_one_is_not(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = with_ports(
        make_config(learner={"max_staleness": 1}, trainer={"max_steps": 100_000, "samples_per_step": 0})
    )
    file = write_config(config, run)
    telemetry = config.telemetry.model_copy(update={"rollout_port": 0})
    other = write_config(config.model_copy(update={"telemetry": telemetry}), tmp_path / "other")
    learner, good = start("learner", file), start("rollout_server", file)
    services = [learner, good]
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists(), "the first step", run)
        services.append(bad := start("tests.misaligned_server", other))
        assert bad.wait(timeout=60) == 2, logs(tmp_path / "other")
        assert "the learner refuses this server" in (tmp_path / "other" / "tests.misaligned_server.log").read_text()
        services.append(late := start("rollout_server", other))
        learner_log = run / "learner.log"
        wait_until(lambda: learner_log.read_text().count("is aligned") == 2, "the good one", run)
        steps = len((run / "metrics.jsonl").read_bytes().splitlines())
        wait_until(lambda: len((run / "metrics.jsonl").read_bytes().splitlines()) > steps + 5, "5 more steps", run)
        endpoint = f"http://127.0.0.1:{config.telemetry.learner_port}/metrics"
        with urllib.request.urlopen(endpoint, timeout=5) as answer:
            metrics = answer.read().decode()
        largest = [line.split() for line in metrics.splitlines() if line.startswith("asyncrl_learner_parity_max{")]
        assert sum(float(value) > 0.009 for _, value in largest) == 1
        assert sum(float(value) < 1e-4 for _, value in largest) == 2
        learner.terminate()
        assert [service.wait(timeout=60) for service in (learner, good, late)] == [130, 0, 0], logs(run)
    finally:
        for service in services:
            service.kill()


@pytest.mark.parametrize("verdict", ["accept_server", "refuse", "repeat"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_verdict_on_a_server_that_has_gone_meanwhile_is_about_nobody(
    items: list[PreparedTicket], verdict: str, comes_back: bool
) -> None:
    """It died while the learner compared its log-probs; what comes back in a new session has a check of its own."""
    connections = FakeConnections("a", "b")
    alignment = alignment_of(connections, items)
    connections.publish(0)
    alignment.work()
    send_back(alignment, connections, "a", 0)
    (check,) = alignment.take_complete()
    del connections.servers["a"]
    alignment.work()
    if comes_back:
        hello = content.hello("a").model_copy(update={"session": "new"})
        connections.servers["a"] = ServerState(hello, b"x")
        alignment.work()
    sent = len(connections.tickets_of("a"))
    getattr(alignment, verdict)(check, *(("reason", "fix") if verdict == "refuse" else ()))
    alignment.work()
    assert len(connections.tickets_of("a")) == sent
    assert not check.server.aligned
    assert not any(server.aligned or server.refused for name, server in connections.servers.items() if name == "a")
