"""From a prompt (messages and image bytes) to exact token ids and pixels, and the alignment contract.

The model's own processor is the one source of truth. Rollout server and learner run it on the same bytes and
the learner compares: token ids, image grids and image hashes must be equal before a group counts.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.data.images import content_hash, decode_image
from asyncrl.errors import UserError
from asyncrl.models import torchvision_cpu
from asyncrl.models.loading import has_vision, model_folder, special_token_ids
from protocol.messages import Prompt

torchvision_cpu.install()

PLACEHOLDER_ID_NAMES = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_token_index",
    "video_token_index",
)
"""Ids that stand for images or fence them. A policy that samples one makes its own sample untrainable."""


@dataclass(frozen=True)
class EncodedPrompt:
    row_id: str
    token_ids: np.ndarray
    """[P] int32, image placeholders expanded."""
    token_types: np.ndarray
    """[P] int32, 1 on image tokens, 0 on text."""
    image_grids: np.ndarray
    """[images, 3] int32: temporal, height, width in patches."""
    image_hashes: tuple[str, ...]
    """Of the bytes that were encoded here, whatever name they came under."""
    pixel_values: torch.Tensor | None
    """[patches, features] of all images, or None without images."""

    @property
    def nbytes(self) -> int:
        return self.token_ids.nbytes + (0 if self.pixel_values is None else self.pixel_values.nbytes)


class PromptProcessor:
    """The model folder's processor and tokenizer, with a bounded cache of encoded prompts."""

    def __init__(self, config: ModelConfig, *, cache_mib: int = 256):
        from transformers import AutoConfig, AutoProcessor

        folder = model_folder(config)
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        self.processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        self.sees_images = getattr(self.processor, "image_processor", None) is not None
        if has_vision(hf_config) and not self.sees_images:
            raise UserError(
                f"{config.path} has a vision model but no image processor. "
                "Copy preprocessor_config.json (or processor_config.json) from the original model into the folder"
            )
        self.image_token_id: int | None = getattr(hf_config, "image_token_id", None)
        self.placeholder_ids = tuple(sorted(special_token_ids(hf_config, PLACEHOLDER_ID_NAMES)))
        self._placeholder_texts = tuple(self.tokenizer.convert_ids_to_tokens(list(self.placeholder_ids)))
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, EncodedPrompt] = OrderedDict()
        self._cache_left = cache_mib * 2**20

    @property
    def fingerprint(self) -> str:
        """Equal for two processors that turn every prompt into the same ids and pixels.

        Of every setting of the tokenizer (added and special tokens, normaliser), of the image and video processors
        (sizes, patches, resampling, rescaling, normalisation, frames), and of the chat template.
        """
        described: dict[str, Any] = {
            "tokenizer": self.tokenizer.backend_tokenizer.to_str(),
            "special_tokens": self.tokenizer.special_tokens_map,
            "chat_template": getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template,
        }
        if self.sees_images:
            described["processor"] = self.processor.to_dict()
        return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        """Run the processor on a prompt; `blobs` has the encoded image bytes by content hash.

        Any thread may call it. Raises UserError naming the row when an image is corrupt or the text itself
        contains image placeholders.
        """
        key = hashlib.sha256(prompt.model_dump_json(include={"messages", "image_hashes"}).encode()).hexdigest()
        with self._lock:  # neither the cache nor a fast tokenizer may be used by two threads at once
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                return cached
            encoded = self._encode(prompt, blobs)
            self._remember(key, encoded)
            return encoded

    def _encode(self, prompt: Prompt, blobs: Mapping[str, bytes | memoryview]) -> EncodedPrompt:
        if prompt.image_hashes and not self.sees_images:
            raise UserError(
                f"row {prompt.row_id} has {len(prompt.image_hashes)} image(s), but the model folder has no image "
                "processor: it reads text only. Use a vision-language model or drop data.image_key"
            )
        self._check_text(prompt)
        text = self.render(prompt)
        if not prompt.image_hashes:
            ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
            encoded = EncodedPrompt(
                prompt.row_id, ids, np.zeros_like(ids), np.zeros((0, 3), np.int32), (), pixel_values=None
            )
        else:
            encoded_images = [bytes(blobs[digest]) for digest in prompt.image_hashes]
            images = [decode_image(data, where=f"row {prompt.row_id}") for data in encoded_images]
            out = self.processor(text=[text], images=images, return_tensors="pt")
            encoded = EncodedPrompt(
                row_id=prompt.row_id,
                token_ids=out["input_ids"][0].to(torch.int32).numpy(),
                token_types=out["mm_token_type_ids"][0].to(torch.int32).numpy(),
                image_grids=out["image_grid_thw"].to(torch.int32).numpy(),
                image_hashes=tuple(map(content_hash, encoded_images)),
                pixel_values=out["pixel_values"],
            )
        self._check_placeholders(encoded)
        return encoded

    def render(self, prompt: Prompt) -> str:
        """The chat template's text, generation prompt included."""
        messages = [message.model_dump() for message in prompt.messages]
        if not self.sees_images:  # text-only templates expect plain strings
            for message in messages:
                message["content"] = "".join(part["text"] for part in message["content"])
        return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def decode(self, token_ids: np.ndarray) -> str:
        """Completion text for rewards and people; training never re-tokenises it."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def _check_text(self, prompt: Prompt) -> None:
        """The data set must not speak the model's own image language: processors fail on it, or worse, do not."""
        for message in prompt.messages:
            for part in message.content:
                found = [t for t in self._placeholder_texts if part.type == "text" and t in part.text]
                if found:
                    raise UserError(
                        f"row {prompt.row_id}: the text of the {message.role} message contains {found[0]!r}, which the "
                        "model reserves for images. Write <image> where an image belongs, or take it out of the text"
                    )

    def _check_placeholders(self, encoded: EncodedPrompt) -> None:
        if self.image_token_id is None:
            return
        found = int((encoded.token_ids == self.image_token_id).sum())
        merge = getattr(getattr(self.processor, "image_processor", None), "merge_size", 1) ** 2
        expected = int(encoded.image_grids.prod(axis=1).sum()) // merge
        if found != expected:
            raise UserError(
                f"row {encoded.row_id}: the rendered prompt has {found} image tokens, but its "
                f"{len(encoded.image_hashes)} image(s) need {expected}. "
                "Check that the model's chat template has one image placeholder per image"
            )

    def _remember(self, key: str, encoded: EncodedPrompt) -> None:
        self._cache[key] = encoded
        self._cache_left -= encoded.nbytes
        while self._cache_left < 0 and self._cache:
            _, oldest = self._cache.popitem(last=False)
            self._cache_left += oldest.nbytes


def check_prompt_length(encoded: EncodedPrompt, limit: int) -> None:
    """Refuse a prompt over the limit. A prompt with images is never truncated: that would cut image tokens."""
    length = len(encoded.token_ids)
    if length > limit:
        image_tokens = int((encoded.token_types == 1).sum())
        raise UserError(
            f"row {encoded.row_id}: the prompt has {length} tokens ({image_tokens} of them for "
            f"{len(encoded.image_hashes)} image(s)), over data.max_prompt_length = {limit}. Raise the limit, "
            "use smaller images, or set data.filter_overlong_prompts=true to leave such rows out (counted and named)"
        )
