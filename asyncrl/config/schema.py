"""Configuration of a run: all sections, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import model_validator

from asyncrl.config.device_rules import device_problems, imply_staleness_0
from asyncrl.config.engine_rules import engine_problems, training_engine_problems
from asyncrl.config.environment_rules import environment_problems, imply_response_length
from asyncrl.config.installed_methods import method_of
from asyncrl.config.part_settings import (
    LinkSettings,
    ModelSettings,
    NetworkSettings,
    ScheduleSettings,
    StepSettings,
    TicketSettings,
)
from asyncrl.config.run_sections import TOKEN_BYTES, RunSections
from asyncrl.config.sampling_rules import sampling_problems
from asyncrl.config.sections import component_name


class RunConfig(RunSections):
    @model_validator(mode="before")
    @classmethod
    def _implied(cls, values: Any) -> Any:
        return imply_response_length(imply_staleness_0(values))

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        rules = (
            number_problems,
            reward_problems,
            reference_problems,
            staleness_problems,
            replay_problems,
            device_problems,
            engine_problems,
            training_engine_problems,
            environment_problems,
            sampling_problems,
            method_problems,
        )
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
    def ticket_settings(self) -> TicketSettings:
        return TicketSettings(
            data=self.data,
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
            quantization=self.rollout.quantization,
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
        return ModelSettings(self.model, self.learner, self.rollout, self.run_path, self.trainer.seed)

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
            quantization=self.rollout.quantization,
            groups_in_flight=self.groups_in_flight,
            start_timeout_s=self.start_timeout_s,
            run_path=self.run_path,
        )


def method_problems(config: RunSections) -> Iterator[str]:
    """Name what the chosen methods' own rules refuse."""
    for method in config.algorithm.chosen_methods:
        yield from method.problems(config)


def number_problems(config: RunSections) -> list[str]:
    """Name each number that does not fit another one, with its fix."""
    batch, algorithm = config.batch, config.algorithm
    problems: list[str] = []
    estimator = method_of("advantage", algorithm.adv_estimator)
    if estimator and estimator.compares_rows and batch.group_size < 2:
        problems.append(
            f"batch.group_size is {batch.group_size}: {estimator.name} needs at least 2 completions per prompt to "
            "compute an advantage. Set batch.group_size=8"
        )
    if batch.prompts_per_step % algorithm.updates_per_batch:
        problems.append(
            f"batch.prompts_per_step ({batch.prompts_per_step}) must be a multiple of "
            f"algorithm.updates_per_batch ({algorithm.updates_per_batch})"
        )
    size, greedy = config.trajectories_per_group, config.trajectories_per_group - batch.group_size
    group_mib = config.group_bytes(size) / 2**20
    if group_mib > config.network.max_message_mib / 2:
        problems.append(
            f"a group may have {group_mib:.0f} MiB (batch.group_size × data.max_response_length × "
            f"{TOKEN_BYTES} bytes, and its prompt), over half of network.max_message_mib = "
            f"{config.network.max_message_mib}. Raise the latter"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if batch.tokens_per_microbatch != "auto" and longest > batch.tokens_per_microbatch:
        problems.append(
            f"one sample may have {longest} tokens (data.max_prompt_length + data.max_response_length), "
            f"over batch.tokens_per_microbatch = {batch.tokens_per_microbatch}. "
            "Raise the latter or lower one of the former"
        )
    if config.rollout.max_concurrent_sequences < size:
        problems.append(
            f"rollout.max_concurrent_sequences ({config.rollout.max_concurrent_sequences}) is smaller than "
            f"batch.group_size ({batch.group_size})" + f" and {algorithm.adv_estimator}'s greedy completion" * greedy
        )
    return problems


def reward_problems(config: RunSections) -> Iterator[str]:
    """Name what looks for a component that there is not, or for scores that would not mean what it takes them for, with
    its fix."""
    algorithm = config.algorithm
    compared = [component_name(function) for function in config.reward.functions if function.group]
    if "greedy_row" in algorithm.needs and compared:
        yield (
            f"algorithm.adv_estimator {algorithm.adv_estimator} subtracts the score of a greedy completion, but "
            f"reward.functions has {compared[0]} (group: true), which scores that one and the sampled ones by each "
            "other: what depends on them is no baseline for them. Leave it out, or choose rloo"
        )


def reference_problems(config: RunSections) -> Iterator[str]:
    """Name what would not move the reference policy, with its fix."""
    reference = config.reference
    moving = f"reference.ema is {reference.ema:g}"
    if reference.reset_every_steps:
        moving = f"reference.reset_every_steps is {reference.reset_every_steps}"
    if reference.moves and "reference" not in config.algorithm.needs:
        yield (
            f"{moving}, but nothing looks at the reference policy: algorithm.kl_loss_coef and algorithm.kl_reward_coef "
            "are 0. Set one of them, or leave it out"
        )
    elif reference.moves and config.model.lora.rank:
        yield (
            f"{moving}, but model.lora.rank is {config.model.lora.rank}: only adapters are trained, and the reference "
            "is a model without any. Leave it out, or set model.lora.rank=0"
        )
    if reference.offload and (kept := why_not_offloaded(config)):
        yield f"reference.offload is true, but {kept}"


def why_not_offloaded(config: RunSections) -> str:
    """The reason why the reference policy cannot be in host memory between its uses, with its fix."""
    algorithm = config.algorithm
    if config.reference_model is None:
        what = "it is the model without its adapters" if "reference" in algorithm.needs else "nothing looks at it"
        return f"there is no reference policy with weights of its own: {what}. Leave it out"
    if config.learner.device == "cpu":
        return "learner.device is cpu, whose memory is the host's. Leave it out"
    if algorithm.kl_loss_coef and algorithm.loss_kl_estimator == "full":
        return (
            "algorithm.kl_estimator full looks at it in every micro-batch of the loss. Leave it out, or set "
            "algorithm.kl_estimator=k3"
        )
    return ""


def staleness_problems(config: RunSections) -> Iterator[str]:
    """Name what a trajectory without its old tokens cannot be judged by, with its fix.

    The ratio of a trajectory is a product over all tokens that were sampled: those before a token are how the policy
    came to it. Of the rest alone it is the ratio of something that nobody sampled.
    """
    loss = method_of("policy_loss", config.algorithm.policy_loss)
    parts = [f"algorithm.policy_loss {loss.name}"] if loss and loss.weighs_trajectories else []
    parts += config.algorithm.correction.trajectory_parts
    if config.learner.on_stale == "mask" and parts:
        yield (
            "learner.on_stale is mask, which takes a trajectory's old tokens away, but this is computed from all of "
            f"them: {', '.join(parts)}. Set learner.on_stale=drop or wait, or weigh token by token "
            "(algorithm.policy_loss=ppo, algorithm.correction.kind=token_tis, mask dppo_tv, selection m2po)"
        )


def replay_problems(config: RunSections) -> Iterator[str]:
    """Name what leaves the replay buffer nothing to do, with its fix."""
    size = config.algorithm.replay_buffer_size
    if not size:
        return
    where = f"algorithm.replay_buffer_size is {size}"
    if not config.algorithm.filters:
        yield (
            f"{where}, and no group is dropped whose place another one could take. Set "
            "algorithm.filters=[zero_variance], or leave it out"
        )
    if not config.learner.max_staleness:
        yield (
            f"{where}, but learner.max_staleness is 0: groups of earlier steps were sampled by older versions, and "
            "their tokens are over that bound. Set learner.max_staleness=4, or leave it out"
        )
    if config.batch.prompts_per_step < 2:
        yield (
            f"{where}, but batch.prompts_per_step is 1, and every step trains a new group. Raise the latter, or leave "
            "the former out"
        )


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """The configuration with other values at these dotted keys; not checked again."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: object, path: list[str], value: object):  # any section of the configuration
    name, *rest = path
    inner = _changed(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})  # pyright: ignore[reportAttributeAccessIssue]
