"""Compiled norms and gated layers of a model that is trained (torch.compile).

Between its matrix products a layer reads and writes its states in a dozen small kernels. A compiled norm, or the product
behind a gate, reads them once. Sums and intermediate values are then in float32: in float32 the same up to the order of
sums, in 16 bits without the roundings in between.
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
    chosen = [module for module in model.modules() if type(module).__name__.endswith(ENDINGS)]
    for module in chosen:
        module.compile(dynamic=True)
    counts = Counter(type(module).__name__ for module in chosen)
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none: the model has no such layers"
    logger.info("learner.compile_layers: %s", said)
