"""Mistakes of a user or a peer: each gives one clear message, and nothing is half-written."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scripted_engine.engine import ScriptedEngine

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.loading import load_model
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from learner.groups.group_verification import verify_group
from learner.groups.ticket import PreparedTicket
from learner.tickets.ticket_writer import TicketWriter
from protocol.endpoints import SHARED_MEMORY
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    FinishReason,
    Group,
    Ticket,
    TokenSource,
    TrajectoryRecord,
    TrajectoryRole,
    TrajectoryStatus,
)
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine
from rollout_server.production.group_producer import GroupProducer
from tests.rigs.fuzz import content
from tests.rigs.policies import complete_all
from tests.rigs.two_processes import start, with_ports, write_config

ROOT = Path(__file__).parents[2]
MakeConfig = Callable[..., RunConfig]
pytestmark = pytest.mark.usefixtures("one_thread")


def png(size: tuple[int, int] = (32, 32), seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `data` section for these rows."""
    (folder / "good.png").write_bytes(png())
    (folder / "large.png").write_bytes(png((160, 160)))
    (folder / "thin.png").write_bytes(png((2, 2000)))
    (folder / "half.png").write_bytes(png((160, 160))[:500])
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"answer": "x", **row}) + "\n" for row in rows))
    return {"train_files": [str(path)], "val_files": [], "shuffle": False, "max_prompt_length": 40}


def image_rows(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of no, one and three images, which have the first four of `sizes`: height and width in pixels."""
    for number, size in enumerate(sizes):
        (folder / f"{number}.png").write_bytes(png(size, number))
    return [
        {"prompt": "no image"},
        {"prompt": "What is <image> this?", "images": ["0.png"]},
        {"prompt": "<image> or <image>\n\nor <image>?", "images": ["1.png", "2.png", "3.png"]},
    ]


def writer_for(config: RunConfig) -> TicketWriter:
    return TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))


# --- rows ----------------------------------------------------------------------------------------


GOOD_ROW = {"prompt": "What is it?", "images": ["good.png"]}
BAD_ROWS = {
    "missing image": (
        {"prompt": "q", "images": ["god.png"]},
        r"row rows.jsonl:1, image 0: there is no image .*god.png: did you mean .*good.png",
    ),
    "truncated image": (
        {"prompt": "q", "images": ["half.png"]},
        r"row rows.jsonl:1, image 0: the image is damaged .* Replace the file or leave the row out",
    ),
    "thin image": (
        {"prompt": "q", "images": ["thin.png"]},
        r"row rows.jsonl:1, image 0: the processor takes no such image, of 2000 x 2 pixels: absolute aspect ratio",
    ),
    "long text": (
        {"prompt": "word " * 300, "images": []},
        r"row rows.jsonl:1: the prompt has \d+ tokens \(0 of them for images and videos\), over "
        r"data.max_prompt_length = 40\. Raise the limit, or shorten the text$",
    ),
    "large image": (
        {"prompt": "q", "images": ["large.png"]},
        r"row rows.jsonl:1: the prompt has \d+ tokens \((?!0 )\d+ of them for images and videos\), over .*smaller",
    ),
    "image_pad in text": (
        {"prompt": "q <|image_pad|>", "images": []},
        r"row rows.jsonl:1: .*'<\|image_pad\|>'.*<image>",
    ),
    "vision_start": ({"prompt": "<|vision_start|>?", "images": []}, r"row rows.jsonl:1: .*'<\|vision_start\|>'"),
    "template that raises": ({"prompt": "q", "images": [], "shape": 3}, r"row rows.jsonl:1: .*'int' object is not"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_left_out_or_refused_by_name(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    row, expected = BAD_ROWS[name]
    data = write_rows(tmp_path, [{**GOOD_ROW, "shape": [1]}, {"shape": [1], **row}, {**GOOD_ROW, "shape": [2]}])
    data["format_prompt"] = str(tmp_path / "template")
    (tmp_path / "template").write_text("{% for side in shape %}{{ content }}{% endfor %}")
    data["val_files"] = data["train_files"]
    writer = writer_for(make_config(data=data))
    assert (writer.num_train_rows, writer.num_held_out_rows) == (2, 2)
    visited = [writer.write(TicketSlot(i, i, version=0, bound=0)).ticket.prompt.row_id for i in range(4)]
    assert visited == ["rows.jsonl:0", "rows.jsonl:2", "rows.jsonl:0", "rows.jsonl:2"]
    assert writer.write_evaluation(1, version=0).ticket.prompt.row_id == "rows.jsonl:2"
    assert [(bad.source, bad.row_id) for bad in writer.bad_rows] == [
        (s, "rows.jsonl:1") for s in ("training", "held-out")
    ]
    assert re.match(expected, writer.bad_rows[0].reason)
    with pytest.raises(UserError, match=rf"^1 of 3 training rows cannot be used:\n- {expected}"):
        writer_for(make_config(data={**data, "on_bad_row": "stop"}))


# --- processes -------------------------------------------------------------------------------------


def test_a_learner_that_is_refused_ends_with_one_message_and_writes_nothing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = with_ports(make_config(data={"answer_key": "anser"}))
    assert start("learner", write_config(config, tmp_path)).wait(60) == 2
    log = (tmp_path / "learner.log").read_text()
    assert "Traceback" not in log
    assert "has no column 'anser' (data.answer_key). Did you mean" in log[log.index("error: ") :]
    assert not config.run_path.exists()


@pytest.mark.parametrize("key", ["network.control_port", "network.weights_port"])
def test_a_learner_whose_port_is_busy_gives_everything_back(make_config: MakeConfig, key: str) -> None:
    check_busy_port(make_config, key)


def check_busy_port(make_config: MakeConfig, key: str) -> None:
    from learner.service import Learner

    def shared_files() -> set[str]:
        return {path.name for path in SHARED_MEMORY.glob(f"*-{os.getpid()}-*")}

    before = shared_files()
    config = with_ports(make_config(trainer={"max_steps": 0, "total_epochs": 1}, batch={"prompts_per_step": 10}))
    section, _, name = key.partition(".")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        changed = getattr(config, section).model_copy(update={name: other.getsockname()[1]})
        with pytest.raises(UserError, match=key.replace(".", r"\.")):
            Learner(config.model_copy(update={section: changed}))
    assert shared_files() == before
    assert not config.run_path.exists()
    learner = Learner(config)  # the other ports are free again
    try:
        assert learner.progress.total_steps == config.total_steps(64) == 7, "as it was explained"
    finally:
        learner.network.stop("done")
        learner.publication.close()
        learner.exporter.close()


# --- rewards -----------------------------------------------------------------------------------------


REWARD_FAULTS = {
    "raise": (TrajectoryStatus.ERROR, "reward_exception", "reward_faults.py"),
    "sleep": (TrajectoryStatus.TIMED_OUT, "reward_timeout", "reward.timeout_s"),
    "fine": (TrajectoryStatus.FINISHED, "", ""),
}


async def produce(config: RunConfig, ticket: PreparedTicket, processor: PromptProcessor) -> Group:
    engine, rewards = ScriptedEngine(config, processor), RewardScorer(config.reward)
    await rewards.start()
    await engine.start()
    try:
        producer = GroupProducer(engine, rewards, processor, "scripted")
        blobs = {digest: memoryview(data) for digest, data in ticket.blobs.items()}
        (group,) = [group async for group in producer.produce([ticket.ticket], blobs)]
        return group
    finally:
        await rewards.close()
        await engine.close()


@pytest.mark.parametrize("fault", REWARD_FAULTS)
def test_a_failing_reward_is_a_status_and_never_a_zero(make_config: MakeConfig, fault: str) -> None:
    status, kind, message = REWARD_FAULTS[fault]
    function = {"function": f"{ROOT / 'tests' / 'rigs' / 'reward_faults.py'}:fault"}
    config = make_config(
        batch={"group_size": 2},
        data={"max_response_length": 32},
        rollout={"engine": "scripted", "engine_args": {"text": fault}},
        reward={"functions": [function], "timeout_s": 0.5, "workers": 2},
    )
    processor = PromptProcessor(config.model)
    stop = (processor.tokenizer.eos_token_id,)
    item = TicketWriter(config.ticket_settings, processor, stop).write(TicketSlot(0, 0, version=0, bound=0))
    group = asyncio.run(asyncio.wait_for(produce(config, item, processor), 30))
    for record in group.trajectories:
        assert (record.status, record.error_kind) == (status, kind), record.error_message
        assert message in record.error_message
        assert record.reward == (1.0 if fault == "fine" else None)
        assert bool(record.rewards) == (fault == "fine")
    encoded = processor.encode(item.ticket.prompt, item.blobs)
    verify(group, item.ticket, encoded, version=0, vocabulary=len(processor.tokenizer))


# --- groups -------------------------------------------------------------------------------------------


@pytest.fixture
def two_images(make_config: MakeConfig, tmp_path: Path) -> tuple[RunConfig, PromptProcessor, PreparedTicket]:
    """A ticket with two different images of different sizes, issued at version 3."""
    (tmp_path / "small.png").write_bytes(png((32, 32), 1))
    (tmp_path / "wide.png").write_bytes(png((32, 64), 2))
    data = write_rows(tmp_path, [{"prompt": "<image> or <image>?", "images": ["small.png", "wide.png"]}])
    config = make_config(data={**data, "max_prompt_length": 120})
    processor = PromptProcessor(config.model)
    return (
        config,
        processor,
        TicketWriter(config.ticket_settings, processor, (1,)).write(TicketSlot(0, 0, version=3, bound=0)),
    )


def good_group(ticket: Ticket, prompt: EncodedPrompt) -> Group:
    """Completions of three tokens, of version 4."""
    size, stop = ticket.group_size, ticket.sampling.stop_token_ids[0]
    facts = {name: getattr(prompt, name) for name in ("image_grids", "image_hashes")}
    tokens = {"prompt_ids": prompt.token_ids, "token_ids": np.tile(np.asarray([20, 20, stop], np.int32), size)}
    return content.group(ticket.ticket_id, 4, "server-1", [3] * size).model_copy(update=facts | tokens)


def with_value(column: np.ndarray, value: float) -> np.ndarray:
    changed = column.copy()
    changed[1] = value
    return changed


def with_record(group: Group, **changes: Any) -> tuple[TrajectoryRecord, ...]:
    return (group.trajectories[0].model_copy(update=changes), *group.trajectories[1:])


def first_error(group: Group, **changes: Any) -> dict[str, Any]:
    return {"trajectories": with_record(group, status=TrajectoryStatus.ERROR, **changes)}


def rewarded(group: Group, rewards: Mapping[str, float]) -> dict[str, Any]:
    return {"trajectories": with_record(group, rewards=dict(rewards))}


Change = Callable[[Group, PromptProcessor], dict[str, Any]]
LIES: dict[str, tuple[Change, str]] = {
    "images in another order": (
        lambda g, p: {"image_hashes": g.image_hashes[::-1], "image_grids": g.image_grids[::-1]},
        "the images are in another order",
    ),
    "another image": (
        lambda g, p: {"image_hashes": ("0" * 64, g.image_hashes[1])},
        "image 0 has other bytes: their hash is 000000000000",
    ),
    "swapped grids": (lambda g, p: {"image_grids": g.image_grids[::-1]}, "image grids differ"),
    "a completion without its stop token": (
        lambda g, p: {"token_ids": np.full_like(g.token_ids, 20)},
        "completion 0 ended by a stop token, but its last token is 20",
    ),
    "a completion that was cut too early": (
        lambda g, p: {"trajectories": with_record(g, finish_reason=FinishReason.LENGTH)},
        "completion 0 was cut at 3 tokens, before max_new_tokens",
    ),
    "other prompt ids": (lambda g, p: {"prompt_ids": with_value(g.prompt_ids, 7)}, "prompt ids differ from position 1"),
    "a trajectory missing": (
        lambda g, p: {
            "trajectories": g.trajectories[1:],
            "lengths": g.lengths[1:],
            **{name: getattr(g, name)[3:] for name in ("token_ids", "source", "logprobs", "versions")},
        },
        "3 trajectories for a group size of 4",
    ),
    "a token from the past": (
        lambda g, p: {"versions": with_value(g.versions, 2)},
        "versions 2 to 4, .* allows 3 to 5",
    ),
    "versions that fall": (
        lambda g, p: {"versions": with_value(g.versions, 5)},
        "completion 0 has a token of version 5 and then one of version 4: versions within a completion never fall",
    ),
    "a NaN log-prob": (lambda g, p: {"logprobs": with_value(g.logprobs, np.nan)}, "log-prob that is not finite"),
    "an unknown id": (lambda g, p: {"token_ids": with_value(g.token_ids, 10**6)}, "outside the vocabulary"),
    "a sampled image placeholder": (
        lambda g, p: {"token_ids": with_value(g.token_ids, p.image_token_id or 0)},
        "the policy sampled image placeholder ids",
    ),
    "an odd source": (
        lambda g, p: {"source": with_value(g.source, 7)},
        "completion 0 has other sources than 0 inserted",
    ),
    "an observation that nobody gave": (
        lambda g, p: {"source": with_value(g.source, TokenSource.OBSERVATION)},
        "completion 0 has other sources than 0 inserted",
    ),
    "another role": (
        lambda g, p: {"trajectories": with_record(g, role=TrajectoryRole.BASELINE)},
        "trajectory 0 has the role baseline, its ticket asks for train",
    ),
    "a reward of an error": (lambda g, p: first_error(g, error_kind="x"), "trajectory 0 is error with reward 0.0"),
    "no reward": (
        lambda g, p: {"trajectories": with_record(g, reward=None)},
        "trajectory 0 is finished with reward None",
    ),
    "a NaN reward": (lambda g, p: {"trajectories": with_record(g, reward=np.nan)}, "trajectory 0 has reward nan"),
    "another server's name": (lambda g, p: {"server_id": "somebody"}, "it is signed by somebody"),
    "a component too few": (lambda g, p: rewarded(g, {}), "trajectory 0 has the reward components none, here they are"),
    "an unknown component": (
        lambda g, p: rewarded(g, {**g.trajectories[0].rewards, "x\n" * 99: 1.0}),
        "reward components .*x x .*Do both sides have the same reward.functions",
    ),
    "an infinite component": (
        lambda g, p: rewarded(g, dict.fromkeys(g.trajectories[0].rewards, np.inf)),
        "trajectory 0 has a reward component that is not finite",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_group_that_does_not_fit_its_ticket_is_refused(
    two_images: tuple[RunConfig, PromptProcessor, PreparedTicket], name: str
) -> None:
    _, processor, item = two_images
    prompt = processor.encode(item.ticket.prompt, item.blobs)
    good = good_group(item.ticket, prompt)
    vocabulary = len(processor.tokenizer)
    verify(good, item.ticket, prompt, version=5, vocabulary=vocabulary)
    change, expected = LIES[name]
    lie = good.model_copy(update=change(good, processor))
    with pytest.raises(ProtocolError, match=f"row rows.jsonl:0 from server-1: .*{expected}") as caught:
        verify(lie, item.ticket, prompt, like=good, version=5, vocabulary=vocabulary)
    assert caught.value.code is ErrorCode.REFUSED_GROUP


def test_the_limit_of_a_completion_holds_and_what_is_allowed_passes(
    two_images: tuple[RunConfig, PromptProcessor, PreparedTicket],
) -> None:
    _, processor, item = two_images
    prompt = processor.encode(item.ticket.prompt, item.blobs)
    good = good_group(item.ticket, prompt)
    short = item.ticket.model_copy(update={"sampling": item.ticket.sampling.model_copy(update={"max_new_tokens": 2})})
    with pytest.raises(ProtocolError, match="a completion of 3 tokens, over max_new_tokens 2"):
        verify(good, short, prompt, version=5, vocabulary=500)
    # Versions may grow within a completion, and fall from one to the next.
    rising = np.tile(np.array([3, 4, 5], good.versions.dtype), len(good.trajectories))
    verify(good.model_copy(update={"versions": rising}), item.ticket, prompt, version=5, vocabulary=500)


def verify(group: Group, ticket: Ticket, prompt: Any, like: Group | None = None, **facts: int) -> None:
    """As the learner does when server and reward components are those of `like`, by default the group itself."""
    like = like or group
    names = next((record.rewards for record in like.trajectories if record.rewards), {})
    verify_group(group, ticket, prompt, sender=like.server_id, components=tuple(names), **facts)


def test_a_prompt_that_is_known_is_still_judged_by_the_bytes_that_came(
    two_images: tuple[RunConfig, PromptProcessor, PreparedTicket],
) -> None:
    """An image that arrives under the name of another must not pass for it because that one was encoded before."""
    config, _, item = two_images
    processor = PromptProcessor(config.model)
    first = processor.encode(item.ticket.prompt, item.blobs)
    assert processor.encode(item.ticket.prompt, item.blobs) is first
    other = png((28, 28), 77)
    name, *_ = item.blobs
    wrong = processor.encode(item.ticket.prompt, {**item.blobs, name: memoryview(other)})
    assert wrong.image_hashes[0] == content_hash(other) != first.image_hashes[0]
    elsewhere = item.ticket.prompt.model_copy(update={"row_id": "rows.jsonl:9"})
    assert processor.encode(elsewhere, item.blobs).row_id == "rows.jsonl:9", "messages name the row that was asked for"


# --- a model that wants to sample image placeholders ---------------------------------------------------


@pytest.fixture
def image_pad_lover(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model that gives <|image_pad|> nearly all probability, whatever it reads."""
    folder = tmp_path / "lover"
    shutil.copytree(tiny_model, folder)
    image_pad = json.loads((folder / "config.json").read_text())["image_token_id"]
    weights = load_file(folder / "model.safetensors")
    (embed,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    weights[embed][:, 0] = 100.0  # the first feature of every hidden state is now large and positive
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][image_pad, 0] = 100.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def sample(config: RunConfig, request: GenerationRequest, processor: PromptProcessor) -> list[Completion]:
    engine = HFEngine(config, processor)
    await engine.start()
    try:
        return await complete_all(engine, [request])
    finally:
        await engine.close()


@pytest.mark.parametrize("temperature", [5.0, 0.0])
def test_the_engine_never_samples_an_image_placeholder(
    make_config: MakeConfig, image_pad_lover: Path, temperature: float
) -> None:
    config = make_config(model={"path": str(image_pad_lover)}, batch={"group_size": 8})
    processor = PromptProcessor(config.model)
    item = writer_for(config).write(TicketSlot(0, 0, version=0, bound=0))
    prompt = processor.encode(item.ticket.prompt, item.blobs)

    model: Any = load_model(config.model, device=torch.device("cpu"))
    text = torch.from_numpy(prompt.token_ids[prompt.token_types == 0]).long()[None]
    probabilities = model(input_ids=text).logits[0, -1].softmax(-1)
    assert probabilities[processor.image_token_id] > 0.99, "without the ban it would be sampled"

    sampling = item.ticket.sampling.model_copy(update={"temperature": temperature})
    request = GenerationRequest(0, prompt, 8, 1, sampling)
    allowing = replace(request, sampling=sampling.model_copy(update={"banned_token_ids": ()}))
    with pytest.raises(UserError, match=r"ticket 0 allows image placeholder ids \[.*\] to be sampled"):
        asyncio.run(asyncio.wait_for(sample(config, allowing, processor), 60))
    completions = asyncio.run(asyncio.wait_for(sample(config, request, processor), 60))
    assert len(completions) == 8
    for completion in completions:
        assert not np.isin(completion.token_ids, processor.placeholder_ids).any()
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 1e-4).all()
