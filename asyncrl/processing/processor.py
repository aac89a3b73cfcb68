"""Processing of a prompt (messages and image bytes) into exact token ids and pixels: the alignment contract.

The model's own processor is the one source of truth. Rollout server and learner run it on the same bytes and
the learner compares: token ids, image grids and image hashes must be equal before a group counts. Pixels are computed
where a model is about to see them; everything else needs no more than the sizes of the images (`measure`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.data.images import content_hash, decode_image, image_size
from asyncrl.environments.episodes import prompt_tools
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import PromptTools
from asyncrl.errors import BadStateError, UserError
from asyncrl.model_files.folder import describe_folder, describe_model, has_eyes, model_folder
from asyncrl.plugins import what_to_install
from asyncrl.processing import torchvision_cpu
from asyncrl.processing.chat_template import ChatTemplate
from asyncrl.processing.completion_ends import CompletionEnds, completion_ends, declared_ends
from asyncrl.processing.encoded_prompt import EncodedPrompt, VideoFrames, media_arguments, video_hash
from asyncrl.processing.image_grids import (
    ImageGrids,
    PatchGrids,
    family_images,
    family_names,
    grids_of,
    limit_pixels,
    named_grids,
)
from asyncrl.processing.reserved_text import ReservedText
from asyncrl.processing.tool_prompt import CallForm, ToolPrompt
from asyncrl.user_functions import shorten
from protocol.messages import Prompt

PLACEHOLDER_ID_NAMES = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_token_index",
    "video_token_index",
    "boi_token_index",
    "eoi_token_index",
)
"""Ids that stand for images or fence them. A policy that samples one makes its own sample untrainable."""
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types whose videos are tested to be the same to engine and learner."""


torchvision_cpu.install()


class PromptProcessor:
    """The model folder's processor and tokenizer, with a bounded cache of encoded prompts."""

    def __init__(self, config: ModelConfig, settings: Mapping[str, Any] | None = None, *, cache_mib: int = 256):
        """`settings`: values for the chat template, `data.chat_template_kwargs` of the run. Raises UserError."""
        from transformers import AutoProcessor, AutoTokenizer

        described = describe_folder(config)
        folder, remote = model_folder(config), config.trust_remote_code
        hf_config = describe_model(folder, trust_remote_code=remote)
        # A text model's tokenizer may name the processor of a relative that sees, whose files it has not (Gemma 3 1B).
        kind = AutoProcessor if has_eyes(described) else AutoTokenizer
        try:
            self.processor: Any = kind.from_pretrained(folder, trust_remote_code=remote)
        except Exception as problem:  # whatever a file that is missing, cut off or of another version leads to
            raise UserError(
                f"the processor in {folder} cannot be loaded ({type(problem).__name__}: {problem}). Copy tokenizer*, "
                "processor_config.json and preprocessor_config.json from the original model again"
            ) from problem
        limit_pixels(self.processor, config)
        self._pixel_limits = config.pixel_limits
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        self.template = ChatTemplate(self.processor, config.template_date, settings)
        self._folder = folder
        self.sees_images = getattr(self.processor, "image_processor", None) is not None
        self.family: str = hf_config.model_type
        self.image_token_id: int | None = getattr(hf_config, "image_token_id", None)
        self.video_token_id: int | None = getattr(hf_config, "video_token_id", None)
        self.placeholder_ids = tuple(sorted(special_token_ids(hf_config, PLACEHOLDER_ID_NAMES)))
        placeholders = tuple(self.tokenizer.convert_ids_to_tokens(list(self.placeholder_ids)))
        self._reserved = ReservedText(placeholders, self.template, self.tokenizer)
        self._calls = CallForm(self.template.render)
        self._tools: ToolPrompt | None = None
        self.shown_tools: PromptTools | None = None
        self._grids = grids_of(self.family, self.processor) if self.sees_images else None
        names = getattr(getattr(self.processor, "image_processor", None), "model_input_names", ())
        self._knows_images = self._grids is not None or "image_grid_thw" in names
        self._lock = threading.Lock()
        """Held by the one thread that uses the tokenizer or the cache; never while pixels of images are computed."""
        self._cache: OrderedDict[str, EncodedPrompt] = OrderedDict()
        self._begun: dict[str, Future[EncodedPrompt]] = {}
        """Prompts that a thread encodes just now: another one that asks for the same waits for it."""
        self._cache_left = cache_mib * 2**20

    @cached_property
    def ends(self) -> CompletionEnds:
        """Tokens that end a completion. Raises UserError where none does."""
        return completion_ends(self.template, self.tokenizer, declared_ends(self._folder, self.tokenizer))

    @property
    def fingerprint(self) -> str:
        """Equal for two processors that turn every prompt into the same ids and pixels.

        Of the tools that prompts tell of, every setting of the tokenizer (added and special tokens, normaliser), of the
        image and video processors (sizes, patches, resampling, rescaling, normalisation, frames), and of the chat
        template. Limits and template settings of this configuration can be read in it.
        """
        described: dict[str, Any] = {
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
            "special_tokens": self.tokenizer.special_tokens_map,
            "chat_template": self.template.source,
        }
        if self.sees_images:
            described["processor"] = self.processor.to_dict()
        named = {f"model.{name}": str(pixels) for name, pixels in self._pixel_limits.items()}
        if settings := self.template.settings:
            described["template_settings"] = settings
            named["data.chat_template_kwargs"] = shorten(json.dumps(settings, sort_keys=True), 48)
        digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]
        if self._tools:
            named["tools"] = self._tools.digest
        return " ".join([digest, *(f"{name}={value}" for name, value in named.items())])

    def show_tools(self, shown: PromptTools | None) -> None:
        """Tell of these tools in every prompt from now on. Raises UserError where the chat template shows none."""
        self.shown_tools = shown if shown and shown.show != "off" else None
        self._tools = (
            ToolPrompt(self.shown_tools, self.template.render, self._reserved.placeholders)
            if self.shown_tools
            else None
        )

    def encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        """Run the processor on a prompt; `blobs` has the encoded bytes of images and frames by content hash.

        Any thread may call it. Raises UserError naming the row when an image is corrupt, the text itself contains
        image placeholders, or the model does not read what is there.
        """
        media = _media_of(prompt, blobs)
        content = prompt.model_dump_json(include={"row_id", "messages", "image_hashes", "videos"})

        def make() -> EncodedPrompt:
            if self._is_measured(prompt):
                return self._with_pixels(self._measured(prompt, media))
            with self._lock:
                return self._encoded_whole(prompt, media)

        return self._cached("".join([content, *map(content_hash, media.values())]), make)

    def _cached(self, content: str, make: Callable[[], EncodedPrompt]) -> EncodedPrompt:
        """Return what was made of this content before, or make it; one thread makes it, and others wait for that."""
        key = hashlib.sha256(content.encode()).hexdigest()
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                return cached
            begun, mine = self._begun.get(key), Future[EncodedPrompt]()
            if begun is None:
                self._begun[key] = mine
        if begun is not None:
            return begun.result()
        try:
            encoded = make()
        except BaseException as error:
            with self._lock:
                del self._begun[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._begun[key]
            self._remember(key, encoded)
        mine.set_result(encoded)
        return encoded

    def pixels(self, images: Sequence[Image]) -> torch.Tensor:
        """[patches, features] of decoded images, as `encode` makes them."""
        if self._grids is not None:
            return self._grids.process(images)[0]
        with self._lock:
            return self.processor.image_processor(images=images, return_tensors="pt")["pixel_values"]

    def measure(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        """`encode` without pixels, of which none is decoded where `ImageGrids` knows the processor.

        Videos, and images of other processors, are decoded. Any thread may call it. Raises as `encode` does, but not
        for images that are damaged behind an intact header.
        """
        if self._is_measured(prompt):
            return self._measured(prompt, _media_of(prompt, blobs))
        return self.encode(prompt, blobs).without_pixels()

    def _is_measured(self, prompt: Prompt) -> bool:
        """True where the sizes of the images tell their tokens."""
        return self._grids is not None and bool(prompt.image_hashes) and not prompt.videos

    def _measured(self, prompt: Prompt, media: Mapping[str, bytes]) -> EncodedPrompt:
        self._check_media(prompt)
        self._reserved.check(prompt)
        return self._expanded(self.render(prompt), [media[name] for name in prompt.image_hashes], prompt.row_id)

    def _expanded(self, text: str, images: Sequence[bytes], row_id: str) -> EncodedPrompt:
        """Expand the image placeholders of rendered text as the processor does, and tokenise."""
        assert self._grids is not None, "its callers have looked"
        sizes = [image_size(data, f"row {row_id}, image {number}") for number, data in enumerate(images)]
        grids = self._grids.of_row(sizes, row_id)
        unexpanded = np.asarray(self.tokenize(text), np.int32)
        ids = self._grids.expand(text, unexpanded, grids, self.tokenize)
        measured = EncodedPrompt(
            row_id=row_id,
            token_ids=ids,
            token_types=(ids == self.image_token_id).astype(np.int32),
            image_grids=grids,
            image_hashes=tuple(map(content_hash, images)),
            images=tuple(images),
            unexpanded_ids=unexpanded,
        )
        self._check_placeholders(measured)
        return measured

    def measure_text(self, text: str, images: Sequence[bytes], where: str) -> EncodedPrompt:
        """Tokens and grids of text that the chat template has rendered, with one placeholder for each image.

        Any thread may call it. Raises UserError naming `where` as `measure` does, and for images of a processor whose
        grids cannot be told without pixels.
        """
        if not images:
            return EncodedPrompt.of_text(np.asarray(self.tokenize(text), np.int32), where)
        if self._grids is None or not self._grids.IN_TURNS:
            raise UserError(
                f"row {where}: images that come after a turn of the model are supported for Qwen2-VL, Qwen2.5-VL, "
                f"Qwen3-VL and LLaVA, and the model is of the family {self.family}. Use one of these, or tools that "
                "answer in text"
            )
        return self._expanded(text, images, where)

    def encode_text(self, text: str, images: Sequence[bytes], where: str) -> EncodedPrompt:
        """`measure_text` with pixels. Any thread may call it; raises as that does."""
        content = "".join(["text", where, "\0", text, *map(content_hash, images)])
        return self._cached(content, lambda: self._with_pixels(self.measure_text(text, images, where)))

    def _with_pixels(self, measured: EncodedPrompt) -> EncodedPrompt:
        if not measured.images:
            return measured
        assert self._grids is not None, "it was measured by them"
        where = f"row {measured.row_id}, image"
        decoded = [decode_image(data, f"{where} {number}") for number, data in enumerate(measured.images)]
        pixels, made = self._grids.process(decoded)
        if not np.array_equal(made, measured.image_grids):
            raise BadStateError(
                f"row {measured.row_id}: the processor makes the grids {made.tolist()} of its images, "
                f"their sizes say {measured.image_grids.tolist()}. asyncrl/processing/image_grids.py does not fit this "
                f"version of transformers: install the one that asyncrl is tested with"
            )
        return replace(measured, pixel_values=pixels)

    def _encoded_whole(self, prompt: Prompt, media: Mapping[str, bytes]) -> EncodedPrompt:
        """Encode text, or whatever else the processor's own call is for."""
        self._check_media(prompt)
        self._reserved.check(prompt)
        text = self.render(prompt)
        unexpanded = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        encoded = EncodedPrompt.of_text(unexpanded, prompt.row_id)
        if prompt.media_hashes:
            asked = {"return_tensors": "pt", "return_mm_token_type_ids": True, "add_special_tokens": False}
            out = self.processor(text=[text], **asked, **media_arguments([prompt], media))
            encoded = replace(
                encoded,
                token_ids=out["input_ids"][0].to(torch.int32).numpy(),
                token_types=out["mm_token_type_ids"][0].to(torch.int32).numpy(),
                image_grids=self._grids.made(out) if self._grids else named_grids(out, "image_grid_thw"),
                image_hashes=tuple(content_hash(media[name]) for name in prompt.image_hashes),
                images=tuple(media[name] for name in prompt.image_hashes),
                pixel_values=out.get("pixel_values"),
                video_grids=named_grids(out, "video_grid_thw"),
                video_hashes=tuple(video_hash([content_hash(media[d]) for d in v.frame_hashes]) for v in prompt.videos),
                videos=tuple(VideoFrames(tuple(media[d] for d in v.frame_hashes), v.fps) for v in prompt.videos),
                seconds_per_grid=tuple(map(float, out.get("second_per_grid_ts", ()))),
                video_pixel_values=out.get("pixel_values_videos"),
            )
        self._check_placeholders(encoded)
        return encoded

    def describe_grid(self, grid: Sequence[int]) -> str:
        """The grid of one image, for people."""
        return (self._grids or ImageGrids(self.processor)).describe(grid)

    def render(self, prompt: Prompt) -> str:
        """The chat template's text, generation prompt included."""
        messages = [
            self._calls.written({**message.others, **message.model_dump(exclude={"others"})}, prompt.row_id)
            for message in prompt.messages
        ]
        return self.render_messages(self._tools.added(messages) if self._tools else messages)

    def render_messages(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The chat template's text of messages whose contents are lists of parts, `{"type": "text", ...}` and such."""
        tools = self._tools.schemas if self._tools else None
        return self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, without special ones around it. Any thread may call it."""
        with self._lock:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokenize_completion(self, text: str) -> list[int]:
        """Token ids of a completion that says `text`: as the policy would sample it, closed as an assistant's turn."""
        return [*self.tokenize(text), *self.ends.written]

    def starts_of_tokens(self, text: str) -> list[int]:
        """Place in the text where each of its tokens begins, in characters. Any thread may call it."""
        with self._lock:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [start for start, _ in encoded["offset_mapping"]]

    def decode(self, token_ids: np.ndarray) -> str:
        """Completion text for rewards and people; training never re-tokenises it."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def _check_media(self, prompt: Prompt) -> None:
        """Refuse media that the model cannot read, or that are not known to be computed alike on both sides."""
        if prompt.image_hashes and not self.sees_images:
            raise UserError(
                f"row {prompt.row_id} has {len(prompt.image_hashes)} image(s), but the model folder has no image "
                "processor: it reads text only. Use a vision-language model or drop data.image_key"
            )
        if prompt.image_hashes and not self._knows_images:
            raise UserError(
                f"row {prompt.row_id} has {len(prompt.image_hashes)} image(s), but the model is of the family "
                f"{self.family}, {self._missing()}: learner and rollout server could not compare what they make of an "
                f"image. Images are supported for {', '.join(family_names())}, and others whose processor reports a "
                f"grid for each image: use one of these. {what_to_install('models')}"
            )
        if prompt.videos and self.family not in VIDEO_FAMILIES:
            raise UserError(
                f"row {prompt.row_id} has {len(prompt.videos)} video(s), but the model is of the family {self.family}, "
                f"and videos are supported for {', '.join(VIDEO_FAMILIES)}: where a video's tokens and positions go "
                "differs between families. Use one of these, or give the frames as images (data.image_key)"
            )
        if prompt.videos and getattr(self.processor, "video_processor", None) is None:
            raise UserError(
                f"row {prompt.row_id} has {len(prompt.videos)} video(s), but the model folder has no video processor. "
                "Copy video_preprocessor_config.json (or processor_config.json) from the original model into the folder"
            )

    def _missing(self) -> str:
        """Description of the parts of this folder's image processor that are unknown."""
        found = type(self.processor).__name__
        if family_images(self.family) is not None:
            return f"and its {found} is not the one that the family is released with, or gives images other sizes"
        return f"and nothing installed knows the tokens and pixels that a {found} makes of an image"

    def _check_placeholders(self, encoded: EncodedPrompt) -> None:
        for kind, token_id, grids, part in (
            ("image", self.image_token_id, encoded.image_grids, "image_processor"),
            ("video", self.video_token_id, encoded.video_grids, "video_processor"),
        ):
            if token_id is None:
                continue
            found = int((encoded.token_ids == token_id).sum())
            if kind == "image" and self._grids is not None:
                expected = int(self._grids.tokens(grids).sum())
            else:
                merge = getattr(getattr(self.processor, part, None), "merge_size", 1) ** 2
                expected = int(grids.prod(axis=1).sum()) // merge
            if found != expected:
                raise UserError(
                    f"row {encoded.row_id}: the rendered prompt has {found} {kind} tokens, but its "
                    f"{len(grids)} {kind}(s) need {expected}. "
                    f"Check that the model's chat template has one {kind} placeholder per {kind}"
                )

    def _remember(self, key: str, encoded: EncodedPrompt) -> None:
        self._cache[key] = encoded
        self._cache_left -= encoded.nbytes
        while self._cache_left < 0 and self._cache:
            _, oldest = self._cache.popitem(last=False)
            self._cache_left += oldest.nbytes


def _media_of(prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> dict[str, bytes]:
    """Encoded images and frames by the names that the prompt has for them.

    Their hashes are computed again: under a name may be something else, and the learner must hear of it.
    """
    return {name: bytes(blobs[name]) for name in prompt.media_hashes}


def special_token_ids(model_config: Any, names: tuple[str, ...]) -> set[int]:
    """Ids that the model's configuration keeps under these names."""
    found = (getattr(model_config, name, None) for name in names)
    return {token_id for token_id in found if isinstance(token_id, int)}


def prompt_processor(
    model: ModelConfig, environment: EnvironmentConfig, settings: Mapping[str, Any], *, cache_mib: int = 256
) -> PromptProcessor:
    """The processor of a run's policy, whose prompts tell of the environment's tools. Raises UserError."""
    processor = PromptProcessor(model, settings, cache_mib=cache_mib)
    processor.show_tools(prompt_tools(environment))
    return processor


def image_rule(processor: PromptProcessor) -> ImageRule:
    """The sizes of images that the policy's processor takes as they are."""
    part: Any = getattr(processor.processor, "image_processor", None)
    if PatchGrids.of(processor.processor) is None:
        return ImageRule()
    return ImageRule(part.patch_size * part.merge_size, part.size["longest_edge"], part.size["shortest_edge"])
