"""The rollout servers: engine, sampling, and how new weights arrive."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from asyncrl.config.section import Section


class RolloutConfig(Section):
    servers: int = Field(default=1, gt=0)
    """Rollout servers that `asyncrl train` starts on this machine; others may join from elsewhere at any time."""
    engine: Literal["hf", "vllm", "scripted"] = "hf"
    """Inference engine: `hf` (transformers, CPU or GPU), `vllm` (its own extra, CPU or GPU), or `scripted` (tests)."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Devices that the vllm engine spreads the model over."""
    sleep_level: Literal[1, 2] = 1
    """Treatment of the weights while an engine sleeps: 1 keeps them in host memory, 2 forgets those that are
    published (they are again before it is needed)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training samples; log-probs are of this distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample training completions from the most probable tokens of this mass; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample training completions from so many most probable tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens below this fraction of the most probable one's probability; 0 is off."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Log-probs that the engine returns: of the distribution it samples from; `raw`: before temperature and
    truncation."""
    max_concurrent_sequences: int = Field(default=256, gt=0)
    """Completions decoded together; more of them wait for their turn."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads; 0 means half of the cores when the learner shares the machine, and all of them in sync mode."""
    weight_update: Literal["recompute", "keep", "drain"] = "recompute"
    """New weights under running sequences: `recompute` their KV cache, `keep` the old one, or `drain` them first."""
    weights_channel: Literal["auto", "shm", "zmq", "nccl", "cuda_ipc"] = "auto"
    """Channel of new weights: mapped, over TCP, from GPU to GPU, or within one GPU; auto is the first that can work of
    cuda_ipc, nccl, shm, zmq, with gpu_memory.budget_gib of shm, zmq."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine as they are."""

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
