"""New weights in vLLM's worker process, from a file in shared memory or on this device already, as a backend of vLLM's
weight-transfer API. The process imports this file by name: so it imports as little as possible.
"""

from __future__ import annotations

import logging
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from asyncrl.devices.device import free_caches
from asyncrl.devices.host_copies import copy_into
from asyncrl.plugins import implementation
from asyncrl_plugins.vllm.engine_process import BACKEND, belong_to_owner, import_modules
from rollout_server.engines.arrived_weights import ModelProcess

# --- weights --------------------------------------------------------------------------------


@dataclass
class WeightUpdate(WeightTransferUpdateInfo):
    path: str
    """Path of the file; empty: the weights are on this device."""
    staged: str
    """`ArrivedWeights.staged`, where there is no file."""
    total_bytes: int
    tensors: list[tuple[str, str, list[int], int, int]]
    """Tensors in the file: name, torch dtype without its prefix, shape, offset and size in bytes of each."""


class WeightTransfer(WeightTransferEngine[WeightTransferInitInfo, WeightUpdate]):
    """Loads a whole publication, layer by layer: bytes go from where they are into the model.

    Plain `load_weights` will not do: on a CPU vLLM packs linear layers after loading and frees what it packed. The
    layerwise reload makes a layer's parameters anew, fills them, packs them, and copies that over the packed ones.
    Checksums have been verified: of a file by the rollout server, which keeps it as it is until this returns, else by
    the channel.
    """

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any):
        super().__init__(config, vllm_config, device, model)
        self.process = ModelProcess(torch.device(device), vllm_config.parallel_config.rank)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        model: Any = self.model
        self.__tied = tied_parameters(model)  # before the reload, which takes them apart
        initialize_layerwise_reload(model)

    def receive_weights(self, update_info: WeightUpdate) -> None:
        model: Any = self.model

        tied: dict[str, list[torch.Tensor]] = {_layer_and_name(first): [] for first in self.__tied.values()}
        """Tensors that are published once and have a further name here, by the end of the first one."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            mapped = mapped_tensors(update_info) if update_info.path else None
            found = implementation(update_info.staged)(self.process) if mapped is None else mapped
            for name, tensor in found:
                there = on_device(tensor, self.process.device) if update_info.path else tensor
                if (end := _layer_and_name(name)) in tied:
                    tied[end].append(there)
                yield known_name(model, name), there

        expected = {name for name, _ in model.named_parameters()}
        loaded = set(model.load_weights(tensors()))
        for other, first in self.__tied.items():
            # vLLM skips the further name, whose layer may keep a packed copy.
            for tensor in tied[_layer_and_name(first)]:
                parameter = model.get_parameter(other)
                parameter.weight_loader(parameter, tensor)
                loaded.add(other)
        missing = expected - loaded
        if missing:  # vLLM itself would keep the old values and only warn
            raise ValueError(f"the publication does not fill {len(missing)} parameters, such as {sorted(missing)[:3]}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy of a mapped tensor through pinned memory that is kept; on a CPU the tensor itself.

    A GPU reads mapped memory slowly, pinning each tensor anew takes longer than its copy, and vLLM, which keeps what it
    is given until it has a whole layer, stands still meanwhile.
    """
    if device.type == "cpu":
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy_into(made, tensor)
    return made


def tied_parameters(model: Any) -> dict[str, str]:
    """Each further name of a parameter -> its first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def known_name(model: Any, name: str) -> str:
    """A published name as vLLM's model takes it: transformers 5 has taken a level out of the towers of CLIP and SigLIP
    that vLLM's LLaVA still has."""
    tower = "model.vision_tower."
    nested = name.startswith(tower) and hasattr(getattr(model, "vision_tower", None), "vision_model")
    return f"{tower}vision_model.{name.removeprefix(tower)}" if nested else name


def _layer_and_name(name: str) -> str:
    """Last two parts of a parameter name (`.embed_tokens.weight`), equal in vLLM and transformers."""
    return "." + ".".join(name.split(".")[-2:])


def mapped_tensors(update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    """Read-only views of the file; the mapping goes with the last of them."""
    fd = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        view = mmap.mmap(fd, update.total_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, dtype, shape, offset, nbytes in update.tensors:
            if nbytes == 0:
                yield name, torch.empty(shape, dtype=getattr(torch, dtype))
                continue
            raw = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)
            yield name, raw.view(getattr(torch, dtype)).reshape(shape)


class WorkerExtension:
    """vLLM's `worker_extension_cls`: part of every worker, which imports this file before it loads the model."""

    def run_in_model_process(self: Any, function: str, *arguments: Any) -> Any:
        """Call a function of a plug-in, as `ModelProcesses.run` says."""
        return implementation(function)(self.weight_transfer_engine.process, *arguments)

    def free_caches(self: Any) -> None:
        free_caches(torch.device(self.device))

    def free_device_bytes(self: Any) -> int:
        """Free memory of this worker's GPU; 0 on a CPU."""
        device = torch.device(self.device)
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

    def quantized_layers(self: Any) -> int:
        return len(self.vllm_config.quant_config.quantized_layers)

    def layers_without_slot(self: Any) -> list[str]:
        """Parts of the adapter in the slot that no layer here takes: vLLM drops them without a message."""
        manager = self.model_runner.lora_manager._adapter_manager
        (adapter,) = manager.list_adapters().values()
        return sorted(set(adapter.loras) - set(manager.modules))


# Modules without parameters of their own are a warning at every update. What matters is checked in receive_weights.
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightTransfer)
belong_to_owner()
import_modules()
