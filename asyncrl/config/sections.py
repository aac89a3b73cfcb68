"""The main sections of the configuration: model, data, reward, rollout, learner. Each checks its own values.

The text below a field is also its line in `asyncrl config-reference`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

PARTS = ("vision_tower", "connector", "language_model")
"""Parts of a vision-language model, of which each can be left out of training."""
_ENDPOINT = re.compile(r"tcp://(\[[^\]]+\]|[^:\[\]/]+):\d{1,5}")
OnStale = Literal["wait", "drop", "mask"]
Optimizer = Literal["adamw", "adamw_8bit"]
CheckpointFormat = Literal["portable", "deepspeed"]


class Section(BaseModel):
    """Frozen, without unknown keys or infinite numbers; the text below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept an empty section (its defaults) and names with commas for a list of text; `true` is no number."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if value is None and isinstance(annotation, type) and issubclass(annotation, Section):
            return {}
        if isinstance(value, str) and get_origin(annotation) is tuple and annotation == tuple[str, ...]:
            return [name.strip() for name in value.split(",") if name.strip()]
        if isinstance(value, bool) and annotation in (int, float):
            raise PydanticCustomError("bool_as_number", "expected a number")
        return value


def check_endpoints(key: str, values: Sequence[str]) -> None:
    """Raise ValueError for what is no `tcp://host:port`, or is named twice."""
    for value in values:
        if not _ENDPOINT.fullmatch(value):
            raise ValueError(f"{key} has {value!r}, which is no endpoint such as tcp://10.0.0.9:7603")
        if values.count(value) > 1:
            raise ValueError(f"{key} names {value} twice")


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): only they are trained, and only they travel."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the model itself."""
    alpha: int = Field(default=0, ge=0)
    """The adapters' output is scaled by alpha / rank; 0 means twice the rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers with an adapter: `all-linear`, a list of ends of their names, or one regular expression of whole
    names. Never the output layer."""
    vision_tower: bool = False
    """Let target_modules reach the vision tower and the connector, too."""

    @property
    def effective_alpha(self) -> int:
        return self.alpha or 2 * self.rank


class ModelConfig(Section):
    path: str
    """Hugging Face folder with model, tokenizer and processor, or `org/name` (or `org/name@revision`) of its hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights on both sides and on the wire; auto is bfloat16 where learner and rollout server are on GPUs,
    else float32. Weights of 16 bits are trained on float32 master weights, in float16 with an adaptive loss scale;
    adapters are always float32."""
    float32_head: bool = False
    """Compute the output layer in float32 whatever dtype is, on both sides (MiniMax-M1, arXiv 2506.13585): logits are
    rounded to 16 bits otherwise. Not with vLLM, which computes them in dtype."""
    freeze_vision_tower: bool = True
    """Leave the vision tower (not the connector) out of training; with lora, only adapters are trained anyway."""
    freeze_connector: bool = False
    """Leave the connector, from the tower's features to the language model, out of training."""
    freeze_language_model: bool = False
    """Leave the language model with its embeddings and output layer out of training: what remains is the connector,
    and the vision tower where that is not frozen."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    min_pixels: int = Field(default=0, ge=0)
    """Pixels that a smaller image is enlarged to; 0 is what the model folder says. Images of the Qwen-VL families, no
    videos."""
    max_pixels: int = Field(default=0, ge=0)
    """Pixels that a larger image is reduced to; 0 is what the model folder says. Each (2 × patch size)² of them are a
    token."""
    lora: LoraConfig = LoraConfig()

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """Parts of the model that `freeze_*` leave out of training."""
        return tuple(part for part in PARTS if getattr(self, f"freeze_{part}"))

    @property
    def pixel_limits(self) -> dict[str, int]:
        """`min_pixels` and `max_pixels`, where they are set."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: pixels for name, pixels in limits.items() if pixels}

    @model_validator(mode="after")
    def _vision_tower_is_free(self) -> ModelConfig:
        if self.lora.rank and self.lora.vision_tower and self.freeze_vision_tower:
            raise ValueError(
                "model.lora.vision_tower is true, but model.freeze_vision_tower (its default) leaves the vision tower "
                "out of training. Set model.freeze_vision_tower=false, or model.lora.vision_tower=false"
            )
        return self


class CurriculumConfig(Section):
    """Order and frequency of visits to the training rows."""

    order_by: str = ""
    """Column of numbers by which rows are visited, the smallest (easiest) first, in every epoch; equal ones as
    data.shuffle says. Empty means no such order."""
    descending: bool = False
    """Largest number of order_by first, as for a column of pass rates."""
    visits: Literal["all", "greso", "pass_rate"] = "all"
    """Rows of an epoch that are visited: `all`; `greso`, which passes over rows whose latest groups had no spread
    (arXiv 2506.02177); `pass_rate`, which prefers rows whose pass rate is near `target`. A run whose trainer.max_steps
    is 0 then ends with its epochs, after fewer steps."""
    component: str = ""
    """Component of the reward that visits are decided by, right being 1; empty means the accuracy."""
    explore: float = Field(default=0.5, gt=0, lt=1)
    """greso: probability at the start of visiting a row whose last group had no spread."""
    easy_score: float = 0.98
    """greso: mean score from which a group without spread is easy, and below which it is hard."""
    target_easy: float = Field(default=1 / 12, ge=0, le=1)
    """greso: share of easy groups below which more such rows are visited, and else fewer."""
    target_hard: float = Field(default=1 / 6, ge=0, le=1)
    """greso: share of hard groups below which more such rows are visited, and else fewer."""
    target: float = Field(default=0.5, ge=0, le=1)
    """pass_rate: mean score of the rows that are visited most."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """pass_rate: probability of visiting the rows that are farthest from the target."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """pass_rate: weight of a row's earlier groups in its pass rate, beside its latest."""


class DataConfig(Section):
    train_files: tuple[str, ...]
    """Parquet, JSONL or CSV files, image folders, or `org/name@split` of the `datasets` library."""
    val_files: tuple[str, ...] = ()
    """Held-out rows, never trained on; same kinds as train_files."""
    prompt_key: str = "prompt"
    """Column with the question: a string (which may contain `<image>` and `<video>`) or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer, handed to the rewards."""
    image_key: str = "images"
    """Column with 0 to N images per row: paths, bytes, base64, `data:` URIs or a list of them. A missing column means
    text only."""
    video_key: str = "videos"
    """Column with 0 to N videos per row, each a list of frames: paths or bytes of images, no video files."""
    video_fps: float = Field(default=2.0, gt=0)
    """Frames per second of the videos in video_key: places them in time for models that ask (Qwen2.5-VL, Qwen3-VL)."""
    target_key: str = "target"
    """Column with the demonstration that `asyncrl sft` imitates and algorithm.demonstrations puts into groups, where a
    row without one simply has none."""
    image_dir: str = ""
    """Base of relative image and frame paths; empty means the folder of the data file."""
    format_prompt: str = ""
    """Jinja template of the question, or the file that holds it; it sees `content` and every column. Empty means the
    question as it is."""
    system_prompt: str = ""
    """System message before the question; empty means none."""
    max_prompt_length: int = Field(default=2048, gt=0)
    """Tokens, image tokens included. A row with a longer prompt is a bad row. What an environment opens with
    counts, too: one that makes a prompt longer than this ends the run."""
    max_response_length: int = Field(default=512, gt=0)
    """Most tokens sampled per completion."""
    on_bad_row: Literal["skip", "stop"] = "skip"
    """Rows that cannot be read, rendered, processed or sent, are too long, or have no answer where others have one, all
    found before a run begins: `skip` leaves them out (counted, named in bad_rows.jsonl), `stop` refuses to begin."""
    shuffle: bool = True
    """Visit the training rows in a seeded random order, fresh each epoch."""
    curriculum: CurriculumConfig = CurriculumConfig()
    max_train_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""
    max_val_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""


class RewardFunctionConfig(Section):
    function: str
    """Built-in name (docs/rewards.md), `file.py:function` or `package.module:function`, which takes a RewardSample or,
    as in TRL, `completions` and columns as lists, and returns a number or a dict of them."""
    weight: float = 1.0
    """Weight of this component in the sum."""
    name: str = ""
    """Name of the curve, and key of the number in a returned dict; empty means the function's own name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the function."""
    group: bool = False
    """Call it once with all completions of a prompt, when the last is there: it takes a list of RewardSamples, or TRL's
    lists, and returns a list."""
    shapes: str = ""
    """Name of a component above, or `sum` for the weighted sum of all above: the function gets its value as `score`,
    and what it returns takes the place of it in the sum."""


class RewardConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Components; their weighted sum is the reward, beside what the turns of an environment earn. One that another one
    shapes is only shown. May be empty where an environment rewards by itself (a class or an adapter; tools and MCP
    servers do not)."""
    accuracy: str = ""
    """Component reported as held-out accuracy; empty means the first, or the whole reward where there is none."""
    timeout_s: float = Field(default=15.0, gt=0)
    """Longest time for all components of one sample, or of one group; then its worker is killed and the trajectory is
    `timed_out`. A reward model and a judge have their own (kwargs.timeout_s)."""
    workers: int = Field(default=2, gt=0)
    """Worker processes."""
    pool: tuple[str, ...] = ()
    """Where they run: `tcp://host:7603` of one `asyncrl pool` or several; empty: beside the rollout server, as reward
    models and judges always do."""
    memory_limit_mib: int = Field(default=2048, gt=0)
    """Address space of one worker (each process that it starts gets the same)."""

    @model_validator(mode="after")
    def _known_accuracy(self) -> RewardConfig:
        names = self.component_names
        if len(set(names)) != len(names):
            raise ValueError(f"two reward components have one name: {names}. Set `name` on one of them")
        if self.accuracy and self.accuracy not in names:
            there = f"the components are {names}" if names else "there are no components (reward.functions)"
            raise ValueError(f"reward.accuracy is {self.accuracy!r}, but {there}")
        check_endpoints("reward.pool", self.pool)
        _shaped(self.functions)
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each component in the sum: 0 for one in whose place another one counts."""
        counting, _ = _shaped(self.functions)
        return dict.fromkeys(self.component_names, 0.0) | counting

    @property
    def shaped(self) -> dict[str, dict[str, float]]:
        """The weighted components whose sum each component shapes, by its name; empty for one that shapes none."""
        return _shaped(self.functions)[1]

    @property
    def component_names(self) -> tuple[str, ...]:
        return tuple(component_name(function) for function in self.functions)

    @property
    def accuracy_component(self) -> str:
        """Name of the component that is the accuracy; empty: the whole reward, there being no components."""
        return self.accuracy or next(iter(self.component_names), "")


def component_name(function: RewardFunctionConfig) -> str:
    """The curve's name: the given one, or what stands after the last `:` of the function."""
    return function.name or function.function.rsplit(":", 1)[-1]


def _shaped(functions: Sequence[RewardFunctionConfig]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Weights of the components that count in the sum, and what each component shapes. Raises ValueError."""
    counting: dict[str, float] = {}
    shaped: dict[str, dict[str, float]] = {}
    for function in functions:
        name, target = component_name(function), function.shapes
        if target == "sum":
            shaped[name], counting = counting, {}
        else:
            shaped[name] = {target: 1.0} if target else {}
        if not shaped[name] and target:
            raise ValueError(f"reward component {name!r} shapes the sum of the components above it, and there are none")
        if target and target != "sum":
            if target not in counting:
                choices = f"it can shape {', '.join([*counting, 'sum'])}" if counting else "there are none"
                raise ValueError(
                    f"reward component {name!r} shapes {target!r}, which is no component above it that still counts in "
                    f"the sum: {choices}"
                )
            if counting.pop(target) not in (0.0, 1.0):
                raise ValueError(
                    f"reward component {name!r} takes the place of {target!r} in the sum, so the weight of {target!r} "
                    f"would be lost: give it to {name!r}"
                )
        counting[name] = function.weight
    return counting, shaped


Quantization = Literal["none", "fp8", "int8"]


class RolloutConfig(Section):
    servers: int = Field(default=1, gt=0)
    """Rollout servers that `asyncrl train` starts on this machine; others may join from elsewhere at any time."""
    engine: Literal["hf", "vllm", "sglang", "scripted"] = "hf"
    """Inference engine: `hf` (transformers, CPU or GPU), `vllm` (its own extra, CPU or GPU), `sglang` (an environment
    of its own; run on CPUs), or `scripted` (tests)."""
    sglang_python: str = ""
    """Python of SGLang's environment; empty means that of `.venv-sglang` beside the environment of this process, which
    `make install-sglang` makes."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Devices that the vllm engine spreads the model over."""
    quantization: Quantization = "none"
    """Weights that completions are sampled with: `fp8` (e4m3) or `int8`, a scale for each output channel, made anew
    from every version, in the linear layers of the language model without its output layer. The policy that samples is
    then this one, and algorithm.correction has to be on. `vllm` holds them in 8 bits, and rounds what goes into these
    layers, too; `hf` holds the rounded values in model.dtype, and saves nothing; `sglang` has none."""
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
    """Completions decoded together; more of them wait for their turn. So many of the longest rows have the memory
    that the `hf` engine's running and parked rows share."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1`, ... `asyncrl train` gives servers of `auto` and `cuda` GPUs of their own: not
    the learner's, and tensor_parallel_size of them each."""
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
    """With each of these resets begin AdamW's moments of the policy anew, too (ProRL). The learning rate goes on."""
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
        if self.reset_optimizer and not self.reset_every_steps:
            raise ValueError(
                "reference.reset_optimizer is true and reference.reset_every_steps is 0: the optimiser is reset with "
                "the reference, which never is. Set reference.reset_every_steps=100, or leave it out"
            )
        return self


class AdaptiveStalenessConfig(Section):
    """Rules by which `learner.max_staleness: auto` moves the bound, from each step's raw token ratios."""

    min: int = Field(default=1, ge=0)
    """Smallest bound, and the one to start from."""
    max: int = Field(default=8, gt=0)
    """Largest bound."""
    ess_low: float = Field(default=0.9, gt=0, lt=1)
    """Effective sample size below which a step speaks for a smaller bound."""
    ess_high: float = Field(default=0.97, gt=0, lt=1)
    """Effective sample size above which, with a mismatch KL below kl_low, a step speaks for a larger bound."""
    kl_low: float = Field(default=0.01, gt=0)
    """Mismatch KL in nats per token, see ess_high."""
    kl_high: float = Field(default=0.04, gt=0)
    """Mismatch KL (k3, nats per token) above which a step speaks for a smaller bound."""
    patience: int = Field(default=3, gt=0)
    """Steps in a row that must agree before the bound moves by one."""

    @model_validator(mode="after")
    def _ordered(self) -> AdaptiveStalenessConfig:
        for low, high in (("min", "max"), ("ess_low", "ess_high"), ("kl_low", "kl_high")):
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"learner.adaptive_staleness.{low} ({getattr(self, low)}) must be below "
                    f"learner.adaptive_staleness.{high} ({getattr(self, high)})"
                )
        return self


class LearnerConfig(Section):
    max_staleness: int | Literal["auto"] = 2
    """Oldest policy version a trained token may come from, in versions behind the learner's. 0 = exactly on-policy;
    auto = moved by learner.adaptive_staleness."""
    adaptive_staleness: AdaptiveStalenessConfig = AdaptiveStalenessConfig()
    on_stale: OnStale = "wait"
    """When a group is not there before it gets older than max_staleness: `wait` for it, go on and `drop` it (its
    prompt is issued again), or go on and `mask` its old tokens (not where algorithm.correction looks at whole
    trajectories). The last two favour short completions (length_bias)."""
    move_stragglers: bool = False
    """Where the next step waits for a group, and a server stands free that is clearly faster than the one that has it,
    let the group go on there, as tokens. For servers that become slow in the middle of a run; refused on-policy
    (max_staleness 0) and with an environment."""
    divide_groups: bool = False
    """Divide a group that would wait for places on one server among several that have places, also one that moves.
    What they sample comes together again on one of them, which scores it. Refused on-policy (max_staleness 0) and with
    an environment."""
    engine: Literal["torch", "fsdp2", "deepspeed"] = "torch"
    """Training engine: `torch` keeps the whole model on one device, `fsdp2` (fully sharded data parallelism) a part of
    it on each of num_processes, `deepspeed` (ZeRO, its own extra) what zero_stage says."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: what is divided over num_processes: 1 AdamW's state with its masters, 2 gradients, too, 3 the weights,
    too."""
    checkpoint_format: CheckpointFormat = "portable"
    """Masters and moments in a checkpoint: `portable`, which any engine on any number of ranks continues from, or
    `deepspeed`, DeepSpeed's own files for its tools, from which the same zero_stage on as many ranks goes on. Those are
    not written while training goes on (trainer.save_async=false)."""
    num_processes: int = Field(default=1, gt=0)
    """Ranks: processes that train together, each on a GPU of its own, or on the CPU. The learner starts them on its
    machine; under torchrun its processes are the ranks."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimiser state in host memory, and step there: a GPU holds 2 bytes of a
    bfloat16 parameter in the place of 18. With fsdp2, and deepspeed at stage 3, the weights, too: the GPU has one
    layer's at a time."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1`, ..."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads of a rank; 0 means half of the cores when the servers share the machine, divided by num_processes,
    and all of them in sync mode."""
    gradient_checkpointing: bool = False
    """Keep each layer's input only and compute the layer again in the backward pass: less memory, a third more time."""
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

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _bound_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise ValueError(f"learner.max_staleness is {value!r}: expected a whole number >= 0, or auto")

    @property
    def is_divided(self) -> bool:
        """Whether weights are in parts on ranks, also where these are one process."""
        return self.engine != "torch"

    @property
    def offloads_masters(self) -> bool:
        """Whether a whole model's master weights, gradients and moments are in host memory."""
        return self.cpu_offload and not self.is_divided
