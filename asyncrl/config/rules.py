"""Settings of different sections that do not go together, on any machine: each is refused with its values and the fix.

Settings of one section are checked where it is; what depends on the machine where the engine is started. Rules of
sampling have a file of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from asyncrl.config.installed_methods import method_of
from asyncrl.config.method import NEEDS
from asyncrl.config.parts import BASE_WEIGHTS, LEARNER_ENGINES, ROLLOUT_ENGINES, ROLLOUT_WEIGHTS, WEIGHT_CHANNELS
from asyncrl.config.run_sections import TOKEN_BYTES, RunSections
from asyncrl.config.sections import component_name
from asyncrl.plugins import description, descriptions, installed

ONLY_ADAPTERS = "only adapters are trained, and the reference is a model without any"
REQUIRES = (
    ("trainer.mode=sync", "learner.max_staleness=0", "taking turns, the server has the learner's own version alone"),
    ("trainer.mode=sync", "rollout.servers=1", "the learner shares its device with one server"),
    (
        "reference.reset_optimizer=true",
        "reference.reset_every_steps>0",
        "the optimiser is reset with the reference, which never is",
    ),
    ("reference.ema>0", "model.lora.rank=0", ONLY_ADAPTERS),
    ("reference.reset_every_steps>0", "model.lora.rank=0", ONLY_ADAPTERS),
)
"""A setting, the one that it needs, and why. `key=value`, or `key>number`."""


def run_problems(config: RunSections) -> Iterator[str]:
    """Name what no run can do, with its fix."""
    yield from need_problems(config)
    yield from number_problems(config)
    yield from group_problems(config)
    yield from reference_problems(config)
    yield from staleness_problems(config)
    yield from device_problems(config)
    yield from engine_problems(config)
    yield from training_engine_problems(config)
    yield from environment_problems(config)


def need_problems(config: RunSections) -> Iterator[str]:
    """Name settings without what they need."""
    for has, needs, why in REQUIRES:
        (key, value, is_so), (other, there, is_met) = _compare(config, has), _compare(config, needs)
        if is_so and not is_met:
            fix = f"Set {needs}" if "=" in needs else f"Raise {other}"
            yield f"{key} is {value} and {other} is {there}: {why}. {fix}, or change {key}"


def _compare(config: RunSections, condition: str) -> tuple[str, str, bool]:
    """Key and value of `key=value` or `key>number`, and whether it is so."""
    key, sign, wanted = re.split("([=>])", condition, maxsplit=1)
    value: Any = attrgetter(key)(config)
    text = f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    return key, text, text == wanted if sign == "=" else value > float(wanted)


def number_problems(config: RunSections) -> Iterator[str]:
    """Name each number that does not fit another one, with its fix."""
    batch, algorithm = config.batch, config.algorithm
    estimator = method_of("advantage", algorithm.adv_estimator)
    if estimator and estimator.compares_rows and batch.group_size < 2:
        yield (
            f"batch.group_size is {batch.group_size}: {estimator.name} needs at least 2 completions per prompt to "
            "compute an advantage. Set batch.group_size=8"
        )
    if batch.prompts_per_step % algorithm.updates_per_batch:
        yield (
            f"batch.prompts_per_step ({batch.prompts_per_step}) must be a multiple of "
            f"algorithm.updates_per_batch ({algorithm.updates_per_batch})"
        )
    size = config.trajectories_per_group
    group_mib = config.group_bytes(size) / 2**20
    if group_mib > config.network.max_message_mib / 2:
        yield (
            f"a group may have {group_mib:.0f} MiB (batch.group_size × data.max_response_length × "
            f"{TOKEN_BYTES} bytes, and its prompt and traces), over half of network.max_message_mib = "
            f"{config.network.max_message_mib}. Raise the latter"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if batch.tokens_per_microbatch != "auto" and longest > batch.tokens_per_microbatch:
        yield (
            f"one sample may have {longest} tokens (data.max_prompt_length + data.max_response_length), "
            f"over batch.tokens_per_microbatch = {batch.tokens_per_microbatch}. "
            "Raise the latter or lower one of the former"
        )
    if config.rollout.max_concurrent_sequences < size:
        greedy = f" and {algorithm.adv_estimator}'s greedy completion" if size > batch.group_size else ""
        yield (
            f"rollout.max_concurrent_sequences ({config.rollout.max_concurrent_sequences}) is smaller than "
            f"batch.group_size ({batch.group_size}){greedy}"
        )


def group_problems(config: RunSections) -> Iterator[str]:
    """Name scores that would not mean what they are taken for, with the fix."""
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
    if reference.moves and "reference" not in config.algorithm.needs:
        key = "reset_every_steps" if reference.reset_every_steps else "ema"
        yield (
            f"reference.{key} is {getattr(reference, key):g}, but nothing looks at the reference policy: "
            "algorithm.kl_loss_coef and algorithm.kl_reward_coef are 0. Set one of them, or leave it out"
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


def device_problems(config: RunSections) -> Iterator[str]:
    """Name invalid devices, and what sync mode on one device cannot do, with the fix. Whether `auto` is the other
    side's device may depend on the machine: asyncrl/checks/inputs.py checks it."""
    learner, rollout = config.learner, config.rollout
    for key, name in (("learner.device", learner.device), ("rollout.device", rollout.device)):
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
            yield f"{key} is {name!r}, not a device name. Set {key}=auto, cpu, cuda, or cuda:1 for the second GPU"
    if config.trainer.mode != "sync":
        return
    ranks = learner.num_processes
    if rollout.tensor_parallel_size > ranks:
        there = "there is one device" if ranks == 1 else f"the ranks have {ranks} devices"
        yield (
            f"trainer.mode is sync and rollout.tensor_parallel_size is {rollout.tensor_parallel_size}: {there}. Set "
            f"rollout.tensor_parallel_size={ranks}, or trainer.mode=async"
        )
    if not config.on_one_device(cuda=False):
        yield two_devices(config)
    if rollout.uses_device_channel:
        yield (
            f"trainer.mode is sync and rollout.weights_channel is {rollout.weights_channel}, which copies from the "
            "learner's device memory: it is empty while the server is awake. Set rollout.weights_channel=auto"
        )


def two_devices(config: RunSections) -> str:
    """Error message for sync mode on two devices."""
    return (
        f"trainer.mode is sync, but learner.device is {config.learner.device} and rollout.device is "
        f"{config.rollout.device}: sync mode needs one device. Set both to the same, or trainer.mode=async"
    )


def engine_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that the chosen engine, channel or precision would have to ignore, with its fix."""
    rollout = config.rollout
    engine = ROLLOUT_ENGINES[rollout.engine]
    if rollout.tensor_parallel_size != 1 and not engine.spans_devices:
        wide = [f"rollout.engine={name} or " for name, each in ROLLOUT_ENGINES.all().items() if each.spans_devices]
        yield (
            f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but the {rollout.engine} engine runs on "
            f"one device. Set {''.join(wide)}rollout.tensor_parallel_size=1"
        )
    batches = descriptions("decode_batches").values()
    own = [part.facts["argument"] for part in batches]
    if rollout.engine == "hf" and rollout.engine_args.keys() - own:
        beside = f"beside {', '.join(own)} " if own else ""
        yield (
            f"rollout.engine is hf and rollout.engine_args is {rollout.engine_args}: {beside}the hf engine takes no "
            "arguments. Set rollout.engine_args={}, or change rollout.engine"
        )
    chosen = {rollout.quantization: ROLLOUT_WEIGHTS, config.model.quantization: BASE_WEIGHTS}
    weights = (parts[name] for name, parts in chosen.items() if name)
    for part in (engine, WEIGHT_CHANNELS[rollout.weights_channel], *weights, *batches):
        yield from part.problems(config)


def training_engine_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that the learner's engine cannot fulfil, with its fix."""
    learner, rollout = config.learner, config.rollout
    yield from LEARNER_ENGINES[learner.engine].problems(config)
    if not learner.is_divided:
        if learner.num_processes > 1:
            yield (
                f"learner.num_processes is {learner.num_processes}, but learner.engine is torch, which keeps the whole "
                "model on one device. Set learner.engine=fsdp2, or leave learner.num_processes out"
            )
        return
    if learner.optimizer != "adamw":
        yield (
            f"learner.optimizer is {learner.optimizer}, which steps whole tensors, and learner.engine is "
            f"{learner.engine}, which has parts of them. Set learner.engine=torch or learner.optimizer=adamw"
        )
    if rollout.uses_device_channel:
        yield (
            f"learner.engine is {learner.engine}, but rollout.weights_channel is {rollout.weights_channel}, which "
            "copies a whole model from the device of a learner that is one process. Set rollout.weights_channel=auto, "
            "or learner.engine=torch"
        )
    if config.reference.offload:
        yield (
            f"learner.engine is {learner.engine}, but reference.offload is true, which moves a whole model (where the "
            "weights are divided, learner.cpu_offload keeps all parts in host memory). Set reference.offload=false, "
            "or learner.engine=torch"
        )
    if learner.num_processes > 1 and ":" in learner.device:
        yield (
            f"learner.device is {learner.device}, one GPU, and learner.num_processes is {learner.num_processes}: each "
            "rank has a GPU of its own. Set learner.device=cuda"
        )


def environment_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that does not go with the environment, with its fix."""
    environment, data, algorithm = config.environment, config.data, config.algorithm
    several = "environment.limits.turns is 1" if environment.is_used else "there is no environment"
    for method in algorithm.chosen_methods if not environment.is_used or environment.limits.turns == 1 else ():
        if "turns" in method.needs:
            yield (
                f"{method.name} needs {NEEDS['turns']}, and {several}: each trajectory is one turn, of which it has "
                "nothing to tell apart. Set environment.name and environment.limits.turns, or "
                "choose algorithm.adv_estimator=grpo"
            )
    given = config.evaluation.limits.given
    if not environment.is_used:
        if environment.config:
            yield (
                f"environment.config has {', '.join(environment.config)}, and environment.name is empty: there is no "
                "environment. Set environment.name, such as tools or file.py:Class, or leave environment.config out"
            )
        if given:
            yield (
                f"evaluation.limits has {', '.join(given)}, and there is no environment: a held-out row is one turn "
                "of at most data.max_response_length tokens. Leave it out"
            )
        return
    if (limits := config.evaluation_limits).tokens_per_turn > limits.tokens:
        yield (
            f"held-out rows may have {limits.tokens_per_turn} tokens in a turn and {limits.tokens} in all "
            "(evaluation.limits, and environment.limits where it has nothing). Lower the former or raise the latter"
        )
    if environment.limits.tokens != data.max_response_length:
        yield (
            f"environment.limits.tokens is {environment.limits.tokens} and data.max_response_length "
            f"{data.max_response_length}: both are the most tokens behind a prompt. Give one of them"
        )
    largest = max(config.trajectories_per_group, config.evaluation.group_size)
    if environment.capacity < largest:
        yield (
            f"environment.workers x environment.instances_per_worker is {environment.capacity}, and the {largest} "
            "trajectories of a group are live at the same time. Raise one of them"
        )
    if 2 * environment.timeouts.trajectory_s > config.learner.wait_timeout_s:
        yield (
            f"environment.timeouts.trajectory_s ({environment.timeouts.trajectory_s:g}) is more than half of "
            f"learner.wait_timeout_s ({config.learner.wait_timeout_s:g}), after which the run stops. Raise the latter"
        )
    if environment.name in installed("environments"):
        yield from description("environments", environment.name).problems(config)
