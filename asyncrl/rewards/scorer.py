"""`RewardScorer`: many samples in, scores out, whatever the reward functions do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config.sections import RewardConfig, component_name
from asyncrl.plugins import implementation
from asyncrl.rewards.process_scorer import ProcessScorer, scorer_of_functions
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.spec import check_rewards, scorer_of

logger = logging.getLogger(__name__)


class RewardScorer:
    """Processes that score samples, for the event loop that called `start()`.

    Example:
        scorer = RewardScorer(config.reward)
        await scorer.start()
        score = await scorer.score(RewardSample(completion="4", answer="4"))
        await scorer.close()

    Samples wait in order of arrival; the caller bounds how many there are. The processes end with the
    thread that runs the loop, also where it is killed.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        functions = scorer_of_functions(config)
        self._scorers: dict[str, ProcessScorer] = {}
        """Scorer of each component; all functions share one."""
        for part in config.functions:
            kind = scorer_of(part)
            scorer = implementation(kind.implementation)(part) if kind else functions
            self._scorers[component_name(part)] = scorer
        late = _needing_the_group(config)
        self._early = [name for name in config.component_names if name not in late]
        self._late = [name for name in config.component_names if name in late]
        self._reported: set[str] = set()
        """Error kinds of which a failure stands in the log."""

    async def start(self) -> None:
        """Start the processes, with all functions loaded. Raises UserError where they cannot be."""
        check_rewards(self._config)
        starts = (scorer.start() for scorer in set(self._scorers.values()))
        results = await asyncio.gather(*starts, return_exceptions=True)
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
            for component, scorer in self._scorers.items()
            for name, number in scorer.counts.items()
        }

    @property
    def dropped_bytes(self) -> int:
        """Bytes that rewards printed beyond the limit per sample, which no log has."""
        return sum(scorer.workers.dropped_bytes for scorer in set(self._scorers.values()))

    async def close(self) -> None:
        """Kill the processes and everything that they started; a pending `score()` raises RuntimeError."""
        await asyncio.gather(*(scorer.close() for scorer in set(self._scorers.values())))

    async def _run(self, names: Sequence[str], samples: Sequence[RewardSample], scores: Sequence[Score]) -> list[Score]:
        """Add components in the order of `reward.functions`; one request for those that stand beside each other."""
        known = list(scores)
        for scorer, together in itertools.groupby(names, self._scorers.__getitem__):
            if all(score.error_kind for score in known):
                break
            known = await scorer.score(samples, known, list(together))
        return known


class GroupScoring:
    """Scores the completions of one prompt: each as it comes and, where a component asks for the whole group, all of
    them when the last is there.

    Example:
        group = scorer.group(2)
        scores = await asyncio.gather(group.score(0, first), group.score(1, second))
    """

    def __init__(self, scorer: RewardScorer, size: int) -> None:
        self._scorer = scorer
        self._size = size
        self._early: dict[int, tuple[RewardSample, Score]] = {}
        self._complete = asyncio.Event()
        self._late: asyncio.Task[list[Score]] | None = None

    async def score(self, index: int, sample: RewardSample) -> Score:
        """The score of the completion at `index` of the group; await all of them together. Raises as the scorer's."""
        score = await self._scorer.run_early(sample)
        if not self._scorer.needs_groups:
            return self._scorer.finished(sample, score)
        self._early[index] = sample, score
        if len(self._early) == self._size:
            samples, scores = zip(*(self._early[i] for i in range(self._size)), strict=True)
            self._late = asyncio.create_task(self._scorer.run_late(samples, scores))
            self._late.add_done_callback(lambda late: late.cancelled() or late.exception())  # all may be cancelled
            self._complete.set()
        await self._complete.wait()
        assert self._late is not None
        return self._scorer.finished(sample, (await asyncio.shield(self._late))[index])


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
        functions = scorer_of_functions(config.model_copy(update={"workers": 1}))
        await functions.start()
        await functions.close()
