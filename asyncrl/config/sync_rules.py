"""What sync mode implies, and which settings contradict it.

Learner and rollout server take turns on one device, so the learner can only wait for groups of its own version, there
is one server, and weights cannot go from one device to another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    if _device(learner.device) != _device(rollout.device):
        problems.append(
            f"trainer.mode is sync, but learner.device is {learner.device} and rollout.device is {rollout.device}: on "
            "two devices nobody needs to sleep. Set both to the same, or trainer.mode=async"
        )
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
    return problems


def _device(name: str) -> str:
    return "cuda:0" if name == "cuda" else name
