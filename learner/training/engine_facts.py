"""Facts about a trained model: its published form, and the floating-point operations of training on a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.models.parts import part_of
from asyncrl.models.published import fingerprint_of, published_tensors
from asyncrl.processing.image_grids import images_of
from learner.training.packing import TrainGroup
from learner.training.vision_features import frozen_vision
from protocol.messages import AdapterSpec

FORWARD, ACTIVATION_GRADIENT, WEIGHT_GRADIENT = 2, 2, 2
"""FLOP per parameter and token (Kaplan et al. 2020, arXiv 2001.08361, table 1)."""


class ModelFlops:
    """Count the one forward and backward pass that training needs: parameters x tokens, without attention's scores.

    As in Chowdhery et al. 2022 (arXiv 2204.02311, appendix B), what is computed a second time (recomputed activations,
    proximal and reference log-probs) is no useful work. A packed prompt counts once, whatever its group's size.
    """

    def __init__(self, model: Any):
        """`model` is a Hugging Face model."""
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        trained: Counter[str] = Counter()
        frozen: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            if (parameter is embedding and parameter is not head) or ".original_module." in name:
                continue  # a look-up, and weights in whose place others are trained
            part = "head" if parameter is head else part_of(name.split("."))
            whole = getattr(parameter, "quant_state", parameter)  # of two weights of 4 bits in a byte
            (trained if parameter.requires_grad else frozen)[part] += whole.shape.numel()
        self._images, self._vision = images_of(model), getattr(model.config, "vision_config", None)
        self._flops = {
            part: trained[part] * (FORWARD + ACTIVATION_GRADIENT + WEIGHT_GRADIENT)
            # Through frozen layers the gradient goes on to trained ones below them, if there are such.
            + frozen[part] * (FORWARD + ACTIVATION_GRADIENT * (part != "vision_tower" or trained["vision_tower"] > 0))
            for part in ("vision_tower", "connector", "language_model", "head")
        }

    def of(self, groups: Sequence[TrainGroup]) -> float:
        """FLOP of one pass over these groups."""
        prompts = [group.prompt for group in groups]
        images = [self._images.patches(p.image_grids, self._vision) for p in prompts if len(p.image_grids)]
        inputs = {
            "vision_tower": sum(images) + sum(int(p.video_grids.prod(axis=1).sum()) for p in prompts),
            "connector": sum(group.prompt.media_tokens for group in groups),
            "language_model": sum(group.num_tokens for group in groups),
            "head": sum(np.count_nonzero(c.is_trained) for group in groups for c in group.completions),
        }
        return float(sum(self._flops[part] * count for part, count in inputs.items()))


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine's model for code that does not touch its weights."""

    vocabulary: int
    """Rows of the output layer."""
    architecture: str
    """Fingerprint of published names, dtypes and shapes."""
    published_bytes: int
    dtype: torch.dtype
    """Dtype of computation and of publication."""
    source: str
    """Folder that the model was loaded from."""
    flops: ModelFlops
    frozen_vision: str
    """Fingerprint of vision tower and connector where neither is trained, else empty."""


def facts_of(model: Any, adapter: AdapterSpec | None) -> EngineFacts:
    """Facts about a loaded model, whole and in its own dtype."""
    tensors = list(published_tensors(model))
    shapes = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    return EngineFacts(
        vocabulary=model.get_output_embeddings().weight.shape[0],
        architecture=fingerprint_of(shapes, adapter),
        published_bytes=sum(tensor.nbytes for _, tensor in tensors),
        dtype=model.dtype,
        source=model.name_or_path,
        flops=ModelFlops(model),
        frozen_vision=frozen_vision(model),
    )
