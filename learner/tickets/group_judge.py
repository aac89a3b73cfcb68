"""The group judge: what a run's filters and its prompt source make of each group, once, as it is received; and whether
any group has a score.

Filters see a group first where it is decided which groups a step may take: in the ledger's transaction that journals
it. So a group that was kept stays kept, and a dropped one dropped, whatever happens to the process afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.algorithms.filters import GroupFilter, SampledGroup
from asyncrl.algorithms.loading import load_method
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.data.prompt_sources import DataOrder, PromptSource
from asyncrl.errors import BadStateError
from asyncrl.journal.writer import TicketSlot
from asyncrl.plugins import implementation
from asyncrl.user_functions import one_line
from learner.groups.ticket import ReceivedGroup
from protocol.messages import TrajectoryRecord, TrajectoryRole

REASON = re.compile(r"(?!stale$)[a-z][a-z0-9_]{0,39}")
"""Reasons are parts of names of metrics. `stale` is the ledger's own."""
FRUITLESS_STEPS = 20
"""Groups of so many steps, and of a whole pass over the data, may be filtered one after the other; then the run stops.
(EasyR1 and RLLaVA: max_try_make_batch.)"""


UNSCORED_STEPS, UNSCORED_TRAJECTORIES = 3, 64
"""Groups of so many steps, and so many trajectories, that may all be without a score one after the other; then the run
stops: such steps teach nothing, and a run of them would end as if it had learned."""


class Verdicts(NamedTuple):
    reasons: dict[TicketSlot, str]
    """Reason of each dropped group."""
    source: dict[str, float]
    """Entries of the prompt source's state that have changed."""


class GroupJudge:
    """Not thread-safe: the ledger's lock guards it."""

    def __init__(
        self,
        source: PromptSource,
        config: AlgorithmConfig | None = None,
        *,
        num_rows: int = 0,
        prompts_per_step: int = 1,
        total_groups: int | None = None,
        accuracy: str = "",
    ):
        """`config`: the filters and their settings. `num_rows`: of the data. `total_groups`: of the run, where it is
        known. `accuracy`: the reward's component that is reported as accuracy. Raises UserError where a user's filter
        cannot be loaded."""
        self.source = source
        self._config = config or AlgorithmConfig()
        self._filters: dict[str, GroupFilter] = {
            name: load_method("group_filter", name, "algorithm.filters") for name in self._config.filters
        }
        self._most_in_a_row = max(num_rows, FRUITLESS_STEPS * prompts_per_step)
        self._in_a_row = 0
        self._accuracy = accuracy
        self._prompts_per_step, self._total_groups = prompts_per_step, total_groups
        self._unscored = 0
        """Groups in a row that no reward could score."""
        self._without_score = 0
        """Groups in a row without any score, for whatever reason."""

    @property
    def is_idle(self) -> bool:
        """True if nothing that arrives could change anything."""
        return not self._filters and not self.source.learns

    def judge(self, items: Sequence[ReceivedGroup]) -> Verdicts:
        """Judge groups in ticket order. Raises BadStateError where a filter fails, or leaves nothing of the data, and
        where nothing has a score."""
        verdicts = Verdicts({}, {})
        for item in sorted(items, key=lambda item: item.slot.ticket_id):
            self._check_scores(item.group.trajectories)
            if self.is_idle:
                continue
            group = sampled_group(item, self._accuracy)
            if self.source.learns:
                verdicts.source.update(self.source.observe(item.slot.position, group.scores(self.source.component)))
            reason = self._reason(group)
            self._in_a_row = self._in_a_row + 1 if reason else 0
            if reason:
                verdicts.reasons[item.slot] = reason
            if self._in_a_row > self._most_in_a_row:
                raise BadStateError(
                    f"algorithm.filters have dropped {self._in_a_row} groups in a row and left none, the last as "
                    f"{reason}: a pass over the data, and what {FRUITLESS_STEPS} steps take, teach nothing. Look "
                    "at the reward (asyncrl doctor), at harder or easier data, or leave the filter out"
                )
        return verdicts

    def _check_scores(self, records: Sequence[TrajectoryRecord]) -> None:
        """Count groups without a score. Those that the environment lost are the environment's (`EnvironmentHealth`),
        unless the whole run has nothing else."""
        failed = [record for record in records if record.reward is None]
        if len(failed) < len(records):
            self._unscored = self._without_score = 0
            return
        lost = [record for record in failed if record.environment_error]
        self._unscored = 0 if lost else self._unscored + 1
        self._without_score += 1
        most = max(UNSCORED_STEPS * self._prompts_per_step, -(-UNSCORED_TRAJECTORIES // len(records)))
        is_whole_run = self._total_groups is not None and self._without_score >= self._total_groups
        if is_whole_run or self._unscored >= most:
            last = (lost or failed)[0]
            what, how = ("environment", "env try plays it") if lost else ("reward", "doctor scores some rows")
            raise BadStateError(
                f"no trajectory of {self._without_score} groups in a row has a score: there is nothing to learn from. "
                f"The last group says {last.error_kind}: {last.error_message}. Bring back what the {what} needs (a "
                f"service, a file, memory) or fix it (asyncrl {how}), then continue with --resume"
            )

    def _reason(self, group: SampledGroup) -> str | None:
        for name, keep_out in self._filters.items():
            where = f"algorithm.filters: {name}, on the group of row {group.prompt.row_id},"
            try:
                reason = keep_out(group, self._config)
            except Exception as error:
                file = name.rpartition(":")[0]
                raise BadStateError(f"{where} failed: {one_line(error, file)}") from error
            if reason is None:
                continue
            if not isinstance(reason, str) or not REASON.fullmatch(reason):
                raise BadStateError(
                    f"{where} answered {reason!r}: expected None, to keep the group, or a reason of at most 40 "
                    "lower-case letters, digits and _ that is not `stale`"
                )
            return reason
        return None


def make_judge(
    algorithm: AlgorithmConfig,
    order: DataOrder,
    *,
    prompts_per_step: int,
    total_steps: int,
    has_end: bool,
    seed: int,
    accuracy: str,
) -> GroupJudge:
    """The judge of a run. With `has_end` its positions end with its steps. `accuracy` is the component that counts."""
    per_step, total = prompts_per_step, total_steps * prompts_per_step
    end = total if has_end else None
    source = PromptSource(end)
    for method, settings in chosen_hooks("prompt_source", algorithm).values():  # one at most
        create = implementation(method.implementation)
        source = create(settings, order, seed, accuracy=accuracy, per_step=per_step, end=end)
    return GroupJudge(
        source,
        algorithm,
        num_rows=order.num_rows,
        prompts_per_step=per_step,
        total_groups=total,
        accuracy=accuracy,
    )


def sampled_group(item: ReceivedGroup, accuracy: str = "") -> SampledGroup:
    """Group as filters and sources see it: sampled by the policy, without greedy and inserted rows."""
    rows = [row for row, record in enumerate(item.group.trajectories) if record.role is TrajectoryRole.TRAIN]
    lengths = item.group.lengths.tolist()
    return SampledGroup(
        item.ticket.prompt, [item.group.trajectories[row] for row in rows], [lengths[row] for row in rows], accuracy
    )
