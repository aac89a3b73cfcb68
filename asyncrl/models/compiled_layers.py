"""Compiled norms and gated layers of a model that is trained (torch.compile): each reads and writes its states once.

Sums and values in between are then in float32: in 16 bits without the roundings of the model's own code.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)
ENDINGS = ("RMSNorm", "MLP")
"""Ends of the class names of layers that are compiled."""


def compile_layers(model: Any) -> None:
    """Let them be compiled at their first pass; those of one class share the code."""
    counts = Counter[str]()
    for module in model.modules():
        if (name := type(module).__name__).endswith(ENDINGS):
            module.compile(dynamic=True)
            counts[name] += 1
    logger.info("learner.compile_layers: %s", dict(counts) or "the model has no such layers")
