"""README.md beside an exported adapter: its base, and how transformers quantises that as the run did."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from asyncrl.config.sections import ModelConfig
from asyncrl.model_files.folder import open_weights
from asyncrl.models.loading import model_class, skeleton
from asyncrl.models.lora import ADAPTER_WEIGHTS, BASE_KEY
from asyncrl_plugins.quantization.nf4 import base_layers

CARD = """\
# An adapter on a base in 4 bits

The policy is this adapter beside its base in NF4 with double quantisation (QLoRA, arXiv 2305.14314). On the base in
{dtype} it is another policy.

- base: `{path}`, fingerprint `{fingerprint}`
- in 4 bits: the linear layers of the language model without its output layer

```python
import torch
from peft import PeftModel
from transformers import {model_class}, BitsAndBytesConfig

in_4_bits = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.{dtype},
    llm_int8_skip_modules={skipped},
)
base = {model_class}.from_pretrained("{path}", dtype=torch.{dtype}, quantization_config=in_4_bits)
policy = PeftModel.from_pretrained(base, "THIS_FOLDER")
```

`asyncrl export RUN TARGET --merged` merges it into the dequantised base, in float32, and compares log-probs.
"""


def write_card(config: ModelConfig, folder: Path) -> None:
    """Write it into the folder of an adapter that was trained on the base of `config`."""
    model = skeleton(config)
    held = set(base_layers(model))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with open_weights(folder / ADAPTER_WEIGHTS, "pt") as opened:
        fingerprint = opened.metadata()[BASE_KEY]
    text = CARD.format(
        path=config.path,
        fingerprint=fingerprint,
        dtype=config.dtype,
        model_class=model_class(model.config).__name__,
        skipped=_outermost([name for name in linear if name not in held], held),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _outermost(skipped: list[str], held: set[str]) -> list[str]:
    """Fewest modules that have all of `skipped` in them, and nothing of `held`."""
    found: list[str] = []
    for name in skipped:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        outer = next(prefix for prefix in prefixes if not any(f"{each}.".startswith(f"{prefix}.") for each in held))
        if outer not in found:
            found.append(outer)
    return found
