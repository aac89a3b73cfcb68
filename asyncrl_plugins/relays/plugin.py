"""Description of the channel relay: its setting, and configurations that it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from asyncrl.config.parts import WeightChannel
from asyncrl.config.run_sections import RunSections
from asyncrl.config.sections import Section


class RelayConfig(Section):
    """Rollout servers that send weights on to each other (`rollout.weights_channel: relay`)."""

    fan_out: int = Field(default=2, gt=0)
    """Number of rollout servers that the learner, and each of these servers, sends a version to."""


def problems(config: RunSections) -> Iterator[str]:
    if config.trainer.mode == "sync":
        yield (
            "trainer.mode is sync, and rollout.weights_channel is relay: the one server has no other to send weights "
            "to. Set rollout.weights_channel=auto"
        )


RELAY = WeightChannel(
    implementation="asyncrl_plugins.relays.tree:open_tree",
    puller="asyncrl_plugins.relays.puller:RelayPuller",
    section=RelayConfig,
    problems=problems,
    host_versions=2,
)
