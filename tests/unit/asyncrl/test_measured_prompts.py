"""A prompt measured without pixels is the prompt that the model's processor makes."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from asyncrl.config.sections import ModelConfig
from asyncrl.data.images import content_hash, decode_image, image_size
from asyncrl.errors import UserError
from asyncrl.processing.image_grids import limit_pixels
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, ImagePart, Prompt, TextPart
from tests.rigs.pictures import picture
from tests.rigs.tiny_families import Family, make_family, make_llava


def prompt_of(*images: bytes) -> tuple[Prompt, dict[str, bytes]]:
    parts = [part for _ in images for part in (TextPart(text="Look: "), ImagePart())]
    hashes = tuple(map(content_hash, images))
    message = ChatMessage(role="user", content=(*parts, TextPart(text="What is it?")))
    prompt = Prompt(row_id="rows:0", messages=(message,), image_hashes=hashes, answer="x")
    return prompt, dict(zip(hashes, images, strict=True))


@pytest.fixture(scope="module", params=get_args(Family))
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PromptProcessor:
    folder = make_family(request.param, tmp_path_factory.mktemp(request.param))
    return PromptProcessor(ModelConfig(path=str(folder)), cache_mib=0)


def test_measuring_equals_the_processors_own_call(processor: PromptProcessor) -> None:
    draw = np.random.default_rng(0)
    sizes = [(1, 1), (1, 150), (3, 3), (14, 14), (200, 150), *map(tuple, draw.integers(1, 160, (12, 2)).tolist())]
    for number in range(len(sizes)):
        prompt, blobs = prompt_of(*(picture(*size) for size in sizes[number : number + 3]))
        whole = processor._encoded_whole(prompt, blobs)
        measured, encoded = processor.measure(prompt, blobs), processor.encode(prompt, blobs)
        for one in (measured, encoded):
            for field in ("token_ids", "token_types", "image_grids", "unexpanded_ids"):
                theirs, ours = getattr(whole, field), getattr(one, field)
                assert (theirs.dtype, theirs.tolist()) == (ours.dtype, ours.tolist()), f"{field} of {sizes[number]}"
            assert one.image_hashes == whole.image_hashes
        assert whole.pixel_values is not None
        assert encoded.pixel_values is not None
        assert torch.equal(encoded.pixel_values, whole.pixel_values)
        assert measured.pixel_values is None


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2"])
def test_measuring_for_llava_equals_the_processors_own_call(
    tmp_path: Path, tower: Literal["siglip", "clip", "dinov2"]
) -> None:
    processor = PromptProcessor(ModelConfig(path=str(make_llava(tmp_path, tower))), cache_mib=0)
    prompt, blobs = prompt_of(picture(100, 30), picture(20, 70))
    whole = processor._encoded_whole(prompt, blobs)
    for one in (processor.measure(prompt, blobs), processor.encode(prompt, blobs)):
        for field in ("token_ids", "token_types", "image_grids"):
            assert getattr(one, field).tolist() == getattr(whole, field).tolist()
    assert whole.image_grids.tolist() == [[1, 4, 4], [1, 4, 4]]
    assert whole.pixel_values is not None
    assert whole.pixel_values.shape == (2, 3, 28, 28)
    assert whole.media_tokens == 32


def test_images_of_an_unknown_family_are_refused_by_its_name(processor: PromptProcessor) -> None:
    """Their placeholders follow other rules: no chat template is to blame."""
    other = copy.copy(processor)
    other.family, other._knows_images = "mllama", False
    prompt, blobs = prompt_of(picture(20, 20))
    with pytest.raises(UserError, match=r"the model is of the family mllama, and nothing installed knows"):
        other.encode(prompt, blobs)


def test_grids_are_those_of_the_image_processor_at_any_size_and_setting(processor: PromptProcessor) -> None:
    real, arithmetic = processor.processor.image_processor, processor._grids
    assert arithmetic is not None
    draw, before = np.random.default_rng(1), (real.patch_size, real.merge_size, real.size)
    try:
        for number in range(60):
            real.patch_size, real.merge_size = [(14, 2), (16, 2), (7, 2), (14, 1)][number % 4]
            least = int(draw.integers(1, 400_000))
            real.size = type(real.size)(shortest_edge=least, longest_edge=int(least * draw.uniform(1.5, 40)))
            width, height = np.exp(draw.uniform(0, np.log(6000), 2)).astype(int).tolist()
            image = torch.empty((3, height, width), dtype=torch.uint8, device="meta")  # shapes alone
            try:
                expected = real([image], return_tensors="pt", input_data_format="channels_first")
            except ValueError as refusal:
                with pytest.raises(ValueError, match=str(refusal)[:30]):
                    arithmetic.grids([(width, height)])
            else:
                assert arithmetic.grids([(width, height)]).tolist() == expected["image_grid_thw"].tolist()
    finally:
        real.patch_size, real.merge_size, real.size = before


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP"])
def test_a_header_tells_the_size_of_the_decoded_image(kind: str) -> None:
    for orientation in range(9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        data = picture(30, 20, kind, **({"exif": exif} if orientation and kind not in ("GIF", "BMP") else {}))
        assert image_size(data, "row") == decode_image(data, "row").size, f"orientation {orientation}"


def test_a_damaged_image_with_an_intact_header_is_measured(processor: PromptProcessor) -> None:
    """No pixel is decoded: that is the survey's work, once, and not the network thread's for every ticket."""
    whole = picture(100, 80)
    prompt, blobs = prompt_of(whole[: len(whole) // 2])
    intact, its_blobs = prompt_of(whole)
    assert (
        processor.measure(prompt, blobs).token_ids.tolist() == processor.measure(intact, its_blobs).token_ids.tolist()
    )


def test_no_lock_is_held_while_pixels_are_computed(processor: PromptProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    original, held = type(processor.processor.image_processor).__call__, []

    def spy(self: object, *args: object, **kwargs: object) -> object:
        held.append(processor._lock.locked())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(processor.processor.image_processor), "__call__", spy)
    processor.encode(*prompt_of(picture(50, 40)))
    assert held == [False]


def test_threads_that_ask_for_one_prompt_at_once_get_one_encoding(
    processor: PromptProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls, begun, may_end = type(processor.processor.image_processor).__call__, [], Event(), Event()

    def slow(self: object, *args: object, **kwargs: object) -> object:
        calls.append(args)
        begun.set()
        assert may_end.wait(10)
        if damaged:
            raise ValueError("damaged")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(processor.processor.image_processor), "__call__", slow)
    for damaged in (False, True):
        asked = prompt_of(picture(51 + damaged, 40))
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(processor.encode, *asked)
            assert begun.wait(10)
            second = threads.submit(processor.encode, *asked)
            time.sleep(0.05)  # it would have begun by now
            may_end.set()
            if damaged:
                assert first.exception() is second.exception() is not None
            else:
                assert first.result() is second.result()
        assert len(calls) == 1
        calls.clear()
        begun.clear()
        may_end.clear()
    assert not processor._begun


def limited(processor: PromptProcessor, **limits: Any) -> PromptProcessor:
    return PromptProcessor(ModelConfig(path=processor.tokenizer.name_or_path, **limits), cache_mib=0)


def test_limits_of_the_configuration_are_those_of_the_image_processor_and_of_measuring(
    processor: PromptProcessor,
) -> None:
    large, small = picture(100, 80), picture(9, 9)
    before = processor.measure(*prompt_of(large, small)).image_grids
    one = limited(processor, min_pixels=1000, max_pixels=2000)
    prompt, blobs = prompt_of(large, small)
    whole, measured = one._encoded_whole(prompt, blobs), one.measure(prompt, blobs)
    assert measured.token_ids.tolist() == whole.token_ids.tolist()
    assert measured.image_grids.tolist() == whole.image_grids.tolist() == [[1, 4, 6], [1, 6, 6]]  # patches of 7 x 7
    assert before.tolist() == [[1, 12, 14], [1, 4, 4]]
    assert one.encode(prompt, blobs).image_grids.tolist() == whole.image_grids.tolist()
    assert limited(processor, max_pixels=2000).measure(prompt, blobs).image_grids.tolist() == [[1, 4, 6], [1, 4, 4]]
    theirs, ours = processor.processor.video_processor, one.processor.video_processor
    assert ours.to_dict() == theirs.to_dict(), "videos are sized by the model folder"


def test_limits_within_which_no_image_can_be_are_refused(processor: PromptProcessor) -> None:
    with pytest.raises(UserError, match=r"^model.max_pixels = 700: .* 784 to 700 pixels.* model.max_pixels=784 or"):
        limited(processor, max_pixels=700)
    with pytest.raises(UserError, match=r"a token stands for 196. Set model.max_pixels=196 or more"):
        limited(processor, min_pixels=1, max_pixels=100)
    with pytest.raises(UserError, match=r"^model.min_pixels = 20000: .* would have 20000 to 12544 pixels"):
        limited(processor, min_pixels=20_000)


@pytest.mark.parametrize("part", [None, "LlavaImageProcessor"])
def test_limits_for_another_image_processor_are_refused(part: str | None) -> None:
    processor = SimpleNamespace(image_processor=type(part, (), {})() if part else None)
    found = f"a {part} that does not resize by them" if part else "no image processor"
    with pytest.raises(UserError, match=f"^model.max_pixels = 900: .*/m has {found}. Leave model.min_"):
        limit_pixels(processor, ModelConfig(path="/m", max_pixels=900))
    limit_pixels(processor, ModelConfig(path="/m"))
