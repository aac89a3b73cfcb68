"""What sync mode implies, and which settings contradict it.

Learner and rollout server take turns on one device, so the learner can only wait for groups of its own version, there
is one server, and weights cannot go from one device to another. Whether `auto` is the device that the other side names
may depend on the machine: that is left to the launch (asyncrl/launch/inputs.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrl.config.devices import same_device, two_devices

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def imply_staleness_0(values: Any) -> Any:
    """Of the file: where nothing is said, sync mode is on-policy."""
    if not isinstance(values, dict):
        return values
    trainer, learner = values.get("trainer"), values.get("learner", {})
    if not isinstance(trainer, dict) or trainer.get("mode") != "sync" or not isinstance(learner, dict):
        return values
    return {**values, "learner": {"max_staleness": 0, **learner}}


def sync_problems(config: RunConfig) -> list[str]:
    """One line for each setting that sync mode cannot have, with its fix."""
    if config.trainer.mode != "sync":
        return []
    learner, rollout = config.learner, config.rollout
    problems: list[str] = []
    if learner.max_staleness != 0:
        problems.append(
            f"trainer.mode is sync and learner.max_staleness is {learner.max_staleness}: taking turns, the server only "
            "has the learner's own version. Set learner.max_staleness=0, or trainer.mode=async"
        )
    if rollout.servers != 1:
        problems.append(
            f"trainer.mode is sync and rollout.servers is {rollout.servers}: the learner shares its device with one "
            "server. Set rollout.servers=1, or trainer.mode=async"
        )
    if not same_device(config, cuda=False):
        problems.append(two_devices(config))
    if rollout.tensor_parallel_size != 1:
        problems.append(
            f"trainer.mode is sync and rollout.tensor_parallel_size is {rollout.tensor_parallel_size}: there is one "
            "device. Set rollout.tensor_parallel_size=1, or trainer.mode=async"
        )
    if rollout.weights_channel in ("nccl", "cuda_ipc"):
        problems.append(
            f"trainer.mode is sync and rollout.weights_channel is {rollout.weights_channel}, which copies from the "
            "learner's device memory: it is empty while the server is awake. Set rollout.weights_channel=auto"
        )
    if rollout.engine == "vllm" and rollout.sleep_level == 2 and config.model.lora.rank:
        problems.append(
            f"trainer.mode is sync, model.lora.rank is {config.model.lora.rank} and rollout.sleep_level is 2: vllm "
            "would forget the base weights, and only adapters are published. Set rollout.sleep_level=1, or "
            "rollout.engine=hf, which keeps what is not published"
        )
    return problems
