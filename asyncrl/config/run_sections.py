"""The smaller sections, and all sections as one object with the numbers that are derived from them.

Every field's text below it is also its line in `asyncrl config-reference`. Key names follow RLLaVA and EasyR1 where the
meaning is the same. Numbers that must agree are derived, never repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.environment import EnvironmentConfig, LimitsConfig
from asyncrl.config.parts import ROLLOUT_ENGINES, TRACKERS
from asyncrl.config.sections import DataConfig, ModelConfig, OpenSection, RewardConfig, Section
from asyncrl.config.service_sections import CriticConfig, LearnerConfig, ReferenceConfig, RolloutConfig, meant_device
from asyncrl.plugins import description, implementation, installed

_PROMPT_ID_BYTES, _IMAGE_GRID_BYTES, _LENGTH_BYTES = 4, 12, 4
"""Parts of a group on the wire. Every image has at least a placeholder in its prompt."""
TOKEN_BYTES = 17
"""Id, log-prob, version, version of the cache, and mask of a completion's token on the wire."""
_PIXEL_BYTES = 4
"""More than a pixel of an image that an environment shows takes as PNG."""
Durability = Literal["process", "power"]
USUAL_TOKENS = 8192
"""Default of batch.tokens_per_microbatch, and `auto` where nothing says how much memory there is."""


class BatchConfig(Section):
    """The three batch numbers. Everything else derives from them."""

    prompts_per_step: int = Field(default=32, gt=0)
    """Groups per learner step."""
    group_size: int = Field(default=8, gt=0)
    """Completions sampled per prompt."""
    tokens_per_microbatch: int | Literal["auto"] = USUAL_TOKENS
    """Most packed tokens in one forward and backward pass; changes memory, never the result. `auto`: as many as the
    memory plan has room for on the learner's GPU, or in gpu_memory.budget_gib; on a CPU without a budget the
    default."""

    @field_validator("tokens_per_microbatch", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise ValueError(f"batch.tokens_per_microbatch is {value!r}: expected a whole number > 0, or auto")

    @property
    def microbatch_tokens(self) -> int:
        """tokens_per_microbatch, where it is a number. Raises ValueError for `auto`, which `settle_tokens`
        (asyncrl/memory_plan/token_choice.py) turns into one."""
        if self.tokens_per_microbatch == "auto":
            raise ValueError("batch.tokens_per_microbatch is auto: settle_tokens(config) comes before its use")
        return self.tokens_per_microbatch


class EvaluationLimits(Section):
    """Limits of held-out rows that an environment plays, where they are not those of `environment.limits`."""

    turns: int | None = Field(default=None, gt=0)
    """Most turns of the policy; null, as of the others: environment.limits.turns."""
    tokens: int | None = Field(default=None, gt=0)
    """Most tokens behind the prompt, of all turns and observations. Engines make room for the larger of both limits."""
    tokens_per_turn: int | None = Field(default=None, gt=0)
    """Most sampled tokens of one turn."""
    images: int | None = Field(default=None, ge=0)
    """Most images in observations."""

    @property
    def given(self) -> dict[str, int]:
        """Values that are not null."""
        return self.model_dump(exclude_none=True)

    def over(self, limits: LimitsConfig) -> LimitsConfig:
        """Limits, with those of `environment.limits` in the place of nulls."""
        return limits.model_copy(update=self.given)


class EvaluationConfig(Section):
    """Scores of held-out rows, each evaluation by one policy version. Servers keep that version meanwhile, and training
    goes on as far as `learner.max_staleness` lets it."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate on val_files after this many steps; 0 means only at the end (and the start)."""
    before_training: bool = True
    """Evaluate the initial policy."""
    temperature: float = Field(default=0.0, ge=0)
    """0 means greedy."""
    group_size: int = Field(default=1, gt=0)
    """Completions per held-out row."""
    by: str = ""
    """Column of the held-out rows: each of its values, at most 50, has scores of its own; empty means none."""
    limits: EvaluationLimits = EvaluationLimits()


class TrainerConfig(Section):
    mode: Literal["async", "sync"] = "async"
    """`sync`: learner and rollout server take turns on one device, or on those of its ranks, at learner.max_staleness 0
    (`asyncrl sync`)."""
    max_steps: int = Field(default=0, ge=0)
    """Learner steps; 0 means total_epochs over the training rows."""
    total_epochs: int = Field(default=1, gt=0)
    """Passes over the training rows when max_steps is 0."""
    save_freq: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0 means only at the end."""
    save_limit: int = Field(default=2, gt=0)
    """Checkpoints kept."""
    save_async: bool = True
    """Write a checkpoint while training goes on, from a copy of its weights and optimiser state in host memory. false:
    training waits for the disk, and there is no copy."""
    stop_grace_s: float = Field(default=30.0, gt=0)
    """Time from the first SIGTERM or Ctrl-C to SIGKILL: the learner finishes its step, writes a checkpoint and ends.
    As long as whatever stops it waits (Compose: stop_grace_period, Kubernetes: terminationGracePeriodSeconds)."""
    durability: Durability = "process"
    """Event that an acknowledged group survives: the death of the `process`, or also loss of `power` (a disk sync
    each)."""
    journal_limit_mib: int = Field(default=2048, gt=0)
    """Groups that only the next checkpoint will hold; above it one is written, whatever save_freq is."""
    keep_samples_gib: float = Field(default=8.0, ge=0)
    """Groups kept after their checkpoint, for `asyncrl inspect` and `asyncrl replay`; the oldest go first."""
    seed: int = Field(default=1, ge=0)
    """Decides data order, sampling and initial states."""
    samples_per_step: int = Field(default=2, ge=0)
    """Groups of each step written to samples.jsonl with their images."""


class AlignmentConfig(Section):
    """Every rollout server that joins samples a few rows first, and again after updates; the learner computes their
    log-probs again."""

    rows: int = Field(default=2, ge=0)
    """Training rows for each server, with their images; 0 turns the check off."""
    max_logprob_difference: float = Field(default=0.0, ge=0)
    """Largest difference of one token that is accepted, in nats; 0 means 1 for bfloat16, and for float32 0.001 on
    CPUs and 0.025 where one side is on a GPU; where one side alone has weights of a lower precision that of its
    plug-in. The mean over tokens may be a tenth of it."""


class GpuMemoryConfig(Section):
    """A plan of the device's memory for both halves of a sync run, checked before anything is loaded."""

    budget_gib: float = Field(default=0.0, ge=0)
    """Memory of one device. 0: whatever the learner's GPU has, and on a CPU no plan."""


USUAL_START_S, COMPILING_START_S = 300.0, 1800.0
"""Longest start of an engine: imports and loading; and with compilation and the capture of CUDA graphs, before any
cache has them. The latter is not measured: nothing has run on a GPU yet."""


class NetworkConfig(Section):
    host: str = "127.0.0.1"
    """Address that the learner binds and servers dial."""
    control_port: int = Field(default=7601, ge=0, le=65535)
    """Tickets and groups; 0 lets `asyncrl train` pick a free port."""
    weights_port: int = Field(default=7602, ge=0, le=65535)
    """Bulk weight transfers; 0 lets `asyncrl train` pick a free port."""
    keys_dir: str = ""
    """Folder of keys made by `asyncrl keys`; with it every connection is encrypted and authenticated (CURVE)."""
    insecure: bool = False
    """Allow an address other than loopback without keys."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Each side says it is alive this often."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Silence after which a peer counts as gone."""
    reconnect_timeout_s: float = Field(default=600.0, gt=0)
    """A rollout server works on and waits this long for a learner that has gone."""
    start_timeout_s: float = Field(default=0.0, ge=0)
    """Longest wait of a learner for the first server, model loading included, and of a server for its learner; 0 means
    300, and 1800 where an engine that compiles, such as vllm, may be on a GPU."""
    max_message_mib: int = Field(default=256, gt=0)
    """Larger messages are refused; a group, or the tickets with their images that are sent together."""

    @property
    def is_open(self) -> bool:
        """True if unencrypted traffic is allowed: host is loopback, or insecure is true."""
        from protocol.endpoints import is_loopback  # imports ZeroMQ, which reading a configuration does not need

        return self.insecure or self.host == "localhost" or is_loopback(self.host)

    @property
    def control_endpoint(self) -> str:
        return self.endpoint(self.control_port)

    @property
    def weights_endpoint(self) -> str:
        return self.endpoint(self.weights_port)

    def endpoint(self, port: int) -> str:
        return f"tcp://[{self.host}]:{port}" if ":" in self.host else f"tcp://{self.host}:{port}"


class LaunchConfig(Section):
    """Restarts of crashed services by `asyncrl train`: it starts a service again, the learner with --resume."""

    max_restarts: int = Field(default=5, ge=0)
    """Most restarts of one service; at the next crash the run ends. 0 means that the first crash ends it. The first
    restart waits a second, each further one twice as long, up to a minute. A service that ran for ten minutes has all
    its restarts again."""


class TelemetryConfig(OpenSection):
    choices: ClassVar = {"trackers": TRACKERS}
    learner_port: int = Field(default=9101, ge=0, le=65535)
    """Port of the learner's metrics, which a plug-in serves; 0 lets `asyncrl train` pick a free port."""
    rollout_port: int = Field(default=9102, ge=0, le=65535)
    """Port of the rollout server's metrics; 0 lets `asyncrl train` pick a free port. The further servers that it
    starts take the ports after this one."""
    host: str = "127.0.0.1"
    """Address of the metrics endpoints."""
    linger_s: float = Field(default=0.0, ge=0)
    """The endpoints answer this long after the end, so that a scrape sees it: a few of Prometheus' intervals."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe message in the logs of both processes."""
    trackers: tuple[str, ...] = ()
    """Programs that show the run, of plug-ins, or your own as `file.py:Class`. metrics.jsonl is there in any case."""


class RunSections(OpenSection):
    """Every section of a run, each valid by itself. `schema.RunConfig` also checks them against each other. A command
    of a plug-in may have a section of its name, which is there where it is given."""

    run_dir: str
    """Everything the run writes goes here; must not exist yet, or be resumed."""
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    gpu_memory: GpuMemoryConfig = GpuMemoryConfig()
    network: NetworkConfig = NetworkConfig()
    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    replaced: dict[str, Any] = Field(default_factory=dict)
    """Written by asyncrl: what keys held that the word of a method (`asyncrl train CONFIG gspo`) has replaced. Another
    word begins there."""

    @classmethod
    def chosen_sections(cls, given: Mapping[str, Any]) -> Mapping[str, type[Section]]:
        return _sections_of_commands(installed("commands").keys() & given.keys())

    @classmethod
    def possible_sections(cls) -> Mapping[str, type[Section]]:
        return _sections_of_commands(installed("commands"))

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    def on_one_device(self, *, cuda: bool) -> bool:
        """True if learner and rollout server use the same device; any `cuda` name implies a machine with CUDA."""
        names = (self.learner.device, self.rollout.device)
        cuda = cuda or any(name.startswith("cuda") for name in names)
        learner, rollout = (meant_device(name, cuda=cuda) for name in names)
        return learner == rollout

    @property
    def trajectories_per_group(self) -> int:
        """batch.group_size, and a greedy one where the estimator needs it."""
        return self.batch.group_size + ("greedy_row" in self.algorithm.needs)

    @property
    def sampled_per_group(self) -> int:
        """Trajectories of batch.group_size that no ticket hook inserts whole."""
        return self.batch.group_size - sum(self.algorithm.inserting_hooks.values())

    @property
    def critic_model(self) -> ModelConfig:
        """The model that the critic starts from: whole, without adapters."""
        return self._whole_model(self.critic.path)

    @property
    def reference_model(self) -> ModelConfig | None:
        """The reference policy's model where it has weights of its own; None without one, and where it is the policy
        without its adapters."""
        is_own = bool(self.reference.path or not self.model.lora.rank)
        return self._whole_model(self.reference.path) if "reference" in self.algorithm.needs and is_own else None

    @property
    def other_models(self) -> tuple[tuple[str, ModelConfig], ...]:
        """Models of the learner beside the policy that have weights of their own, by the settings that name them."""
        critic = self.critic_model if "critic" in self.algorithm.needs else None
        named = (("critic.path", critic), ("reference.path", self.reference_model))
        own = {
            setting: path for method in self.algorithm.chosen_methods for setting, path in method.models(self).items()
        }
        models = (*named, *((setting, self._whole_model(path)) for setting, path in own.items()))
        return tuple((setting, model) for setting, model in models if model is not None)

    def with_policy(self, folder: Path | None) -> Self:
        """Configuration with the policy's weights in another folder, such as a checkpoint's; other models keep their
        paths."""
        if folder is None:
            return self
        began = self.model.path
        return self.model_copy(
            update={
                "model": self.model.model_copy(update={"path": str(folder)}),
                "critic": self.critic.model_copy(update={"path": self.critic.path or began}),
                "reference": self.reference.model_copy(update={"path": self.reference.path or began}),
            }
        )

    def _whole_model(self, path: str) -> ModelConfig:
        """A model of its own beside the policy, with the policy's weights where no path is given."""
        whole = self.model.lora.model_copy(update={"rank": 0})
        return self.model.model_copy(update={"path": path or self.model.path, "lora": whole, "quantization": ""})

    @property
    def trajectories_per_step(self) -> int:
        return self.batch.prompts_per_step * self.trajectories_per_group

    @property
    def groups_in_flight(self) -> int:
        """Most groups issued and not yet trained: `(max_staleness + 1) * prompts_per_step`."""
        return (self.learner.max_staleness + 1) * self.batch.prompts_per_step

    def last_step_not_needed(self, saved_step: int) -> int:
        """Last step whose groups a restart from the checkpoint of `saved_step` does not read, 0 where it may read all:
        the steps until then are in the checkpoint, and too old to be replayed."""
        replayable = self.learner.max_staleness if self.algorithm.replays_groups else 0
        return max(saved_step - replayable, 0)

    @property
    def first_meeting_s(self) -> float:
        """Longest time for what a server and the learner do together once: the log-prob check, a first transfer."""
        return min(self.start_timeout_s, self.learner.wait_timeout_s / 2)  # the learner's own wait is to go on after it

    @property
    def start_timeout_s(self) -> float:
        """network.start_timeout_s, or what the engine may take where that is 0."""
        compiles = ROLLOUT_ENGINES[self.rollout.engine].compiles and self.rollout.device != "cpu"
        return self.network.start_timeout_s or (COMPILING_START_S if compiles else USUAL_START_S)

    @property
    def evaluation_limits(self) -> LimitsConfig:
        """Limits of held-out rows that the environment plays."""
        return self.evaluation.limits.over(self.environment.limits)

    @property
    def longest_completion(self) -> int:
        """Most tokens behind a prompt, of training's rows and of an evaluation's."""
        return max(self.data.max_response_length, self.evaluation.limits.tokens or 0)

    def group_bytes(self, group_size: int, *, is_held_out: bool = False) -> int:
        """Size of the largest group that fits its ticket, on the wire and in the journal."""
        limits = self.evaluation_limits if is_held_out else self.environment.limits
        tokens = self.longest_completion if is_held_out else self.data.max_response_length
        prompt_bytes = self.data.max_prompt_length * (_PROMPT_ID_BYTES + _IMAGE_GRID_BYTES)
        columns = group_size * (_LENGTH_BYTES + tokens * TOKEN_BYTES)
        traced = sum(method.bytes_per_token(self) for method in self.algorithm.chosen_methods)
        traces = traced * (self.data.max_prompt_length + group_size * tokens)
        images = limits.images * (group_size + 1) if self.environment.is_used else 0  # an opening's, too
        return prompt_bytes + columns + traces + images * limits.image_pixels * _PIXEL_BYTES

    def total_steps(self, num_rows: int) -> int:
        """Learner steps of the run: trainer.max_steps, else as many as visit every training row total_epochs times."""
        visits = self.trainer.total_epochs * num_rows
        return self.trainer.max_steps or -(-visits // self.batch.prompts_per_step)


def _sections_of_commands(names: Iterable[str]) -> dict[str, type[Section]]:
    """Sections of those of the commands that have settings."""
    places = {name: description("commands", name).section for name in names}
    return {name: implementation(place) for name, place in places.items() if place}
