"""Adapters that an engine plays beside their base, as in a run: its settings, and the one version that it is given."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import LoraConfig, ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import ADAPTER_CONFIG, read_json
from asyncrl.models.lora import ADAPTER_WEIGHTS, check_adapter, read_adapter, resolve_adapter
from asyncrl.models.parts import part_of
from asyncrl.models.published import tensor_bytes
from protocol.messages import TensorEntry, WeightManifest
from rollout_server.engines.arrived_weights import ArrivedWeights
from rollout_server.engines.base import InferenceEngine

COMPUTED_OTHERWISE = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "bias",
    "lora_bias",
)
"""Keys of ADAPTER_CONFIG under which PEFT computes something else than W + alpha / rank B A."""
BEFORE, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
"""Around a layer's name, of a plain adapter's tensors."""


def settings_of(config: ModelConfig, folder: Path) -> ModelConfig:
    """`config` with `lora` as the adapter of `folder` has it. Raises UserError for one that engines cannot apply."""
    check_adapter(config, folder)
    described = read_json(folder / ADAPTER_CONFIG)
    unusual = [key for key in COMPUTED_OTHERWISE if described.get(key) not in (None, False, {}, [], "none")]
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as opened:
        names = list(opened.keys())
    whole = tuple(described.get("modules_to_save") or ())
    saved = tuple(f"{BEFORE}{module}." for module in whole)
    names = [name for name in names if not name.startswith(saved)]
    unusual += [name for name in names if not (name.startswith(BEFORE) and name.endswith(ENDS))]
    if unusual:
        raise UserError(
            f"the adapter in {folder} is no plain LoRA ({', '.join(unusual[:3])}), and engines apply no other. Merge "
            "it with PEFT (merge_and_unload, save_pretrained) and name that folder"
        )
    layers = tuple(dict.fromkeys(name.removeprefix(BEFORE).rpartition(".lora_")[0] for name in names))
    lora = LoraConfig(
        rank=described["r"],
        alpha=described["lora_alpha"],
        target_modules=layers,
        vision_tower=any(part_of(name.split(".")) != "language_model" for name in layers),
        modules_to_save=whole,
    )
    return config.model_copy(update={"lora": lora})


async def start_policy(engine: InferenceEngine, config: RunConfig, folder: Path) -> None:
    """Start the engine with the policy of `folder`: an adapter stays beside its base, as in a run."""
    await engine.start()
    if (spec := resolve_adapter(config.model)) is None:
        return
    base = getattr(torch, config.model.dtype)  # of modules that are trained whole
    dtypes = {True: torch.float32, False: base}
    tensors = {name: tensor.to(dtypes[name.endswith(ENDS)]) for name, tensor in read_adapter(folder).items()}
    entries = tuple(
        TensorEntry(
            name=name,
            dtype=str(t.dtype).removeprefix("torch."),
            shape=tuple(t.shape),
            offset=0,
            nbytes=t.nbytes,
            xxh3=0,
        )
        for name, t in tensors.items()
    )
    total = sum(entry.nbytes for entry in entries)
    manifest = WeightManifest(version=1, publication="eval", tensors=entries, total_bytes=total, adapter=spec)
    await engine.update_weights(1, ArrivedWeights(manifest, {n: tensor_bytes(t) for n, t in tensors.items()}))
