"""Settings of the parts of a run that read five sections or more: each class names exactly those of its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.run_sections import BatchConfig, EvaluationConfig, NetworkConfig
from asyncrl.config.sections import DataConfig, ModelConfig, Purpose
from asyncrl.config.service_sections import CriticConfig, LearnerConfig, RolloutConfig


@dataclass(frozen=True)
class TicketSettings:
    """Settings of the ticket writer."""

    data: DataConfig
    purpose: Purpose
    batch: BatchConfig
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    """Distribution of training's completions."""
    environment: EnvironmentConfig
    evaluation: EvaluationConfig
    seed: int
    trajectories_per_group: int
    sampled_per_group: int
    total_steps: Callable[[int], int]
    """Learner steps of the run, from the number of usable training rows."""
    max_message_mib: int
    parity_rows: int


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of the learner's network thread."""

    network: NetworkConfig
    mode: Literal["async", "sync"]
    quantization: str
    components: tuple[str, ...]
    """Names of the reward's components."""
    max_prompt_length: int
    largest_group_bytes: int
    first_meeting_s: float
    """Longest time for a server's first log-prob check."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of the order of steps, waits and evaluations."""

    mode: Literal["async", "sync"]
    prompts_per_step: int
    max_staleness: int
    evaluation: EvaluationConfig
    start_timeout_s: float
    wait_timeout_s: float
    """learner.wait_timeout_s."""
    control_endpoint: str
    run_path: Path


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a training engine, beside its optimiser."""

    model: ModelConfig
    learner: LearnerConfig
    rollout: RolloutConfig
    """Distribution that was sampled from: outputs are log-probs of that."""
    run_path: Path
    seed: int
    algorithm: AlgorithmConfig
    """Choice of methods: the actor takes their token traces."""
    budget_gib: float = 0.0
    """gpu_memory.budget_gib."""


@dataclass(frozen=True)
class LinkSettings:
    """Settings of a rollout server's connection to the learner."""

    network: NetworkConfig
    mode: Literal["async", "sync"]
    quantization: str
    groups_in_flight: int
    """Most groups that the server may hold."""
    start_timeout_s: float
    run_path: Path


@dataclass(frozen=True)
class StepSettings:
    """Settings of the learner's step."""

    algorithm: AlgorithmConfig
    critic: CriticConfig
    learner: LearnerConfig
    environment: EnvironmentConfig
    reward_weights: Mapping[str, float]
    microbatch_tokens: int
    max_response_length: int
