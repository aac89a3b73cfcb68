"""Parts of ours that vLLM's processes import, with the installed vLLM and stand-ins for a GPU: not run on one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl_plugins.vllm import start

pytest.importorskip("vllm")
ASKS = """
import importlib, sys
import vllm.platforms
asked = []
platform = type(vllm.platforms.current_platform)
for name in ("get_device_capability", "has_device_capability", "is_device_capability"):
    setattr(platform, name, staticmethod(lambda *given, **named: asked.append(given)))
import vllm.v1.engine.async_llm
before = len(asked)
importlib.import_module(sys.argv[1].partition(":")[0])
print(len(asked) - before, "asyncrl_plugins.vllm.worker" in sys.modules)
"""


def test_the_front_end_asks_no_device_for_its_abilities() -> None:
    """There no device is visible, and vLLM's layers ask for one as they are imported."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS, start.BANNED_TOKENS], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["0", "False"]


class Model:
    """A tied model as vLLM has it: it takes published names and skips those of tied copies."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.parameters = {name: SimpleNamespace(weight_loader=self._load) for name in ("lm_head.weight",)}

    def _load(self, parameter: Any, tensor: torch.Tensor) -> None:
        self.loaded["lm_head.weight"] = tensor

    def named_parameters(self) -> list[tuple[str, None]]:
        return [(name, None) for name in ("embed_tokens.weight", "norm.weight")]

    def get_parameter(self, name: str) -> Any:
        return self.parameters[name]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        for name, tensor in weights:
            self.loaded[name.removeprefix("model.")] = tensor
        return list(self.loaded)


def test_a_tied_weight_is_copied_once_and_every_tensor_through_pinned_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl_plugins.vllm import worker

    published = {"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}
    copied: list[tuple[Any, torch.Tensor]] = []
    monkeypatch.setattr(worker, "mapped_tensors", lambda update: iter(published.items()))
    monkeypatch.setattr(worker, "copy_into", lambda own, given: copied.append((own, given)))
    model = Model()
    transfer: Any = worker.WeightTransfer.__new__(worker.WeightTransfer)
    transfer.model, transfer.process = model, SimpleNamespace(device=torch.device("meta"))
    transfer._WeightTransfer__tied = {"lm_head.weight": "embed_tokens.weight"}
    transfer.receive_weights(SimpleNamespace(path="/dev/shm/weights", staged=""))
    assert [given is tensor for (_, given), tensor in zip(copied, published.values(), strict=True)] == [True, True]
    assert model.loaded["lm_head.weight"] is model.loaded["embed_tokens.weight"]
    assert all(tensor.device.type == "meta" for tensor in model.loaded.values())


def test_on_a_cpu_and_of_a_staged_version_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl_plugins.vllm import worker

    tensor = torch.ones(3)
    assert worker.on_device(tensor, torch.device("cpu")) is tensor
    monkeypatch.setattr(worker, "copy_into", lambda own, given: pytest.fail("it is on the device"))
    staged = [("model.embed_tokens.weight", torch.ones(4, 2)), ("model.norm.weight", torch.ones(2))]
    monkeypatch.setattr(worker, "implementation", lambda name: lambda process: iter(staged))
    model = Model()
    transfer: Any = worker.WeightTransfer.__new__(worker.WeightTransfer)
    transfer.model, transfer.process = model, SimpleNamespace(device=torch.device("meta"))
    transfer._WeightTransfer__tied = {"lm_head.weight": "embed_tokens.weight"}
    transfer.receive_weights(SimpleNamespace(path="", staged="module:tensors"))
    assert model.loaded["lm_head.weight"] is staged[0][1]


def test_the_installed_vllm_knows_what_it_is_told_on_a_gpu(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import SchedulerConfig  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    told = start.engine_arguments(make_config(rollout={"engine": "vllm"}), cuda=True, text_config=None, banned=[])
    made = AsyncEngineArgs(**told)
    assert made.max_num_batched_tokens == 8192
    step = SchedulerConfig.default_factory(max_num_batched_tokens=made.max_num_batched_tokens)
    assert step.max_num_encoder_input_tokens == step.encoder_cache_size == 8192, "images have the same room"
    assert made.cudagraph_capture_sizes == told["cudagraph_capture_sizes"]
