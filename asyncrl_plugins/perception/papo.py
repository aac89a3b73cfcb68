"""PAPO (arXiv 2507.06448): a loss that makes completions less likely where parts of the images are black."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from PIL import Image

from asyncrl.algorithms.ratios import ratio
from asyncrl.data.images import decode_image
from asyncrl.errors import BadStateError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.perception.settings import PapoConfig
from learner.training.loss_hook import AdditionalLoss

if TYPE_CHECKING:
    from learner.groups.ticket import ReceivedGroup
    from learner.training.loss_hook import PolicyPass
    from learner.training.packing import TrainGroup

LARGEST_KL = 10.0
"""Cut of a token's KL to the policy with masked images: the loss makes it larger, and it would grow without end."""


class Papo:
    """Hook of the loss: a second pass over prompts with masked images."""

    def __init__(self, settings: PapoConfig):
        self._settings = settings

    @property
    def trains_entropy(self) -> bool:
        return self._settings.entropy_coeff > 0

    def __call__(self, seen: PolicyPass) -> AdditionalLoss | None:
        """PAPO's terms, 0 at tokens after prompts without images; None where the batch has no image."""
        if not any(has_images(group) for group in seen.batch.train_groups):
            return None
        nothing, groups = torch.zeros_like(seen.outputs.logprobs.detach()), seen.micro_batch.groups
        if not any(has_images(group) for group in groups):
            return AdditionalLoss(nothing, {"kl_prcp": nothing})
        masked = seen.again([self._masked(group, seen) for group in groups], trains_entropy=self.trains_entropy)
        found = perception_loss(
            seen.outputs.logprobs, masked.logprobs, seen.outputs.entropies, masked.entropies, self._settings
        )
        rows = [completion.row for group in groups if has_images(group) for completion in group.completions]
        sees = torch.isin(seen.micro_batch.row, torch.tensor(rows)).to(nothing.device)
        kl = torch.where(sees, found.kl.detach(), 0.0)
        return AdditionalLoss(torch.where(sees, found.token_loss, 0.0), {"kl_prcp": kl})

    def _masked(self, group: TrainGroup, seen: PolicyPass) -> TrainGroup:
        """The group after its prompt with masked images, drawn by the ticket's seed: the same in a step made again."""
        if not has_images(group):
            return group
        item = seen.batch.received[int(seen.batch.groups[group.completions[0].row])]
        prompt = masked_prompt(group.whole_prompt, item, seen.batch.processor, self._settings)
        return replace(group, prompt=prompt, encode=None)


def has_images(group: TrainGroup) -> bool:
    return len(group.prompt.image_grids) > 0


def masked_prompt(
    prompt: EncodedPrompt, item: ReceivedGroup, processor: PromptProcessor, settings: PapoConfig
) -> EncodedPrompt:
    """The prompt with squares of its images black, before the processor sees them: sizes and tokens stay."""
    if prompt.pixel_values is None:
        return prompt
    images: Sequence[Image.Image] = [
        blacken_patches(
            decode_image(bytes(item.blobs[digest]), f"row {prompt.row_id}"),
            settings.patch_pixels,
            settings.mask_ratio,
            item.ticket.seed + number,
        )
        for number, digest in enumerate(prompt.image_hashes)
    ]
    masked = processor.pixels(images)
    if masked.shape != prompt.pixel_values.shape:
        raise BadStateError(
            f"row {prompt.row_id}: the processor makes pixels {tuple(masked.shape)} of the masked images and "
            f"{tuple(prompt.pixel_values.shape)} of the images as they are, though their sizes are the same"
        )
    return replace(prompt, pixel_values=masked)


def blacken_patches(image: Image.Image, patch: int, share: float, seed: int) -> Image.Image:
    """Copy an image with each square of `patch` pixels black with probability `share`: the same ones for a seed."""
    width, height = image.size
    columns, rows = -(-width // patch), -(-height // patch)
    draws = random.Random(seed)
    masked = image.copy()
    for place in range(columns * rows):
        if draws.random() < share:
            left, top = place % columns * patch, place // columns * patch
            masked.paste((0, 0, 0), (left, top, min(left + patch, width), min(top + patch, height)))
    return masked


@dataclass(frozen=True)
class PerceptionLoss:
    token_loss: torch.Tensor
    """[n]"""
    kl: torch.Tensor
    """[n] k3 estimate of KL(policy || policy with masked images)."""


def perception_loss(
    logprobs: torch.Tensor,
    masked_logprobs: torch.Tensor,
    entropies: torch.Tensor | None,
    masked_entropies: torch.Tensor | None,
    settings: PapoConfig,
) -> PerceptionLoss:
    """-kl_coef KL(policy || policy with masked images) + entropy_coeff (both entropies): eq. 4 and the double entropy
    loss. [n] each, with gradient on both sides, as in the paper's formula; the authors' code detaches the masked side
    by default. A token's KL is cut at LARGEST_KL, where it gives no gradient."""
    difference = masked_logprobs - logprobs
    kl = (ratio(masked_logprobs, logprobs) - difference - 1).clamp(max=LARGEST_KL)
    token_loss = -settings.kl_coef * kl
    if entropies is not None and masked_entropies is not None:
        token_loss = token_loss + settings.entropy_coeff * (entropies + masked_entropies)
    return PerceptionLoss(token_loss, kl)
