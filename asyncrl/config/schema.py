"""Configuration of a run: all sections, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import model_validator

from asyncrl.config.environment import LimitsConfig
from asyncrl.config.part_settings import (
    LinkSettings,
    ModelSettings,
    NetworkSettings,
    ScheduleSettings,
    StepSettings,
    TicketSettings,
)
from asyncrl.config.rules import run_problems
from asyncrl.config.run_sections import RunSections
from asyncrl.config.sampling_rules import sampling_problems
from asyncrl.config.sections import Purpose


class RunConfig(RunSections):
    @model_validator(mode="before")
    @classmethod
    def _implied(cls, values: Any) -> Any:
        return imply_response_length(imply_staleness_0(values))

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        rules = (run_problems, sampling_problems, method_problems)
        problems = [problem for rule in rules for problem in rule(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def sends_device_versions(self) -> bool:
        """True where the learner keeps versions in device memory: where it neither lends its device nor divides the
        model, and a plan of the device's memory has room for them."""
        has_room = not self.gpu_memory.budget_gib or self.rollout.uses_device_channel
        return self.trainer.mode == "async" and not self.learner.is_divided and has_room

    @property
    def evaluates_beside_training(self) -> bool:
        """True if servers keep a version to evaluate it while newer ones are published."""
        plan = self.evaluation
        planned = bool(self.data.val_files) and (plan.before_training or plan.every_steps > 0)
        return planned and self.trainer.mode == "async" and self.learner.max_staleness > 0

    @property
    def samples_in_rounds(self) -> bool:
        """True where the turns of all trajectories are sampled together: one batch is awaited, of an engine that is
        faster on whole batches."""
        return self.learner.max_staleness == 0 and self.rollout.engine == "hf"

    @property
    def purpose(self) -> Purpose:
        """Use of the rows: an environment that judges alone needs no answers."""
        return "environment" if self.environment.is_used and not self.reward.functions else "rl"

    @property
    def ticket_settings(self) -> TicketSettings:
        return TicketSettings(
            data=self.data,
            purpose=self.purpose,
            batch=self.batch,
            algorithm=self.algorithm,
            rollout=self.rollout,
            environment=self.environment,
            evaluation=self.evaluation,
            seed=self.trainer.seed,
            trajectories_per_group=self.trajectories_per_group,
            sampled_per_group=self.sampled_per_group,
            total_steps=self.total_steps,
            max_message_mib=self.network.max_message_mib,
            parity_rows=self.alignment.rows,
        )

    @property
    def network_settings(self) -> NetworkSettings:
        held_out = self.group_bytes(self.evaluation.group_size, is_held_out=True)
        return NetworkSettings(
            network=self.network,
            mode=self.trainer.mode,
            quantization=self.rollout.precision(self.model.quantization),
            components=self.reward.component_names,
            max_prompt_length=self.data.max_prompt_length,
            largest_group_bytes=max(self.group_bytes(self.trajectories_per_group), held_out),
            first_meeting_s=self.first_meeting_s,
        )

    @property
    def schedule_settings(self) -> ScheduleSettings:
        return ScheduleSettings(
            mode=self.trainer.mode,
            prompts_per_step=self.batch.prompts_per_step,
            max_staleness=self.learner.max_staleness,
            evaluation=self.evaluation,
            start_timeout_s=self.start_timeout_s,
            wait_timeout_s=self.learner.wait_timeout_s,
            control_endpoint=self.network.control_endpoint,
            run_path=self.run_path,
        )

    @property
    def model_settings(self) -> ModelSettings:
        sections, budget_gib = (self.model, self.learner, self.rollout), self.gpu_memory.budget_gib
        return ModelSettings(*sections, self.run_path, self.trainer.seed, self.algorithm, budget_gib)

    @property
    def critic_settings(self) -> ModelSettings:
        return replace(self.model_settings, model=self.critic_model)

    @property
    def reference_settings(self) -> ModelSettings:
        """Settings of a reference policy with weights of its own (`reference_model`)."""
        assert self.reference_model is not None
        return replace(self.model_settings, model=self.reference_model)

    @property
    def step_settings(self) -> StepSettings:
        return StepSettings(
            algorithm=self.algorithm,
            critic=self.critic,
            learner=self.learner,
            environment=self.environment,
            reward_weights=self.reward.weights,
            microbatch_tokens=self.batch.microbatch_tokens,
            max_response_length=self.data.max_response_length,
        )

    @property
    def link_settings(self) -> LinkSettings:
        return LinkSettings(
            network=self.network,
            mode=self.trainer.mode,
            quantization=self.rollout.precision(self.model.quantization),
            groups_in_flight=self.groups_in_flight,
            start_timeout_s=self.start_timeout_s,
            run_path=self.run_path,
        )


def method_problems(config: RunSections) -> Iterator[str]:
    """Name what the chosen methods' own rules refuse."""
    for method in config.algorithm.chosen_methods:
        yield from method.problems(config)


def imply_staleness_0(values: Any) -> Any:
    """Default learner.max_staleness to 0 in sync mode."""
    if not isinstance(values, dict):
        return values
    trainer, learner = values.get("trainer"), values.get("learner", {})
    if not isinstance(trainer, dict) or trainer.get("mode") != "sync" or not isinstance(learner, dict):
        return values
    return {**values, "learner": {"max_staleness": 0, **learner}}


def imply_response_length(values: Any) -> Any:
    """Set data.max_response_length or environment.limits.tokens from the other: with an environment both are the number
    of tokens behind the prompt. The one that is not given follows from the other."""
    if not isinstance(values, dict):
        return values
    environment, data = values.get("environment"), values.get("data")
    if not isinstance(environment, dict) or not isinstance(data, dict) or not environment.get("name"):
        return values
    limits = environment.get("limits", {})
    if not isinstance(limits, dict):
        return values
    tokens = limits.get("tokens", data.get("max_response_length", LimitsConfig.model_fields["tokens"].default))
    environment = {**environment, "limits": {**limits, "tokens": tokens}}
    return {**values, "environment": environment, "data": {"max_response_length": tokens, **data}}


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """The configuration with other values at these dotted keys; not checked again."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: object, path: list[str], value: object):  # any section of the configuration
    name, *rest = path
    inner = _changed(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})  # pyright: ignore[reportAttributeAccessIssue]
