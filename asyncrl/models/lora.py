"""Low-rank adapters (LoRA, arXiv 2106.09685) with PEFT: which layers get one, on a model, and as a PEFT folder.

Adapters are fp32 on both sides and on the wire, whatever the base model's dtype: an update of AdamW is often smaller
than a bf16 weight can show, and the engine then computes exactly what the learner does. Modules that are trained whole
beside them have the base's dtype, and fp32 masters.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl.config.parts import ROLLOUT_WEIGHTS
from asyncrl.config.sections import LoraConfig, ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import ADAPTER_CONFIG, base_fingerprint, open_weights, read_json
from asyncrl.models.loading import has_vision, load_model, skeleton
from asyncrl.models.parts import part_of
from asyncrl.models.published import architecture_fingerprint
from asyncrl.models.small_copy import family_of
from asyncrl.plugins import implementation
from asyncrl.processing.lean_imports import import_peft
from protocol.messages import AdapterSpec

logger = logging.getLogger(__name__)
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_KEY = "base_fingerprint"
"""Key of the base weights' fingerprint in the metadata of ADAPTER_WEIGHTS."""
_PART = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")
"""A tensor in ADAPTER_WEIGHTS: of which layer, and which of the two."""
SLOT = "policy"
"""PEFT's name of the one adapter in a model. Its tensors change with the version; engines that know adapters by name
get a name of its own for each version."""


def resolve_adapter(config: ModelConfig) -> AdapterSpec | None:
    """None where the model itself is trained. Raises UserError for what no layer of the folder's model fits."""
    if not config.lora.rank:
        return None
    if find_spec("peft") is None:
        raise UserError(
            f"model.lora.rank is {config.lora.rank}, which needs the peft package on both sides. Install it: "
            "pip install 'asyncrl[learner,rollout]'"
        )
    model = skeleton(config.model_copy(update={"dtype": "float32"}))  # for its names, before `auto` is resolved
    if config.lora.vision_tower and not has_vision(model.config):
        raise UserError(
            f"model.lora.vision_tower is true, but {config.path} reads text only. Set model.lora.vision_tower=false"
        )
    whole = _whole_modules(model, config.lora)
    inside = tuple(f"{name}." for name in whole)
    return AdapterSpec(
        rank=config.lora.rank,
        alpha=config.lora.effective_alpha,
        target_modules=tuple(n for n in _targets(model, config.lora) if n not in whole and not n.startswith(inside)),
        modules_to_save=tuple(whole),
    )


def _whole_modules(model: Any, lora: LoraConfig) -> list[str]:
    """Names of the modules of model.lora.modules_to_save, in the order of the model; none inside another one.

    Raises UserError for what is no part of the connector: weights elsewhere may be tied, or are not computed by a call
    of their module."""
    parts = [name for name, module in model.named_modules() if part_of(name.split(".")) == "connector" and name]
    parts = [name for name in parts if any(True for _ in model.get_submodule(name).parameters())]
    outer = [name for name in parts if name.rpartition(".")[0] not in parts]
    chosen: set[str] = set()
    for wanted in lora.modules_to_save:
        found = outer if wanted == "connector" else [n for n in parts if n == wanted or n.endswith(f".{wanted}")]
        if not found:
            there = f"there {'is' if len(outer) == 1 else 'are'} {', '.join(outer)}" if outer else "it has no connector"
            raise UserError(
                f"model.lora.modules_to_save: {wanted!r} is no part of this model's connector: {there}. Other weights "
                "have adapters (model.lora.target_modules), or are trained whole with model.lora.rank=0"
            )
        chosen.update(found)
    return [n for n in parts if n in chosen and not any(n.startswith(f"{other}.") for other in chosen)]


def _targets(model: Any, lora: LoraConfig) -> list[str]:
    """Names in the order of the model."""
    output = model.get_output_embeddings()
    layers = [name for name, m in model.named_modules() if _is_linear(m) and m is not output]
    if not layers:
        raise UserError(
            f"model.lora.rank is {lora.rank}, and models of the family {model.config.model_type} have no linear layers "
            "that could have adapters. Set model.lora.rank=0"
        )
    allowed = layers if lora.vision_tower else [name for name in layers if part_of(name.split(".")) == "language_model"]
    wanted = lora.target_modules
    if wanted == "all-linear":
        return allowed
    if not wanted:
        raise UserError(f"model.lora.target_modules is empty. Name some of {_last_parts(allowed)}, or all-linear")
    patterns = {wanted: wanted} if isinstance(wanted, str) else {end: rf"(.*\.)?{re.escape(end)}" for end in wanted}
    chosen: set[str] = set()
    for text, pattern in patterns.items():
        try:
            found = [name for name in layers if re.fullmatch(pattern, name)]
        except re.error as problem:
            raise UserError(
                f"model.lora.target_modules is {text!r}, no regular expression ({problem}). For ends of names write a "
                "list: [q_proj, v_proj]"
            ) from problem
        if not set(found) & set(allowed):  # a misspelt name among good ones would go unnoticed
            tower = ", those of the vision tower with model.lora.vision_tower=true and model.freeze_vision_tower=false"
            raise UserError(
                f"model.lora.target_modules: {text!r} fits no linear layer that may have an adapter. There are "
                f"{_last_parts(allowed)}{tower if has_vision(model.config) and not lora.vision_tower else ''}"
            )
        chosen.update(found)
    return [name for name in allowed if name in chosen]


def _is_linear(module: nn.Module) -> bool:
    """True for a linear layer that computes no more than that: routers choose experts in theirs."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _last_parts(names: Collection[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def add_adapter(model: Any, spec: AdapterSpec, *, seed: int = 0) -> Any:
    """Add an adapter to the model and freeze the rest; return PEFT's wrapper of it.

    The adapter changes nothing yet; `seed` decides where its training begins. Raises UserError for layers that PEFT
    gives none in this family.
    """
    import_peft()
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, _lora_config(spec), adapter_name=SLOT, autocast_adapter_dtype=True)
        except ValueError as problem:
            raise UserError(
                f"PEFT gives layers of the family {model.config.model_type} no adapter: {problem} Name others of "
                f"{_last_parts(spec.target_modules)} in model.lora.target_modules"
            ) from None


def describe_adapter(model: nn.Module) -> str:
    """Names and numbers of the layers that an adapter is on, and the largest part of the language model without one."""
    adapted = Counter(
        name.partition(".lora_")[0].replace(".base_layer", "").rpartition(".")[2]
        for name, _ in model.named_parameters()
        if ".lora_A." in name
    )
    bare: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 2 and ".lora_" not in name and part_of(name.split(".")) == "language_model":
            bare[name.rpartition(".")[2]] += parameter.numel()
    said = ", ".join(f"{name} ({count})" for name, count in sorted(adapted.items()))
    fused = (
        f". Fused weights of experts: {', '.join(sorted(bare))}, {'with' if adapted['experts'] else 'without'} adapters"
    )
    saved = {
        name.partition(".modules_to_save.")[0] for name, _ in model.named_parameters() if ".modules_to_save." in name
    }
    whole = f"; trained whole: {', '.join(sorted(saved))}" if saved else ""
    return said + (fused if bare else "") + whole


def write_adapter_folder(
    folder: Path, spec: AdapterSpec, tensors: Iterable[tuple[str, torch.Tensor]], *, base: str = "", base_path: str = ""
) -> None:
    """Published tensors as a PEFT folder, which `PeftModel.from_pretrained` and vLLM's `LoRARequest` load.

    `base` is the base weights' fingerprint. Tensors are copied before this returns.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", BASE_KEY: base}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(contiguous, folder / ADAPTER_WEIGHTS, metadata=metadata)
    config = _lora_config(spec)
    config.base_model_name_or_path = base_path
    config.inference_mode = True
    # A set in PEFT, whose order would differ from one process to the next.
    described = {**config.to_dict(), "target_modules": list(spec.target_modules)}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True), encoding="utf-8")


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT folder, under their published names."""
    from safetensors.torch import load_file

    return load_file(folder / ADAPTER_WEIGHTS)


def is_adapter_folder(folder: Path) -> bool:
    return os.path.isfile(folder / ADAPTER_CONFIG)  # False where the folder may not be read, too


def load_policy(config: ModelConfig, folder: Path, quantization: str = "") -> Any:
    """The policy of `folder` as engines sample it: in `config.dtype`, of lower precision where `quantization` says so,
    and an adapter in fp32 beside its base, which is the model of `config`. Caps on scores and the like are computed.

    Raises UserError before anything is loaded if the adapter was trained on another base.
    """
    is_adapter = is_adapter_folder(folder)
    if is_adapter:
        check_adapter(config, folder)
    whole = config if is_adapter else config.model_copy(update={"path": str(folder)})
    model = load_model(whole, device=torch.device("cpu"), text_attention=family_of(whole).attention)
    if weights := ROLLOUT_WEIGHTS.find(quantization):
        implementation(weights.implementation)(model)
    if not is_adapter:
        return model
    import_peft()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=True)


def merge(adapted: Any) -> Any:
    """The base model of `adapted`, widened to fp32, with the adapter added into its weights.

    A 16-bit weight loses what is under half a step of its grid: merged in bf16, 77 % of the weights of a model of 135 M
    stayed as they were (docs/decisions/010-lora.md).
    """
    merged = adapted.float().merge_and_unload()
    for part in (merged.config, *(getattr(merged.config, name, None) for name in merged.config.sub_configs)):
        if part is not None:
            part.dtype = torch.float32
    return merged


def check_adapter(config: ModelConfig, folder: Path) -> None:
    """Raise UserError where the adapter of `folder` was trained on another base than the model of `config`."""
    _check_base(config, folder)
    _check_shapes(config, folder)


def _check_base(config: ModelConfig, folder: Path) -> None:
    """Compare base weights by content. An adapter without our fingerprint, for another folder, brings a warning."""
    with open_weights(folder / ADAPTER_WEIGHTS, "pt") as opened:
        base = (opened.metadata() or {}).get(BASE_KEY)
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or ""
    if base and base != base_fingerprint(config):
        raise UserError(
            f"the adapter in {folder} was trained on other base weights than those in {config.path}. Set "
            "model.path to the folder that the run was started with"
        )
    if not base and named != config.path:
        logger.warning(
            "the adapter in %s says that it is for %s, and model.path is %s: cannot verify that the base weights are "
            "the same; if not, results are invalid",
            *(folder, named or "no base in particular", config.path),
        )


def _check_shapes(config: ModelConfig, folder: Path) -> None:
    """Check that the adapter's layers fit the model: PEFT ignores missing ones, and a foreign adapter names no base."""
    model = skeleton(config)
    modules, whole = dict(model.named_modules()), model.state_dict()
    with open_weights(folder / ADAPTER_WEIGHTS, "pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (no mapping)
    for name, shape in shapes.items():
        if misfit := _misfit(name, shape, modules, whole):
            raise UserError(
                f"the adapter in {folder} is for another model than the one in {config.path}: {misfit}. Set model.path "
                "to the model that it was trained on"
            )


def _misfit(
    name: str, shape: Sequence[int], modules: Mapping[str, nn.Module], whole: Mapping[str, torch.Tensor]
) -> str:
    """How a tensor of an adapter does not fit a model of these modules and weights; empty if it does."""
    part = _PART.fullmatch(name)
    if part is None:  # of another kind, which PEFT knows, or of a module that is saved whole
        own = whole.get(name.removeprefix("base_model.model."))
        if own is None or list(own.shape) == list(shape):
            return ""
        return f"its {name} is {tuple(shape)}, and here it is {tuple(own.shape)}"
    side = 1 if part[2] == "A" else 0  # A reads what the layer reads, B writes what it writes
    layer = modules.get(part[1].replace(".base_layer", ""))
    if layer is not None and not hasattr(layer, "weight"):  # fused experts, several weights: PEFT knows
        return ""
    weight = getattr(layer, "weight", None)
    if weight is not None and weight.shape[side] == shape[side]:
        return ""
    here = "there is none" if weight is None else f"it is {weight.shape[side]} wide"
    return f"it has a layer {part[1]}, {shape[side]} wide, and here {here}"


def _lora_config(spec: AdapterSpec) -> Any:
    """PEFT configuration without dropout and bias: with them the learner's log-probs would not be the engine's."""
    import_peft()
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=list(spec.target_modules),
        modules_to_save=list(spec.modules_to_save) or None,
        lora_dropout=0.0,
        bias="none",
    )


def folder_fingerprint(config: ModelConfig) -> str:
    """`architecture_fingerprint` of a folder without loading its weights."""
    model, adapter = skeleton(config), resolve_adapter(config)
    if adapter is not None:
        add_adapter(model, adapter)
    return architecture_fingerprint(model, adapter)
