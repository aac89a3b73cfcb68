"""Low-rank adapters (LoRA, arXiv 2106.09685) with PEFT: on a model, in its place, and as a PEFT folder.

Adapters are fp32 on both sides and on the wire, whatever the base model's dtype: an update of AdamW is often smaller
than a bf16 weight can show, and the engine then computes exactly what the learner does.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.config.model import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.base_weights import base_fingerprint
from asyncrl.models.folder import ADAPTER_CONFIG
from asyncrl.models.loading import load_model, skeleton
from asyncrl.models.published import tensor_bytes
from protocol.messages import AdapterSpec

logger = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_KEY = "base_fingerprint"
"""In the metadata of ADAPTER_WEIGHTS."""
_PART = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")
"""A tensor in ADAPTER_WEIGHTS: of which layer, and which of the two."""
SLOT = "policy"
"""PEFT's name of the one adapter in a model. Its tensors change with the version; engines that know adapters by name
get a name of its own for each version, see `adapter_name`."""


def add_adapter(model: Any, spec: AdapterSpec, *, seed: int = 0) -> Any:
    """PEFT's handle on the model, which has its adapter in place and everything else frozen from now on.

    The adapter changes nothing yet; `seed` decides where its training begins.
    """
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, _lora_config(spec), adapter_name=SLOT, autocast_adapter_dtype=True)


def adapter_name(version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """`v7-1f2e3d4c`, for engines that keep adapters by name: no two adapters have one, even if a learner that came back
    makes version 7 again and not to the bit."""
    hashed = xxhash.xxh3_64()
    for name, tensor in tensors:
        hashed.update(name.encode())
        hashed.update(tensor_bytes(tensor))
    return f"v{version}-{hashed.hexdigest()[:8]}"


def write_adapter_folder(
    folder: Path, spec: AdapterSpec, tensors: Iterable[tuple[str, torch.Tensor]], *, base: str = "", base_path: str = ""
) -> None:
    """Published tensors as a new PEFT folder, which `PeftModel.from_pretrained` and vLLM's `LoRARequest` load.

    `base` is the base weights' fingerprint. Tensors are copied before this returns.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    metadata = {"format": "pt", BASE_KEY: base}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(contiguous, folder / ADAPTER_WEIGHTS, metadata=metadata)
    config = _lora_config(spec)
    config.base_model_name_or_path = base_path
    config.inference_mode = True
    # A set in PEFT, whose order would differ from one process to the next.
    described = {**config.to_dict(), "target_modules": list(spec.target_modules)}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True))


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT folder, under their published names."""
    from safetensors.torch import load_file

    return load_file(folder / ADAPTER_WEIGHTS)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def load_merged(config: ModelConfig, folder: Path) -> Any:
    """The base model of `config` with the adapter of `folder` added into its weights.

    Raises UserError before anything is loaded if the adapter was trained on another base.
    """
    from peft import PeftModel

    _check_base(config, folder)
    _check_fits(config, folder)
    model = load_model(config, device=torch.device("cpu"))
    return PeftModel.from_pretrained(model, folder).merge_and_unload()


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))


def _check_base(config: ModelConfig, folder: Path) -> None:
    """By content: ours say whose they are, others name a folder that may be here. A mere name is worth a warning."""
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as opened:
        base = (opened.metadata() or {}).get(BASE_KEY)
    named = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path") or ""
    here = ModelConfig(path=named) if named and _has_weights(Path(named)) else None
    if base:
        if base != base_fingerprint(config):
            raise UserError(
                f"the adapter in {folder} was trained on other base weights than those in {config.path}. Set "
                "model.path to the folder that the run was started with"
            )
    elif here is None:
        if named != config.path:
            logger.warning(
                "the adapter in %s says that it is for %s, and model.path is %s: nothing here tells whether these are "
                "the same weights. On others its scores mean nothing",
                folder,
                named or "no base in particular",
                config.path,
            )
    elif not Path(named).samefile(config.path) and base_fingerprint(here) != base_fingerprint(config):
        raise UserError(
            f"the adapter in {folder} is for the model in {named}, which holds other weights than {config.path}. Set "
            f"model.path={named}"
        )


def _check_fits(config: ModelConfig, folder: Path) -> None:
    """An adapter from elsewhere does not say which base it is for, and PEFT passes over layers that are not there."""
    from safetensors import safe_open

    modules = dict(skeleton(config).named_modules())
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (no mapping)
    for name, shape in shapes.items():
        part = _PART.fullmatch(name)
        if part is None:  # of another kind: PEFT knows
            continue
        side = 1 if part[2] == "A" else 0  # A reads what the layer reads, B writes what it writes
        weight = getattr(modules.get(part[1]), "weight", None)
        if weight is None or weight.shape[side] != shape[side]:
            here = "there is none" if weight is None else f"it is {weight.shape[side]} wide"
            raise UserError(
                f"the adapter in {folder} is for another model than the one in {config.path}: it has a layer "
                f"{part[1]}, {shape[side]} wide, and here {here}. Set model.path to the model that it was trained on"
            )


def _lora_config(spec: AdapterSpec) -> Any:
    """No dropout and no bias: with them the learner's log-probs would not be the engine's."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.target_modules),
        lora_dropout=0.0,
        bias="none",
    )
