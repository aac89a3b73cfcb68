"""`RewardPool`: many samples in, scores out, whatever the reward functions do."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.config.sections import RewardConfig, component_name
from asyncrl.plugins import implementation
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score, Scorer
from asyncrl.rewards.spec import check_rewards, scorer_of
from asyncrl.rewards.worker_pool import WorkerPool, closed
from asyncrl.rewards.worker_process import SHOWN_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stage:
    scorer: Scorer
    names: list[str]
    """Names of the stage's components, in the order of `reward.functions`."""


class RewardPool:
    """Processes that score samples, for the event loop that called `start()`.

    Example:
        pool = RewardPool(config.reward)
        await pool.start()
        score = await pool.score(RewardSample(completion="4", answer="4"))
        await pool.close()

    Samples wait in order of arrival; the caller bounds how many there are. The processes end with the
    thread that runs the loop, also where it is killed.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers = WorkerPool(config, self._count_dropped)
        kinds = {component_name(part): (scorer_of(part), part) for part in config.functions}
        self._scorers_by_name: dict[str, Scorer] = {
            name: implementation(kind.implementation)(part, self._count_dropped)
            for name, (kind, part) in kinds.items()
            if kind is not None
        }
        late = _needing_the_group(config)
        self._early = self._stages([name for name in config.component_names if name not in late])
        self._late = self._stages([name for name in config.component_names if name in late])
        self._reported: set[str] = set()
        """Error kinds of which a failure stands in the log."""
        self.output_dropped_bytes = 0
        """Bytes that rewards printed beyond SHOWN_BYTES per sample, which no log has."""
        self._closed = False

    async def start(self) -> None:
        """Start the processes, with all functions loaded. Raises UserError where they cannot be."""
        check_rewards(self._config)
        results = await asyncio.gather(*(scorer.start() for scorer in self._scorers()), return_exceptions=True)
        for failure in results:
            if failure is not None:
                await self.close()
                raise failure

    async def score(self, sample: RewardSample) -> Score:
        """Score one sample, as a group of its own; failures of the reward are in the returned Score.

        Raises BadStateError if a process that was lost could not be started again, RuntimeError after `close()`.
        """
        return await self.group(1).score(0, sample)

    def group(self, size: int) -> GroupScoring:
        """The scoring of one prompt's completions, of which there will be `size`."""
        return GroupScoring(self, size)

    async def run_early(self, sample: RewardSample) -> Score:
        """Compute the components that need no other completion."""
        return (await self._run(self._early, [sample], [Score()]))[0]

    async def run_late(self, samples: Sequence[RewardSample], scores: Sequence[Score]) -> list[Score]:
        """Add the components that need the whole group."""
        return await self._run(self._late, samples, scores)

    @property
    def needs_groups(self) -> bool:
        return bool(self._late)

    def finished(self, sample: RewardSample, score: Score) -> Score:
        """Add the reward, the weighted sum of the components. The first failure of a kind is logged as a warning."""
        if not score.error_kind:
            known = score.components
            reward = sum((weight * known[name] for name, weight in self._config.weights.items()), 0.0)
            if math.isfinite(reward):
                return replace(score, reward=reward)
            score = score.failed("reward_nan", f"the weighted sum of {known} is {reward}")
        level = logging.DEBUG if score.error_kind in self._reported else logging.WARNING
        self._reported.add(score.error_kind)
        logger.log(level, "row %s, %s: %s", sample.row_id, score.error_kind, score.error_message)
        return score

    @property
    def counts(self) -> dict[tuple[str, str], float]:
        """Counts of scorers so far, by component and name."""
        return {
            (component, name): number
            for component, scorer in self._scorers_by_name.items()
            for name, number in scorer.counts.items()
        }

    async def close(self) -> None:
        """Kill the processes and everything that they started; a pending `score()` raises RuntimeError."""
        self._closed = True
        await asyncio.gather(*(scorer.close() for scorer in self._scorers()))

    async def _run(
        self, stages: Sequence[_Stage], samples: Sequence[RewardSample], scores: Sequence[Score]
    ) -> list[Score]:
        known = list(scores)
        for stage in stages:
            if all(score.error_kind for score in known):
                break
            if self._closed:
                raise closed()
            known = await stage.scorer.score(samples, known, stage.names)
        return known

    def _stages(self, names: Sequence[str]) -> list[_Stage]:
        stages: list[_Stage] = []
        for name in names:
            scorer: Scorer = self._scorers_by_name.get(name, self._workers)
            if stages and stages[-1].scorer is scorer:
                stages[-1].names.append(name)
            else:
                stages.append(_Stage(scorer, [name]))
        return stages

    def _scorers(self) -> list[Scorer]:
        """Scorers that have anything to do."""
        used = {id(stage.scorer): stage.scorer for stage in [*self._early, *self._late]}
        return list(used.values())

    def _count_dropped(self, nbytes: int) -> None:
        if not self.output_dropped_bytes:
            logger.warning(
                "a reward printed more than %d bytes for one sample: what is beyond is dropped, and counted in "
                "asyncrl_rollout_reward_output_dropped_bytes_total. Let it write to a file of its own to keep all",
                SHOWN_BYTES,
            )
        self.output_dropped_bytes += nbytes


class GroupScoring:
    """Scores the completions of one prompt: each as it comes and, where a component asks for the whole group, all of
    them when the last is there.

    Example:
        group = pool.group(2)
        scores = await asyncio.gather(group.score(0, first), group.score(1, second))
    """

    def __init__(self, pool: RewardPool, size: int) -> None:
        self._pool = pool
        self._size = size
        self._early: dict[int, tuple[RewardSample, Score]] = {}
        self._complete = asyncio.Event()
        self._late: asyncio.Task[list[Score]] | None = None

    async def score(self, index: int, sample: RewardSample) -> Score:
        """The score of the completion at `index` of the group; await all of them together. Raises as the pool's."""
        score = await self._pool.run_early(sample)
        if not self._pool.needs_groups:
            return self._pool.finished(sample, score)
        self._early[index] = sample, score
        if len(self._early) == self._size:
            samples, scores = zip(*(self._early[i] for i in range(self._size)), strict=True)
            self._late = asyncio.create_task(self._pool.run_late(samples, scores))
            self._late.add_done_callback(lambda late: late.cancelled() or late.exception())  # all may be cancelled
            self._complete.set()
        await self._complete.wait()
        assert self._late is not None
        return self._pool.finished(sample, (await asyncio.shield(self._late))[index])


def _needing_the_group(config: RewardConfig) -> set[str]:
    """Components that see all completions of a prompt, or shape one that does."""
    needing: set[str] = set()
    for part in config.functions:
        name = component_name(part)
        if part.group or needing & set(config.shaped[name]):
            needing.add(name)
    return needing


async def try_loading(config: RewardConfig) -> None:
    """Load all functions in a worker, and end it. Raises UserError where they cannot be loaded.

    Scorers of plug-ins are checked, but not started.
    """
    check_rewards(config)
    if any(scorer_of(part) is None for part in config.functions):
        workers = WorkerPool(config.model_copy(update={"workers": 1}), lambda _: None)
        await workers.start()
        await workers.close()
