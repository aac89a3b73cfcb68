"""Features of images that a frozen vision tower has computed before, kept by the content of the pixels.

A group's prompt comes again: in another part of the group, in the passes of actor, reference and critic, in later
updates and epochs. While neither tower nor connector is trained, an image's features stay what they were. Each image is
computed by itself, so that its features do not depend on what was kept: a step that is made again has the same bits.

Ranks that gather the tower's weights while it computes run it equally often: each as often as the one that misses most
images, on images of its own whose features it drops.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

from asyncrl.models.parts import part_of
from asyncrl.models.published import tensor_bytes
from asyncrl.processing.image_grids import images_of

Key = tuple[str, bytes]
"""A tower's fingerprint, and the digest of an image's pixels."""


def frozen_vision(model: Any) -> str:
    """Fingerprint of vision tower and connector: equal for two models that compute the same features of the same
    pixels, dtype included. Empty where there are none, or a parameter of them is trained, an adapter's included."""
    digest = xxhash.xxh3_128()
    found = False
    for name, parameter in model.named_parameters():
        if part_of(name.split(".")) == "language_model":
            continue
        if parameter.requires_grad:
            return ""
        found = True
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(tensor_bytes(parameter))
    if not found:
        return ""
    config = {name: value for name, value in model.config.to_dict().items() if name.startswith("vision")}
    digest.update(json.dumps([model.config.model_type, config], sort_keys=True, default=str).encode())
    return digest.hexdigest()


class VisionFeatures:
    """Features in host memory, shared by models. Used by the one thread that computes with them.

    Where there is no room, what no pass has used since the last `report` makes some; a step's own features stay, so
    that passes which go round more images than fit still find some of them.
    """

    def __init__(self, most_bytes: int, passes_of_all: Callable[[int], int] = lambda passes: passes):
        """`passes_of_all`: the tower's passes that all ranks make together, of those that this one needs."""
        self._most_bytes = most_bytes
        self._passes_of_all = passes_of_all
        self._bytes = 0
        self._kept: OrderedDict[Key, list[torch.Tensor]] = OrderedDict()
        """The longest unused first: [tokens, D] of the input layer, then of those inside the model (Qwen3-VL)."""
        self._used: set[Key] = set()
        self._asked = self._computed = 0

    def report(self, total: Callable[[float], float] = float) -> dict[str, float]:
        """Images that passes have asked for since the last report, and the share that was not computed for them.
        `total` adds up the ranks' numbers."""
        asked, computed = total(self._asked), total(self._computed)
        self._used.clear()
        self._asked = self._computed = 0
        return {"vision/images": float(asked), "vision/reused": 1 - computed / asked} if asked else {}

    def inputs(self, model: Any, tower: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs on the device of `input_ids`, with features in the place of pixels.

        `tower` is the model's `frozen_vision`. Where that is empty, or there are videos, pixels stay.
        """
        device = inputs["input_ids"].device
        has_features = bool(tower) and "pixel_values" in inputs and "pixel_values_videos" not in inputs
        pieces = images_of(model).apart(inputs) if has_features else None
        moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
        if pieces is None:
            return moved
        found = self._found(model, tower, pieces, device)
        first, *inside = ([layer.to(device) for layer in layers] for layers in found)
        output = SimpleNamespace(pooler_output=images_of(model).joined(first), deepstack_features=inside)
        del moved["pixel_values"]
        return {**moved, "mm_encoder_outputs": {"image": output}}

    def _found(
        self, model: Any, tower: str, pieces: Sequence[Mapping[str, torch.Tensor]], device: torch.device
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Features of each image, by layers."""
        keys = [_key(tower, piece) for piece in pieces]
        self._used.update(keys)
        missing = {key: piece for key, piece in zip(keys, pieces, strict=True) if key not in self._kept}
        self._asked += len(pieces)
        self._computed += len(missing)
        features = {key: self._kept[key] for key in keys if key not in missing}
        for key in features:
            self._kept.move_to_end(key)
        for idle in range(self._passes_of_all(len(missing)) - len(missing)):
            _compute(model, pieces[idle % len(pieces)], device)
        for key, piece in missing.items():
            features[key] = _compute(model, piece, device)
            self._keep(key, [layer.cpu() for layer in features[key]])
        return zip(*(features[key] for key in keys), strict=True)

    def _keep(self, key: Key, features: list[torch.Tensor]) -> None:
        size = sum(layer.nbytes for layer in features)
        while self._bytes + size > self._most_bytes and self._kept and next(iter(self._kept)) not in self._used:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= sum(layer.nbytes for layer in gone)
        if self._bytes + size <= self._most_bytes:
            self._kept[key] = features
            self._bytes += size


def _key(tower: str, piece: Mapping[str, torch.Tensor]) -> Key:
    digest = xxhash.xxh3_128()
    for name, value in piece.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(tensor_bytes(value))
    return tower, digest.digest()


@torch.no_grad()
def _compute(model: Any, piece: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Features of one image: [tokens, D] of each layer that takes some."""
    arguments = {name: value.to(device) for name, value in piece.items()}
    output = model.base_model.get_image_features(**arguments, return_dict=True)
    layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [torch.cat(list(layer)) for layer in layers]
