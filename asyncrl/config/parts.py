"""Parts of a run that plug-ins may bring: rollout engines, training engines, weight channels, weights of lower
precision. The core's own are listed here, without their implementations, and the numbers of them that a plan of the
memory must know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from asyncrl.plugins import Part, Parts

PREFILL_TOKENS = 16_384
"""Most padded prompt tokens that the hf engine admits in one forward pass (a single prompt may be longer)."""
GRADIENTS_IN_FLIGHT = 2
"""Gradients as large as the largest that may be on their way to the host, with learner.cpu_offload: beyond their bytes
the backward pass waits for the oldest. As many rounded weights are on their way back."""
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
"""learner.optimizer=adamw_8bit: elements of a tensor from which its moments have 8 bits, and elements that share a
scale (bitsandbytes' own numbers)."""
CACHE_BLOCK = 32
"""Columns by which the hf engine's key-value cache grows: one step in so many copies it."""
NCCL_BYTES = 1 << 29
"""Device memory that NCCL takes for itself on each device, generously."""
ANY_TRACE = "*"
"""Stands for all token traces that record a torch model in the engine's process (`RolloutEngine.traces`)."""


def cache_columns(tokens: int) -> int:
    """Columns of the hf engine's key-value cache that have room for `tokens`, in whole blocks."""
    return -(-tokens // CACHE_BLOCK) * CACHE_BLOCK


@dataclass(frozen=True, kw_only=True)
class RolloutEngine(Part):
    """Description of a rollout engine. Its implementation has the methods of `rollout_server.engines.base`."""

    machine_problems: str = ""
    """`module:function`, called with the configuration before the engine is made. It returns a line, with its fix, for
    each thing that this machine or model lacks."""
    installation: str = ""
    """`module:function`, called without arguments. It returns a line for `asyncrl doctor`: versions found, or the
    command that installs the engine."""
    unserved: Callable[[Mapping[str, Any]], str] = lambda described: ""
    """Part of a model, by its config.json, that the engine has no code for; empty if it has all."""
    memory: str = "asyncrl.memory_plan.lines:HF_MEMORY"
    """`module:name` of its `asyncrl.memory_plan.lines.EngineMemory`; that of the hf engine unless given."""
    has_model: bool = True
    """False for an engine that makes its tokens up."""
    spans_devices: bool = False
    """True if it spreads one model over several devices (rollout.tensor_parallel_size)."""
    compiles: bool = False
    """True if its first start on a GPU may compile for many minutes."""
    not_quantized: str = "which has none"
    """Reason, as half a sentence, for an engine that samples with the learner's own weights only."""
    traces: Set[str] = frozenset()
    """Names of the token traces that its completions come with; ANY_TRACE: all that record a torch model."""
    metric_prefix: str = ""
    """Prefix of its own Prometheus metrics, which the server's endpoint shows, too."""


ROLLOUT_ENGINES = Parts(
    "rollout_engines",
    "rollout.engine",
    RolloutEngine,
    {"hf": RolloutEngine(implementation="rollout_server.engines.hf.engine:HFEngine", traces={ANY_TRACE})},
)


@dataclass(frozen=True, kw_only=True)
class LearnerEngine(Part):
    """Description of a training engine.

    Its implementation is called with the `learner` section, the device and the ranks, and returns a
    `learner.training.sharding.Sharding`.
    """

    divides_model: bool = True
    """True if each rank has a part of the weights, of the optimiser's state or of both."""
    memory: str = ""
    """`module:name` of its `asyncrl.memory_plan.lines.RankMemory`; empty: its memory cannot be planned."""


LEARNER_ENGINES = Parts(
    "learner_engines",
    "learner.engine",
    LearnerEngine,
    {
        "torch": LearnerEngine(implementation="learner.training.sharding:one_device", divides_model=False),
        "fsdp2": LearnerEngine(
            implementation="learner.training.fsdp:fully_sharded",
            memory="asyncrl.memory_plan.lines:FSDP_MEMORY",
        ),
    },
)


@dataclass(frozen=True, kw_only=True)
class WeightChannel(Part):
    """Description of a channel: from the learner's device memory into the engine's (`receiver`), or of bytes that
    servers pull over ZeroMQ (`puller`).

    Its implementation is the learner's end: a `learner.network.publication.DeviceSender`, or what opens a
    `learner.network.publication.SourceFinder`.
    """

    receiver: str = ""
    """`module:Class` of the server's end between device memories, a
    `rollout_server.weights.channels.DeviceReceiver`."""
    puller: str = ""
    """`module:Class` of the server's end over ZeroMQ, a `rollout_server.weights.channels.Puller`."""
    obstacle: str = ""
    """`module:function` with the arguments of `rollout_server.weights.channels.Obstacle`: the reason for which the
    channel cannot be used now, empty if it can."""
    on_one_gpu: bool = False
    """True if both sides have to be on one GPU."""
    own_bytes: int = 0
    """Device memory that the channel takes for itself on each side, beside a version."""
    host_versions: int = 1
    """Versions in host memory of each server that pulls them."""


WEIGHT_CHANNELS = Parts(
    "weight_channels",
    "rollout.weights_channel",
    WeightChannel,
    {name: WeightChannel(implementation="") for name in ("auto", "shm", "zmq")},  # auto chooses; the others need none
)


def device_channels(configured: str) -> dict[str, WeightChannel]:
    """The channels between device memories that may be used: the configured one, or with `auto` the installed ones, the
    best first."""
    channels = WEIGHT_CHANNELS.all() if configured == "auto" else {configured: WEIGHT_CHANNELS[configured]}
    return {name: channel for name, channel in channels.items() if channel.receiver}


@dataclass(frozen=True, kw_only=True)
class RolloutWeights(Part):
    """Description of weights of lower precision that completions are sampled with.

    The implementation is called with the hf engine's model, which it rounds in place. It returns a function from
    published tensors, with their names, to those that the model gets.
    """

    max_logprob_difference: float
    """Default of alignment.max_logprob_difference: the policy that samples is another one than the learner's."""
    held_by: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Facts for each engine that holds the weights in this precision itself, by its name. Its page says which."""


@dataclass(frozen=True, kw_only=True)
class BaseWeights(RolloutWeights):
    """Description of weights that a learner may hold, too, in the frozen base of adapters. `module:function` each:"""

    held_by_learner: str
    """Replaces layers of a model on the CPU, and moves it to a device."""
    planned: str
    """Lets layers of a model on the meta device take what theirs do. Returns the bytes by which weights are fewer."""
    card: str
    """Writes README.md beside an adapter in a folder, by its ModelConfig."""


ROLLOUT_WEIGHTS = Parts("models", "rollout.quantization", RolloutWeights)
BASE_WEIGHTS = Parts("models", "model.quantization", BaseWeights)
TRACKERS = Parts("trackers", "telemetry.trackers", Part, takes_own=True)
