"""The sections of the two services: rollout; learner, with its optimisers, critic, reference and staleness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from asyncrl.config.parts import LEARNER_ENGINES, ROLLOUT_ENGINES, ROLLOUT_WEIGHTS, WEIGHT_CHANNELS
from asyncrl.config.sections import OpenSection, Section

OnStale = Literal["wait", "drop", "mask"]
Optimizer = Literal["adamw", "adamw_8bit"]


def meant_device(name: str, *, cuda: bool) -> str:
    """Resolve a device's name: `auto` is the first CUDA device where there are some (`cuda`), else the CPU; `cuda` is
    the first one."""
    if name == "auto" and not cuda:
        return "cpu"
    return "cuda:0" if name in ("auto", "cuda") else name


def meant_dtype(dtype: str, devices: Iterable[str], *, cuda: bool) -> str:
    """Resolve model.dtype: `auto` is bfloat16 where both sides are on GPUs, which compute it several times as fast as
    float32 and exactly enough on fp32 master weights; few CPUs have it at all."""
    if dtype != "auto":
        return dtype
    return "float32" if "cpu" in (meant_device(name, cuda=cuda) for name in devices) else "bfloat16"


class RolloutConfig(OpenSection):
    choices: ClassVar = {"engine": ROLLOUT_ENGINES, "weights_channel": WEIGHT_CHANNELS, "quantization": ROLLOUT_WEIGHTS}
    servers: int = Field(default=1, gt=0)
    """Rollout servers that `asyncrl train` starts on this machine; others may join from elsewhere at any time."""
    engine: str = "hf"
    """Inference engine: `hf` (transformers, CPU or GPU), or a plug-in's, such as `vllm`."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Devices that an engine such as vllm spreads the model over."""
    quantization: str = ""
    """Weights of lower precision that completions are sampled with, a plug-in's name; empty: the learner's own. The
    policy that samples is then this one, and algorithm.correction has to be on."""
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
    max_concurrent_sequences: int = Field(default=256, gt=0)
    """Completions decoded together; more of them wait for their turn."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1`, ... `asyncrl train` gives servers of `auto` and `cuda` GPUs of their own: not
    the learner's, and tensor_parallel_size of them each."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads; 0 means half of the cores when the learner shares the machine, and all of them in sync mode."""
    weight_update: Literal["recompute", "keep", "drain"] = "recompute"
    """New weights under running sequences: `recompute` their KV cache, `keep` the old one, or `drain` them first."""
    weights_channel: str = "auto"
    """Channel of new weights: `shm` (mapped), `zmq` (over TCP), or a plug-in's; `auto` is the first that can work,
    those between GPUs first, and with gpu_memory.budget_gib without them."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the engine as they are."""

    def precision(self, base: str) -> str:
        """Name of the weights of lower precision that completions are sampled with; `base`: model.quantization."""
        return self.quantization or (base if self.engine == "hf" else "")

    @property
    def uses_device_channel(self) -> bool:
        """Whether weights_channel names one between device memories."""
        return bool(WEIGHT_CHANNELS[self.weights_channel].receiver)

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW, which steps float32 master weights whatever model.dtype is."""
    vision_tower_lr: float = Field(default=0.0, ge=0)
    """Peak learning rate of the vision tower, which warms up and falls as lr does; 0 is lr."""
    connector_lr: float = Field(default=0.0, ge=0)
    """Peak learning rate of the connector, which warms up and falls as lr does; 0 is lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moment estimates."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of AdamW."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Fraction of lr at which linear and cosine end."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this."""


class CriticOptimConfig(OptimConfig):
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW, which steps float32 master weights whatever model.dtype is."""


class CriticConfig(Section):
    """The critic of estimators that need one (`algorithm.adv_estimator: gae`): a model of its own with a value head."""

    path: str = ""
    """Folder that it starts from: a model of the policy's family, or a sequence classifier of one label (a reward
    model), whose score head then becomes the value head. Empty means `model.path`, and values that begin at 0."""
    optim: CriticOptimConfig = CriticOptimConfig()
    clip_range: float = Field(default=0.5, ge=0)
    """Values that have left the step's first ones by more than this get no gradient; 0 clips nothing."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the beginning in which the critic alone is trained, on what the initial policy samples. With the default
    `algorithm.gae.critic_lam` of 1 and without discount its targets are then the plain returns of that policy (value
    pre-training, VC-PPO, arXiv 2503.01491)."""


class ReferenceConfig(Section):
    """The reference policy of `algorithm.kl_loss_coef` and `algorithm.kl_reward_coef`: a frozen copy of the model. Of a
    model with adapters it is the model without them, at no cost, unless there is a path."""

    path: str = ""
    """Folder of its weights, a model of the policy's family; empty means `model.path`."""
    reset_every_steps: int = Field(default=0, ge=0)
    """Make it the policy again after so many steps (ProRL, arXiv 2505.24864); 0 means never."""
    reset_optimizer: bool = False
    """Reset AdamW's moments of the policy together with the reference (ProRL). The learning rate goes on."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Share of itself that it keeps in each step, in which it moves towards the policy: 0.99 follows some hundred steps
    behind. 0 means that it does not move."""
    offload: bool = False
    """Keep its weights in pinned host memory while nothing looks at it, for two copies over the bus each step. Only on
    a GPU. The memory plan says what it frees: while it scores, it has the place of the gradients."""

    @property
    def moves(self) -> bool:
        return bool(self.reset_every_steps or self.ema)

    @model_validator(mode="after")
    def _moves_one_way(self) -> ReferenceConfig:
        if self.reset_every_steps and self.ema:
            raise ValueError(
                f"reference.reset_every_steps is {self.reset_every_steps} and reference.ema is {self.ema:g}: a "
                "reference that follows the policy needs no reset. Set one of them to 0"
            )
        return self


class LearnerConfig(OpenSection):
    choices: ClassVar = {"engine": LEARNER_ENGINES}
    max_staleness: int = Field(default=2, ge=0)
    """Oldest policy version a trained token may come from, in versions behind the learner's. 0 = exactly on-policy. A
    method such as algorithm.adaptive_staleness may keep to a smaller bound."""
    on_stale: OnStale = "wait"
    """Treatment of a group that is not there before it gets older than max_staleness: `wait` for it, go on and `drop`
    it (its prompt is issued again), or go on and `mask` its old tokens (not where algorithm.correction looks at whole
    trajectories). The last two favour short completions (length_bias)."""
    engine: str = "torch"
    """Training engine: `torch` keeps the whole model on one device, `fsdp2` (fully sharded data parallelism) a part of
    it on each of num_processes; or a plug-in's."""
    num_processes: int = Field(default=1, gt=0)
    """Ranks: processes that train together, each on a GPU of its own, or on the CPU. The learner starts them on its
    machine; under torchrun its processes are the ranks."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimiser state in host memory, and step there: a GPU holds 2 bytes of a
    bfloat16 parameter in the place of 18. With fsdp2 the weights, too: the GPU has one layer's at a time."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1`, ..."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads of a rank; 0 is all cores in sync mode, else half of them, divided by num_processes: all of them
    for one process that is slower than the sampling, chosen at its first step and kept."""
    gradient_checkpointing: bool | int = Field(default=False, ge=0)
    """Keep each layer's input only and compute the layer again in the backward pass: less memory, a third more time. A
    number: the language model's first so many layers alone, which `true` becomes by what gpu_memory.budget_gib lets."""
    compile_layers: bool = False
    """Compile norms and gated layers (torch.compile): fewer passes over a GPU's memory, a minute more at the first
    step, and in 16 bits other roundings than the engine's. Needs a C++ compiler."""
    vision_features_mib: int = Field(default=512, ge=0)
    """Host memory of each rank for features of images, which passes, updates and epochs then compute once. Used where
    neither vision tower nor connector is trained: LoRA, or freeze_vision_tower with freeze_connector. 0: none are
    kept."""
    optimizer: Optimizer = "adamw"
    """`adamw` is torch's, with moments in float32; `adamw_8bit` bitsandbytes' (its own extra, engine torch), whose
    moments take 2 bytes of a parameter in the place of 8, and which takes longer on a CPU. Also the critic's."""
    optim: OptimConfig = OptimConfig()
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the next group before the run stops with a reason, also for one that a filter then drops. Until
    a first group has arrived in a process, half of it is the time after which a ticket goes to another server, too."""

    @property
    def is_divided(self) -> bool:
        """Whether weights are in parts on ranks, also where these are one process."""
        return LEARNER_ENGINES[self.engine].divides_model

    @property
    def offloads_masters(self) -> bool:
        """Whether a whole model's master weights, gradients and moments are in host memory."""
        return self.cpu_offload and not self.is_divided
