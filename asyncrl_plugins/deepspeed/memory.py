"""Lines of the plan for a learner under DeepSpeed's ZeRO (learner.engine=deepspeed), by its stage.

| stage | weights | fp32 gradients | fp32 masters and AdamW's moments |
|---|---|---|---|
| 1 | whole | whole | part |
| 2 | whole | part | part |
| 3 | part | part | part |

Exact but for the padding of parts. From above: what is gathered and what is on its way between ranks in a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.config.schema import RunConfig
from asyncrl.memory_plan.divided import DividedModel, Parameter
from asyncrl.memory_plan.lines import WORKING, Change, MemoryItem, RankMemory, allocator, count
from asyncrl.memory_plan.rehearsal import ModelBytes
from asyncrl_plugins.deepspeed.plugin import ZERO_BUCKET, ZERO_LIVE, DeepSpeedConfig

STEPPING = "the optimiser's update, one copy of what is trained"


@dataclass(frozen=True)
class ZeroModel:
    """Bytes of a model on one rank."""

    model: DividedModel
    stage: int
    ranks: int

    @property
    def weights(self) -> int:
        """Memory that stays between steps."""
        parts = self.ranks if self.stage == 3 else 1
        return self.model.buffers + sum(p.gathered * -(-p.elements // parts) for p in self._parameters)

    @property
    def part(self) -> int:
        """An fp32 part of all that is trained: of the masters, of the gradients, or of one moment."""
        return 4 * sum(-(-p.elements // self.ranks) for p in self._trained)

    @property
    def gradients(self) -> int:
        """fp32 sums over micro-batches; of fp32 weights stage 2 keeps the one whole that two ranks have parts of."""
        if self.stage == 1:
            return 4 * sum(p.elements for p in self._trained)
        return self.part + (4 * self._largest if self.stage == 2 and self._computes_in_fp32 else 0)

    @property
    def gathered(self) -> int:
        """Most bytes of whole weights in a pass of stage 3: what is kept for its next use, and one layer more."""
        if self.stage < 3:
            return 0
        widest = max(p.gathered for p in self._parameters)
        layer = max(unit.whole(1) for unit in self.model.units)
        return min(sum(p.gathered * p.elements for p in self._parameters), widest * ZERO_LIVE + layer)

    @property
    def output_layer(self) -> int:
        """Most bytes of its copy, beside which the policy computes (algorithm.kl_estimator=full)."""
        return max(p.gathered * p.elements for p in self._parameters) if self.stage == 3 else 0

    @property
    def collective(self) -> int:
        """A bucket of gradients, or one larger gradient, in fp32."""
        return 4 * max(self._largest, min(ZERO_BUCKET, sum(p.elements for p in self._trained)))

    @property
    def on_its_way(self) -> int:
        """Gradients of a micro-batch beside their sums: stage 1 sends them before the step alone; stage 2 keeps fp32
        ones of this rank's part to the end of the pass."""
        if self.stage == 1:
            return self.widened
        kept = self.part if self.stage == 2 and self._computes_in_fp32 else 0
        return self.collective + kept + self.widened

    @property
    def widened(self) -> int:
        """Bytes by which the output layer's gradient and a chunk's piece of it are more in fp32 than in 16 bits."""
        outside = [p for p in self.model.units[-1].parameters if p.is_trained and p.gathered == 2]
        return 2 * 2 * max((p.elements for p in outside), default=0)

    @property
    def stepping(self) -> int:
        """The flat gradient of a part, and as much again for AdamW on a GPU; at stages 1 and 2 also its pieces."""
        if self.stage == 3:
            return 2 * self.part
        return 3 * self.part + (self.collective if self.stage == 1 else 0)

    @property
    def _largest(self) -> int:
        return max((p.elements for p in self._trained), default=0)

    @property
    def _computes_in_fp32(self) -> bool:
        return all(p.gathered == 4 for p in self._trained)  # ZeRO rounds a 16-bit critic's value head, too

    @property
    def _parameters(self) -> list[Parameter]:
        return [p for unit in self.model.units for p in unit.parameters]

    @property
    def _trained(self) -> list[Parameter]:
        return [p for p in self._parameters if p.is_trained]


def zero_lines(model: ModelBytes, config: RunConfig, what: str) -> Iterator[MemoryItem]:
    """Memory of one rank, but for its context; all have as much."""
    offloads = config.learner.cpu_offload and config.learner.device != "cpu"
    kept = list(_kept_lines(model, config))
    yield from (line for line in kept if not (offloads and line.name in _offloaded(config)))
    engines = [
        (engine, _zero(engine.divided, config)) for engine in ((model, model.critic) if model.critic else (model,))
    ]
    references = [_zero(divided, config) for divided in model.divided_references]
    passing = max(engine.passing for engine, _ in engines)
    stepping = 0 if offloads else max(zero.stepping for _, zero in engines)
    on_its_way = max(zero.on_its_way for _, zero in engines)
    gathered = sum(zero.gathered for _, zero in engines)
    for reference in references:
        gathered += reference.gathered + reference.output_layer * (config.algorithm.kl_estimator == "full")
    yield MemoryItem("buckets", len(engines) * 4 * ZERO_BUCKET, "of gradients for a collective")
    if gathered:
        yield MemoryItem("gathered weights", gathered, f"whole ones, of up to {count(ZERO_LIVE)} parameters")
    if on_its_way:
        yield MemoryItem("gradients on their way", on_its_way, "in fp32, to their sums over the ranks")
    in_a_pass = passing + gathered + on_its_way
    more = max(0, stepping - in_a_pass)
    yield MemoryItem(WORKING, passing + more, STEPPING if more else what)
    yield allocator(in_a_pass + more)


def zero_host_bytes(model: ModelBytes, config: RunConfig) -> int:
    """Bytes in host memory of one rank with learner.cpu_offload."""
    return sum(line.nbytes for line in _kept_lines(model, config) if line.name in _offloaded(config))


def smaller(config: RunConfig) -> Iterator[Change]:
    """The stage that divides the weights, too."""
    if _stage(config) < 3 and config.learner.num_processes > 1:
        yield {"learner.deepspeed.zero_stage": 3}


def _kept_lines(model: ModelBytes, config: RunConfig) -> Iterator[MemoryItem]:
    """Memory of one rank that outlasts a micro-batch."""
    stage, ranks = _stage(config), config.learner.num_processes
    zero = _zero(model.divided, config)
    share = f"1/{ranks} of {count(model.trained)} that are trained, in float32"
    weights = f"{count(model.parameters)} in {config.model.dtype}"
    yield MemoryItem(
        *(
            ("parts of the weights", zero.weights, f"1/{ranks} of {weights}")
            if stage == 3
            else ("weights", zero.weights, weights)
        )
    )
    yield MemoryItem(
        "gradients" if stage == 1 else "parts of the gradients",
        zero.gradients,
        f"{count(model.trained)} are trained, in float32" if stage == 1 else share,
    )
    yield MemoryItem("parts of the master weights", zero.part, share)
    yield MemoryItem("parts of AdamW's moments", 2 * zero.part, "two averages of each")
    if model.critic:
        critic = _zero(model.critic.divided, config)
        yield MemoryItem("critic", critic.weights, count(model.critic.parameters))
        yield MemoryItem(
            "critic's optimiser state", critic.gradients + 3 * critic.part, "gradients, masters and moments"
        )
    if model.divided_references:
        reference = model.reference // (ranks if stage == 3 else 1)
        yield MemoryItem(
            "reference policy", reference, "weights and their moving averages" if config.reference.ema else "weights"
        )


def _offloaded(config: RunConfig) -> set[str]:
    """Names of what learner.cpu_offload has in host memory (arXiv 2101.06840); stage 1 keeps whole gradients."""
    found = {
        "parts of the gradients",
        "parts of the master weights",
        "parts of AdamW's moments",
        "critic's optimiser state",
    }
    return found | {"parts of the weights", "critic", "reference policy"} if _stage(config) == 3 else found


def _zero(model: DividedModel | None, config: RunConfig) -> ZeroModel:
    assert model is not None
    return ZeroModel(model, _stage(config), config.learner.num_processes)


def _stage(config: RunConfig) -> int:
    return config.learner.settings_of(DeepSpeedConfig).zero_stage


MEMORY = RankMemory(zero_lines, zero_host_bytes, smaller)
