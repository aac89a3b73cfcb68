"""Videos as lists of frames: the same tokens, positions and log-probs on both sides, for every family."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.models.loading import load_model
from asyncrl.models.sampling_distribution import gather_logprobs, sampling_logprobs
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.model_inputs import prompt_positions
from asyncrl.processing.processor import PromptProcessor
from asyncrl.telemetry.jsonl import read_lines
from learner.loop.logprob_parity import compare
from learner.tickets.ticket_writer import TicketWriter
from protocol.codec import Limits, decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Group, Prompt
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import answer, learner_engine, parity_tickets, verify
from tests.rigs.plain_accuracy import plain_accuracy
from tests.rigs.small_runs import logs, small
from tests.rigs.tiny_families import Family, make_family
from tests.rigs.two_processes import run_both
from tests.system.test_bad_input import png, write_rows

MakeConfig = Callable[..., RunConfig]
FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CPU = torch.device("cpu")
SIZE = (42, 56)
"""Height and width of a frame: 3 x 4 tokens."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen2_5_vl", tmp_path_factory.mktemp("one"))


def frames(folder: Path, count: int, seed: int) -> list[str]:
    names = [f"{seed}-{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(png(SIZE, 1000 * seed + number))
    return names


def mixed_rows(folder: Path) -> list[dict[str, Any]]:
    """Two videos around an image, a video alone (an odd number of frames), an image alone, nothing."""
    (folder / "image.png").write_bytes(png((42, 42), 7))
    return [
        {
            "prompt": "<video> or <image> or <video>?",
            "images": ["image.png"],
            "videos": [frames(folder, 4, 1), frames(folder, 6, 2)],
        },
        {"prompt": "What is it?", "videos": [frames(folder, 3, 3)]},
        {"prompt": "What is it?", "images": ["image.png"]},
        {"prompt": "What is it?"},
    ]


def video_config(make_config: MakeConfig, model: Path, folder: Path, **data: Any) -> RunConfig:
    written = write_rows(folder, mixed_rows(folder))
    return make_config(
        model={"path": str(model)},
        data={**written, "val_files": [], "max_prompt_length": 300, "shuffle": False, **data},
        batch={"tokens_per_microbatch": 2048, "prompts_per_step": 2},
        rollout={"temperature": 0.8},
        alignment={"rows": 4},
    )


def rendered_rows(config: RunConfig) -> list[RenderedPrompt]:
    train = TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,)).train
    return [train.render(index) for index in range(len(train.rows))]


# --- both sides -----------------------------------------------------------------------------------


def test_engine_learner_and_transformers_agree_on_videos_images_and_text_in_one_batch(
    make_config: MakeConfig, family: Path, tmp_path: Path
) -> None:
    """transformers, which gets each prompt by itself, makes its own positions from the processor's output."""
    config = video_config(make_config, family, tmp_path)
    processor = PromptProcessor(config.model)
    items = parity_tickets(config, processor)
    order = [item.ticket.prompt.row_id for item in items]
    assert order == ["rows.jsonl:0", "rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    received = answer(HFEngine(config, processor), processor, items)
    model: Any = load_model(config.model, device=CPU).eval()
    banned = torch.tensor(processor.placeholder_ids)
    for one in received:
        verify(one)
        prompt, group = processor.encode(one.prepared.ticket.prompt, one.prepared.blobs), one.group
        for ids, sampled in zip(
            *(np.split(c, group.lengths[:1]) for c in (group.token_ids, group.logprobs)), strict=True
        ):
            with torch.no_grad():
                logits = model(**plain_inputs(prompt, ids)).logits[0, len(prompt.token_ids) - 1 : -1]
            logprobs = sampling_logprobs(logits, temperature=0.8, banned=banned)
            expected = gather_logprobs(logprobs, torch.from_numpy(ids).long()).numpy()
            np.testing.assert_allclose(sampled, expected, atol=1e-4)
    parity = compare(learner_engine(config), processor, received, config.batch.microbatch_tokens)
    assert parity.largest < 1e-4, parity
    assert parity.token_ids.size > 40


def plain_inputs(prompt: EncodedPrompt, completion: np.ndarray) -> dict[str, Any]:
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, completion])).long()[None]
    types = torch.from_numpy(np.concatenate([prompt.token_types, np.zeros_like(completion)])).long()[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.pixel_values is not None:
        inputs |= {"pixel_values": prompt.pixel_values, "image_grid_thw": torch.from_numpy(prompt.image_grids).long()}
    if prompt.video_pixel_values is not None:
        inputs["pixel_values_videos"] = prompt.video_pixel_values
        inputs["video_grid_thw"] = torch.from_numpy(prompt.video_grids).long()
        if prompt.seconds_per_grid:
            inputs["second_per_grid_ts"] = torch.tensor(prompt.seconds_per_grid)
    return {**inputs, "mm_token_type_ids": types} if len(inputs) > 2 else inputs


@pytest.mark.parametrize(("name", "interval"), [("qwen2_vl", 1), ("qwen2_5_vl", 4)])
def test_text_goes_on_after_the_last_moment_of_a_video(
    make_config: MakeConfig, name: Family, interval: int, tmp_path: Path
) -> None:
    """Positions counted by hand. transformers 5.19 goes on 4 after the video's beginning (a frame is 3 x 4 tokens)."""
    config = video_config(make_config, make_family(name, tmp_path / "model"), tmp_path)
    write_rows(tmp_path, [{"prompt": "a<video>b", "videos": [frames(tmp_path, 12, 1)]}])
    (rendered,) = rendered_rows(config)
    encoded = PromptProcessor(config.model).encode(rendered.prompt, rendered.blobs)
    assert encoded.video_grids.tolist() == [[6, 6, 8]]
    first, last = np.flatnonzero(encoded.token_types == 2)[[0, -1]]
    place, following = prompt_positions(load_model(config.model, device=CPU), encoded)
    assert place[:, last].tolist() == [first + 5 * interval, first + 2, first + 3]
    after = first + max(5 * interval, 3) + 1
    tail = len(encoded.token_ids) - last - 1
    assert place[:, last + 1 :].tolist() == [list(range(after, after + tail))] * 3
    assert following == after + tail


def test_frames_per_second_move_the_positions_or_the_timestamps(
    make_config: MakeConfig, family: Path, tmp_path: Path
) -> None:
    """Qwen2-VL takes no notice, Qwen2.5-VL spaces the positions, Qwen3-VL writes the seconds."""
    seen = []
    for fps in (0.5, 4.0):
        config = video_config(make_config, family, tmp_path, video_fps=fps)
        processor = PromptProcessor(config.model)
        rendered = rendered_rows(config)[1]
        encoded = processor.encode(rendered.prompt, rendered.blobs)
        model = load_model(config.model, device=CPU)
        seen.append((encoded.token_ids.tolist(), prompt_positions(model, encoded)[0].tolist()))
    slow, fast = seen
    ids_move, positions_move = slow[0] != fast[0], slow[1] != fast[1]
    expected = {"qwen2_vl": (False, False), "qwen2_5_vl": (False, True), "qwen3_vl": (True, False)}
    assert (ids_move, positions_move) == expected[processor.family]


# --- faults -----------------------------------------------------------------------------------------


class FewerFrames(PromptProcessor):
    def encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        videos = tuple(v.model_copy(update={"frame_hashes": v.frame_hashes[:-1]}) for v in prompt.videos)
        return super().encode(prompt.model_copy(update={"videos": videos}), blobs)


def test_frames_in_the_wrong_order_or_number_are_caught_by_row(
    make_config: MakeConfig, one_family: Path, tmp_path: Path
) -> None:
    """An odd number of frames is filled up: with one less the ids and grids are right."""
    config = video_config(make_config, one_family, tmp_path)
    processor = PromptProcessor(config.model)
    items = parity_tickets(config, processor)[:1]
    engine = HFEngine(config, processor)

    def reversed_frames(blobs: Mapping[str, bytes]) -> dict[str, bytes]:
        digests = items[0].ticket.prompt.videos[1].frame_hashes
        return {**blobs, **dict(zip(digests, (blobs[d] for d in reversed(digests)), strict=True))}

    wrong_order = answer(engine, PromptProcessor(config.model), items, reversed_frames)[0]
    assert np.array_equal(wrong_order.group.prompt_ids, items[0].measured.token_ids)
    with pytest.raises(
        ProtocolError, match=r"row rows.jsonl:0 .* video 1 has other frames, or the same in another order"
    ):
        verify(wrong_order)
    fewer = answer(engine, FewerFrames(config.model), items)[0]
    assert np.array_equal(fewer.group.prompt_ids, items[0].measured.token_ids)
    with pytest.raises(ProtocolError, match=r"row rows.jsonl:0 .* video 0 has other frames"):
        verify(fewer)


def test_a_missing_video_and_other_grids_are_caught_by_row(
    make_config: MakeConfig, one_family: Path, tmp_path: Path
) -> None:
    config = video_config(make_config, one_family, tmp_path)
    processor = PromptProcessor(config.model)
    items = parity_tickets(config, processor)[:1]
    good = answer(HFEngine(config, processor), processor, items)[0]
    again = decode(encode(good.group), (Group,), Limits())
    assert isinstance(again, Group)
    assert again.video_grids is not None
    assert again.video_grids.tolist() == good.group.video_grids.tolist()  # type: ignore[union-attr]

    def refused(says: str, **changes: Any) -> None:
        with pytest.raises(ProtocolError, match=f"row rows.jsonl:0 .*{says}"):
            verify(dataclasses.replace(good, group=again.model_copy(update=changes)))

    refused(r"saw 0 video\(s\), the prompt has 2", video_grids=None, video_hashes=())
    refused("video grids differ", video_grids=again.video_grids + 1)
    with pytest.raises(ValueError, match="video_grids"):
        Group.model_validate({**dict(again), "video_grids": None})


# --- data -------------------------------------------------------------------------------------------


def render(row: Mapping[str, Any], config: RunConfig) -> RenderedPrompt:
    return PromptRenderer(config.data).render({"answer": "", **row}, "d:0")


BAD_VIDEOS: dict[str, tuple[Any, str]] = {
    "a flat list": (["a.mp4", "b.png"], r"row d:0, video 0: str 'a.mp4' is no list. .*\[\[.*ffmpeg"),
    "no frames": ([[]], "row d:0, video 0: it has no frames"),
    "a frame that is no image": ([[b"RIFF....AVI "]], "row d:0, video 0, frame 0: these 12 bytes are no image"),
    "a missing frame": ([["nowhere.png"]], "row d:0, video 0, frame 0: there is no image"),
}


@pytest.mark.parametrize("name", BAD_VIDEOS)
def test_what_is_no_video_is_refused_with_the_fix(
    make_config: MakeConfig, one_family: Path, tmp_path: Path, name: str
) -> None:
    value, says = BAD_VIDEOS[name]
    with pytest.raises(UserError, match=says):
        render({"prompt": "?", "videos": value}, video_config(make_config, one_family, tmp_path))


def test_frames_of_several_sizes_are_refused_by_row(make_config: MakeConfig, one_family: Path, tmp_path: Path) -> None:
    config = video_config(make_config, one_family, tmp_path)
    (tmp_path / "wide.png").write_bytes(png((42, 84), 1))
    rendered = render({"prompt": "?", "videos": [[str(tmp_path / n) for n in ("image.png", "wide.png")]]}, config)
    with pytest.raises(UserError, match="row d:0, video 0: its frames have several sizes: 42 x 42, 84 x 42 pixels"):
        PromptProcessor(config.model).encode(rendered.prompt, rendered.blobs)


def test_a_family_whose_videos_nobody_has_tested_is_refused_by_name(
    make_config: MakeConfig, one_family: Path, tmp_path: Path
) -> None:
    config = video_config(make_config, one_family, tmp_path)
    processor, rendered = PromptProcessor(config.model), rendered_rows(config)[1]
    processor.family = "llava_onevision"
    with pytest.raises(UserError, match=r"row rows.jsonl:1 has 1 video\(s\), but .* family llava_onevision"):
        processor.encode(rendered.prompt, rendered.blobs)
    processor.family = "qwen2_vl"
    processor.processor.video_processor = None
    with pytest.raises(UserError, match="has no video processor"):
        processor.encode(rendered.prompt, rendered.blobs)


# --- two processes ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_videos_trains_verifies_and_evaluates(
    make_config: MakeConfig, one_family: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    base = video_config(make_config, one_family, tmp_path)
    config = small(
        make_config,
        model={"path": str(one_family)},
        data={**base.data.model_dump(mode="json"), "val_files": base.data.train_files},
        batch={"prompts_per_step": 4, "tokens_per_microbatch": 2048},
        trainer={"max_steps": 3, "total_epochs": 3},
        alignment={"rows": 4},
    )
    assert run_both(config, run) == (0, 0), logs(run)
    assert "is aligned" in (run / "learner.log").read_text()
    steps = read_lines(run / "metrics.jsonl")
    assert len(steps) == 3
    assert all(step["logprob_diff_max"] < 1e-4 for step in steps)
    samples = read_lines(run / "samples.jsonl")
    shown = next(sample for sample in samples if sample["row_id"] == "rows.jsonl:0")
    assert len(shown["videos"]) == 2
    assert shown["prompt"] == "<video> or <image> or <video>?"
    assert {path.stem for path in (run / "images").iterdir()} >= {*shown["videos"], *shown["images"]}
    assert len(list((run / "images").iterdir())) == 4, "an image, and the first frame of each video"
    recorded = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert plain_accuracy(config, run / "export") == pytest.approx(recorded["accuracy"], abs=1e-9)
