"""The one configuration of a run. Every field's text below it is also its line in `asyncrl config-reference`.

Key names follow RLLaVA and EasyR1 where the meaning is the same. Numbers that must agree are derived
(see the properties of `RunConfig`), never repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.config.sampling_rules import sampling_problems


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    path: str
    """Hugging Face folder with model, tokenizer and processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights on both sides and on the wire."""
    freeze_vision_tower: bool = True
    """Leave the vision tower (not the connector) out of training."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""


class DataConfig(Section):
    train_files: tuple[str, ...]
    """Parquet or JSONL files, image folders, or `org/name@split` of the `datasets` library."""
    val_files: tuple[str, ...] = ()
    """Held-out rows, never trained on; same kinds as train_files."""
    prompt_key: str = "prompt"
    """Column with the question: a string (which may contain `<image>`) or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer, handed to the rewards."""
    image_key: str = "images"
    """Column with 0 to N images per row: paths, bytes or a list of either. A missing column means text only."""
    target_key: str = "target"
    """Column with the demonstration that `asyncrl sft` imitates."""
    image_dir: str = ""
    """Base of relative image paths; empty means the folder of the data file."""
    format_prompt: str = ""
    """Jinja template file for the question; it sees `content` and every column. Empty means the question as it is."""
    system_prompt: str = ""
    """System message before the question; empty means none."""
    max_prompt_length: int = Field(default=2048, gt=0)
    """Tokens, image tokens included. Longer prompts are refused by name or, with filter_overlong_prompts, left out."""
    max_response_length: int = Field(default=512, gt=0)
    """Most tokens sampled per completion."""
    filter_overlong_prompts: bool = False
    """Leave out rows over max_prompt_length (counted and named) instead of stopping."""
    shuffle: bool = True
    """Visit the training rows in a seeded random order, fresh each epoch."""
    max_train_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""
    max_val_rows: int = Field(default=0, ge=0)
    """Use only the first rows; 0 means all."""


class BatchConfig(Section):
    """The three batch numbers. Everything else derives from them."""

    prompts_per_step: int = Field(default=32, gt=0)
    """Groups per learner step."""
    group_size: int = Field(default=8, gt=0)
    """Completions sampled per prompt."""
    tokens_per_microbatch: int = Field(default=8192, gt=0)
    """Most packed tokens in one forward and backward pass; changes memory, never the result."""


class CorrectionConfig(Section):
    """Off-policy correction: how the behaviour policy's log-probs weigh the loss."""

    kind: Literal["none", "token_tis"] = "token_tis"
    """`token_tis`: each token's loss is weighted by min(pi_proximal / pi_behaviour, cap)."""
    cap: float = Field(default=2.0, gt=0)
    """Upper bound of the token weight."""


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    """Name of a built-in (see asyncrl/algorithms/advantages.py) or `file.py:function`."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation (False gives Dr. GRPO's advantage)."""
    policy_loss: str = "ppo"
    """Name of a built-in (see asyncrl/algorithms/losses.py) or `file.py:function`."""
    clip_ratio_low: float = Field(default=0.2, gt=0)
    """PPO clip range below 1."""
    clip_ratio_high: float = Field(default=0.28, gt=0)
    """PPO clip range above 1 (clip-higher)."""
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become one number; denominators are those of the whole batch."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    updates_per_batch: int = Field(default=1, gt=0)
    """Optimiser steps taken from one batch of groups."""
    correction: CorrectionConfig = CorrectionConfig()


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moment estimates."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of AdamW."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine end, as a fraction of lr."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this."""


class LearnerConfig(Section):
    max_staleness: int = Field(default=2, ge=0)
    """Oldest policy version a trained token may come from, in versions behind the learner's. 0 = exactly on-policy."""
    engine: Literal["torch"] = "torch"
    """Training engine."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads; 0 means half of the cores when the servers share the machine."""
    optim: OptimConfig = OptimConfig()
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the groups of one step before the run stops with a reason."""


class RolloutConfig(Section):
    engine: Literal["hf", "scripted"] = "hf"
    """Inference engine: `hf` (transformers, CPU or GPU) or `scripted` (tests)."""
    temperature: float = Field(default=1.0, gt=0)
    """Of training samples; log-probs are of this distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample training completions from the most probable tokens of this mass; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample training completions from so many most probable tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens below this fraction of the most probable one's probability; 0 is off."""
    logprobs: Literal["processed", "raw"] = "processed"
    """What the engine returns: of the distribution it samples from; `raw`: before temperature and truncation."""
    max_concurrent_sequences: int = Field(default=256, gt=0)
    """Completions decoded together by the hf engine."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    cpu_threads: int = Field(default=0, ge=0)
    """Torch threads; 0 means half of the cores when the learner shares the machine."""
    weight_update: Literal["recompute", "keep", "drain"] = "recompute"
    """New weights under running sequences: `recompute` their KV cache, `keep` the old one, or `drain` them first."""
    weights_channel: Literal["auto", "shm", "zmq"] = "auto"
    """How weights arrive; auto takes shm on the learner's host and zmq elsewhere."""
    engine_args: dict[str, Any] = {}
    """Passed to the engine as they are."""


class RewardFunctionConfig(Section):
    function: str
    """Built-in name (see asyncrl/rewards/builtin.py) or `file.py:function`."""
    weight: float = 1.0
    """Of this component in the sum."""
    name: str = ""
    """Of the curve; empty means the function's own name."""
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments of the function."""


class RewardConfig(Section):
    functions: tuple[RewardFunctionConfig, ...]
    """Components; their weighted sum is the reward."""
    accuracy: str = ""
    """Component reported as held-out accuracy; empty means the first."""
    timeout_s: float = Field(default=15.0, gt=0)
    """Longest time for all components of one sample; then its worker is killed and the trajectory is `timed_out`."""
    workers: int = Field(default=2, gt=0)
    """Worker processes."""
    memory_limit_mib: int = Field(default=2048, gt=0)
    """Address space of one worker (each process that it starts gets the same)."""

    @model_validator(mode="after")
    def _known_accuracy(self) -> RewardConfig:
        names = [component_name(f) for f in self.functions]
        if not names:
            raise ValueError("reward.functions is empty: name at least one, such as {function: exact_match}")
        if len(set(names)) != len(names):
            raise ValueError(f"two reward components have one name: {names}. Set `name` on one of them")
        if self.accuracy and self.accuracy not in names:
            raise ValueError(f"reward.accuracy is {self.accuracy!r}, but the components are {names}")
        return self

    @property
    def accuracy_component(self) -> str:
        return self.accuracy or component_name(self.functions[0])


class EvaluationConfig(Section):
    every_steps: int = Field(default=0, ge=0)
    """Evaluate on val_files after this many steps; 0 means only at the end (and the start)."""
    before_training: bool = True
    """Evaluate the initial policy."""
    temperature: float = Field(default=0.0, ge=0)
    """0 means greedy."""
    group_size: int = Field(default=1, gt=0)
    """Completions per held-out row."""


class SftConfig(Section):
    """`asyncrl sft`: supervised warm start on `data.target_key`."""

    steps: int = Field(default=0, ge=0)
    """Optimiser steps; 0 means one epoch."""
    rows_per_step: int = Field(default=64, gt=0)
    """Rows per optimiser step."""
    optim: OptimConfig = OptimConfig(lr=1e-5)


class TrainerConfig(Section):
    max_steps: int = Field(default=0, ge=0)
    """Learner steps; 0 means total_epochs over the training rows."""
    total_epochs: int = Field(default=1, gt=0)
    """Passes over the training rows when max_steps is 0."""
    save_freq: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0 means only at the end."""
    save_limit: int = Field(default=2, gt=0)
    """Checkpoints kept."""
    seed: int = Field(default=1, ge=0)
    """Decides data order, sampling and initial states."""
    samples_per_step: int = Field(default=2, ge=0)
    """Groups of each step written to samples.jsonl with their images."""


class NetworkConfig(Section):
    host: str = "127.0.0.1"
    """Address that the learner binds and servers dial."""
    control_port: int = Field(default=7601, ge=0, le=65535)
    """Tickets and groups; 0 lets `asyncrl train` pick a free port."""
    weights_port: int = Field(default=7602, ge=0, le=65535)
    """Bulk weight transfers; 0 lets `asyncrl train` pick a free port."""
    insecure: bool = False
    """Allow an address other than loopback without encryption."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Each side says it is alive this often."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Silence after which a peer counts as gone."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first server, model loading included."""
    max_message_mib: int = Field(default=1024, gt=0)
    """Larger messages are refused."""


class TelemetryConfig(Section):
    learner_port: int = Field(default=9101, ge=0, le=65535)
    """Prometheus endpoint of the learner; 0 lets `asyncrl train` pick a free port."""
    rollout_port: int = Field(default=9102, ge=0, le=65535)
    """Prometheus endpoint of the rollout server; 0 lets `asyncrl train` pick a free port."""
    host: str = "127.0.0.1"
    """Address of the Prometheus endpoints."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe message in the logs of both processes."""


class RunConfig(Section):
    run_dir: str
    """Everything the run writes goes here; must not exist yet, or be resumed."""
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    sft: SftConfig = SftConfig()
    trainer: TrainerConfig = TrainerConfig()
    network: NetworkConfig = NetworkConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _numbers_fit(self) -> RunConfig:
        problems: list[str] = []
        if self.algorithm.adv_estimator == "grpo" and self.batch.group_size < 2:
            problems.append(
                f"batch.group_size is {self.batch.group_size}: GRPO needs at least 2 completions per prompt "
                "to compute an advantage. Set batch.group_size=8"
            )
        if self.batch.prompts_per_step % self.algorithm.updates_per_batch:
            problems.append(
                f"batch.prompts_per_step ({self.batch.prompts_per_step}) must be a multiple of "
                f"algorithm.updates_per_batch ({self.algorithm.updates_per_batch})"
            )
        longest = self.data.max_prompt_length + self.data.max_response_length
        if longest > self.batch.tokens_per_microbatch:
            problems.append(
                f"one sample may have {longest} tokens (data.max_prompt_length + data.max_response_length), "
                f"over batch.tokens_per_microbatch = {self.batch.tokens_per_microbatch}. "
                "Raise the latter or lower one of the former"
            )
        if self.rollout.max_concurrent_sequences < self.batch.group_size:
            problems.append(
                f"rollout.max_concurrent_sequences ({self.rollout.max_concurrent_sequences}) is smaller than "
                f"batch.group_size ({self.batch.group_size})"
            )
        problems += sampling_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    @property
    def trajectories_per_step(self) -> int:
        return self.batch.prompts_per_step * self.batch.group_size

    @property
    def groups_in_flight(self) -> int:
        """Most groups issued and not yet trained: `(max_staleness + 1) * prompts_per_step`."""
        return (self.learner.max_staleness + 1) * self.batch.prompts_per_step

    def total_steps(self, num_rows: int) -> int:
        """Learner steps of the run: trainer.max_steps, else as many as visit every training row total_epochs times."""
        visits = self.trainer.total_epochs * num_rows
        return self.trainer.max_steps or -(-visits // self.batch.prompts_per_step)

    @property
    def control_endpoint(self) -> str:
        return f"tcp://{self.network.host}:{self.network.control_port}"

    @property
    def weights_endpoint(self) -> str:
        return f"tcp://{self.network.host}:{self.network.weights_port}"


def component_name(function: RewardFunctionConfig) -> str:
    """The curve's name: the given one, or what stands after the last `:` of the function."""
    return function.name or function.function.rsplit(":", 1)[-1]
