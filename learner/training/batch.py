"""The groups of one learner step as rows and flat columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.algorithms.provenance import Provenance
from asyncrl.environments.observation import key_of
from asyncrl.environments.recording import describe_conversations, history_of, images_of, observation_of
from asyncrl.processing.history import History
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.training.packing import PackedTrajectory, Segment, TrainGroup, flat_rows
from protocol.messages import FinishReason, Group, TokenSource, TrajectoryRecord, TrajectoryStatus

MOST_NAMED = 3
"""Number of rows named in one message."""


class TrainedTokens(NamedTuple):
    """The `N` tokens of a batch that are trained on, row after row."""

    row: torch.Tensor
    """[N]"""
    flat: torch.Tensor
    """[N] their places in the [M] columns."""
    place: torch.Tensor
    """[M] the place of each token among the N; -1 where it is not trained."""


class TurnColumns(NamedTuple):
    """Turns as estimators see them. What each column means, asyncrl.algorithms.trajectories.Trajectories says."""

    turn: torch.Tensor
    """[N]"""
    turn_rewards: torch.Tensor
    """[N]"""
    state: torch.Tensor
    """[N]"""
    outcomes: torch.Tensor
    """[B]"""


@dataclass(frozen=True)
class TrainedBatch:
    """Results of a step for its batch: `B` rows are trajectories, `M` runs over their tokens."""

    advantages: np.ndarray
    """[B] fp32"""
    logprobs: np.ndarray
    """[M] fp32 of the learner's policy, as in the step's metrics; NaN where nothing was trained."""
    masked: np.ndarray
    """[M] bool: the correction dropped the token."""

    def part(self, first_row: int, rows: int, first_token: int, tokens: int) -> TrainedBatch:
        """Cut out `rows` consecutive trajectories with their tokens."""
        part = slice(first_token, first_token + tokens)
        return TrainedBatch(self.advantages[first_row : first_row + rows], self.logprobs[part], self.masked[part])


@dataclass(frozen=True)
class Batch:
    """`B` rows are the trajectories of all groups in order; `M` runs over all their completion tokens.

    Rows that could not be scored stay in `B` (their score is NaN) but in no training group, as do greedy ones, and all
    rows of a group whose greedy one has no score.
    """

    received: tuple[ReceivedGroup, ...]
    train_groups: tuple[TrainGroup, ...]
    scores: torch.Tensor
    """[B] fp32 reward of each row, NaN where there is none."""
    components: Mapping[str, torch.Tensor]
    """[B] fp32 each: the values that the reward is the weighted sum of."""
    groups: torch.Tensor
    """[B] int64 group of each row."""
    row_start: np.ndarray
    """[B] where each row's tokens begin in the [M] columns."""
    behaviour_logprobs: torch.Tensor
    """[M] fp32"""
    versions: np.ndarray
    """[M] int32"""
    processor: PromptProcessor
    """Processor that has encoded the prompts."""

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """[B] bool: rows that ended at the largest length, and not by a stop token."""
        records = (record for item in self.received for record in item.group.trajectories)
        return torch.tensor([record.finish_reason is FinishReason.LENGTH for record in records], dtype=torch.bool)

    @cached_property
    def is_over_limit(self) -> torch.Tensor:
        """[B] bool: rows of several turns that a limit ended (`environment.over_limit`)."""
        records = (record for item in self.received for record in item.group.trajectories)
        return torch.tensor([bool(record.limit) for record in records], dtype=torch.bool)

    def flat_index(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """[N], [N] -> [N] places in the [M] columns."""
        return torch.from_numpy(self.row_start)[row] + column

    @cached_property
    def trained(self) -> TrainedTokens:
        """The `N` tokens of all training groups that count in the loss: sampled ones, and inserted ones where the
        method learns from them."""
        completions = [completion for group in self.train_groups for completion in group.completions]
        masks = [completion.is_trained for completion in completions] or [np.zeros(0, bool)]
        number, column = flat_rows([len(mask) for mask in masks])
        kept = np.flatnonzero(np.concatenate(masks))
        rows = np.asarray([completion.row for completion in completions], np.int64)
        row = torch.from_numpy(rows[number[kept]])
        flat = self.flat_index(row, torch.from_numpy(column[kept]))
        place = torch.full_like(self.behaviour_logprobs, -1, dtype=torch.long)
        place[flat] = torch.arange(len(flat))
        return TrainedTokens(row, flat, place)

    def turns(self, *, zero_over_limit: bool) -> TurnColumns:
        """Turns of the trained tokens, from the records.

        `zero_over_limit`: trajectories that a limit ended are scored with 0, so that their turns earned nothing. The
        reward of a turn without a trained token is left out: credit for it would go to another turn.
        """
        nan = float("nan")
        outcomes: list[float] = []
        turns: list[tuple[int, int, float, int]] = []
        states: dict[str, int] = {}
        records = ((item.group, n, r) for item in self.received for n, r in enumerate(item.group.trajectories))
        for (group, index, record), start in zip(records, self.row_start.tolist(), strict=True):
            if index == 0:
                states = {"": -1, _opening_key(group): 0}
            share = 0.0 if zero_over_limit and record.limit else 1.0
            earned = [share * (turn.reward or 0.0) for turn in record.turns] or [0.0]
            outcomes.append(nan if record.reward is None else record.reward - sum(earned))
            starts = [start, *(start + turn.start for turn in record.turns[1:])]
            began = [0, *(states.setdefault(turn.state_key, len(states) - 1) for turn in record.turns[:-1])]
            turns += zip(starts, range(len(starts)), earned, began, strict=True)
        starts, numbers, rewards, began = (torch.tensor(column) for column in zip(*turns, strict=True))
        of_token = torch.searchsorted(starts, self.trained.flat, right=True) - 1
        last = torch.ones(len(of_token), dtype=torch.bool)
        last[:-1] = of_token[1:] != of_token[:-1]
        return TurnColumns(
            turn=numbers[of_token],
            turn_rewards=torch.where(last, rewards.float()[of_token], 0.0),
            state=began[of_token],
            outcomes=torch.tensor(outcomes, dtype=torch.float32),
        )

    @cached_property
    def provenance(self) -> Provenance[np.ndarray]:
        """Provenance of the M tokens and of the B rows."""
        return Provenance.of([item.group for item in self.received])

    @cached_property
    def trained_provenance(self) -> Provenance[torch.Tensor]:
        """Provenance of the N trained tokens and of the B rows."""
        return self.provenance.of_tokens(self.trained.flat.numpy()).map(torch.from_numpy)

    def places(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Places among the `N` trained tokens of those of a micro-batch."""
        return self.trained.place[self.flat_index(row, column)]

    def places_of(self, groups: Sequence[TrainGroup]) -> torch.Tensor:
        """Places among the `N` trained tokens of those of these training groups."""
        rows = torch.zeros(len(self.scores), dtype=torch.bool)
        rows[[completion.row for group in groups for completion in group.completions]] = True
        return rows[self.trained.row].nonzero()[:, 0]

    def name_rows(self, rows: Iterable[int]) -> str:
        """Name rows as the user knows them: the prompt's row id and which of its completions."""
        names: list[str] = []
        for row in rows:
            group = int(self.groups[row])
            first = int(torch.searchsorted(self.groups, group))
            names.append(f"{self.received[group].ticket.prompt.row_id} (completion {row - first})")
        more = len(names) - MOST_NAMED
        return ", ".join(names[:MOST_NAMED]) + (f" and {more} more rows" if more > 0 else "")


def _opening_key(group: Group) -> str:
    """The key of the state in which first turns are taken, as an environment that names no states has it: that of what
    it shows. A trajectory that comes back there is in this state again."""
    opening = observation_of(group.opening, group.blobs)
    return key_of(opening).hex() if opening.messages else "opening"


def make_batch(
    received: Sequence[ReceivedGroup],
    processor: PromptProcessor,
    *,
    inserted: bool = False,
    defers_pixels: bool = False,
) -> Batch:
    """Rows in the order of the groups. Only scored rows with a trainable token are trained on, and no greedy one; none
    of a group that lacks its baseline.

    With `inserted`, tokens that the tickets put in place are trained, too.

    Images have stayed encoded until here; the processor's cache spares most of them a second decoding. With
    `defers_pixels` those of a prompt are decoded when its group is packed.
    """
    train_groups: list[TrainGroup] = []
    scores: list[float] = []
    group_of_row: list[int] = []
    for number, item in enumerate(received):
        group = item.group
        completions: list[PackedTrajectory] = []
        is_trained = group.is_sampled | item.provenance.is_inserted if inserted else group.is_sampled
        left_out = item.provenance.is_baseline | item.lacks_baseline
        bounds = [0, *group.lengths.cumsum().tolist()]
        trained = np.append(0, is_trained.cumsum(dtype=np.int64))[bounds].tolist()
        rows = zip(group.trajectories, left_out.tolist(), pairwise(bounds), pairwise(trained), strict=True)
        for index, (record, is_out, (start, end), (before, after)) in enumerate(rows):
            if after > before and not is_out and record.status.is_scored:
                token_ids, mask = group.token_ids[start:end], is_trained[start:end]
                traces = {name: columns.completions[start:end] for name, columns in group.traces.items()}
                completions.append(PackedTrajectory(len(scores), token_ids, mask, segments_of(item, index), traces))
            scores.append(float("nan") if record.reward is None else record.reward)
            group_of_row.append(number)
        if completions:
            encode = partial(processor.encode, item.prompt, item.blobs)
            prompt = processor.measure(item.prompt, item.blobs) if defers_pixels else encode()
            traces = {name: columns.prompt for name, columns in group.traces.items()}
            train_groups.append(TrainGroup(prompt, tuple(completions), encode if defers_pixels else None, traces))
    lengths = np.concatenate([item.group.lengths for item in received]).astype(np.int64)
    return Batch(
        received=tuple(received),
        train_groups=tuple(train_groups),
        scores=torch.tensor(scores, dtype=torch.float32),
        components=_components([record for item in received for record in item.group.trajectories]),
        groups=torch.tensor(group_of_row, dtype=torch.long),
        row_start=np.cumsum(lengths) - lengths,
        behaviour_logprobs=torch.from_numpy(np.concatenate([item.group.logprobs for item in received])),
        versions=np.concatenate([item.group.versions for item in received]),
        processor=processor,
    )


def _components(records: Sequence[TrajectoryRecord]) -> dict[str, torch.Tensor]:
    names = sorted({name for record in records if record.reward is not None for name in record.rewards})
    nan = float("nan")
    return {
        name: torch.tensor([r.rewards.get(name, nan) if r.reward is not None else nan for r in records])
        for name in names
    }


def describe_batch(
    batch: Batch, version: int, accuracy_component: str, *, compares_rows: bool = True
) -> dict[str, float]:
    """Rewards, statuses, lengths and staleness of a batch that is about to be trained at `version`. Lengths and
    `tokens` leave out what an environment showed.

    Rewards and lengths are those of what the policy sampled: greedy trajectories and those inserted whole count in the
    statuses alone, and greedy ones have metrics of their own. `compares_rows`: credit is the difference from a group's
    other trajectories.
    """
    groups = [item.group for item in batch.received]
    everyone = [record for group in groups for record in group.trajectories]
    provenance = batch.provenance
    is_sampled = ~(provenance.is_baseline | provenance.is_demonstration)
    statuses = Counter(record.status for record in everyone)
    conversations = [item.group for item in batch.received if item.ticket.conversation is not None]
    shown = provenance.source == TokenSource.OBSERVATION
    lengths = np.bincount(provenance.row[~shown], minlength=len(is_sampled))[is_sampled]
    staleness = version - batch.versions[provenance.is_drawn]
    described = {f"rows/{status}": float(statuses[status]) for status in TrajectoryStatus}
    described |= {
        "response_length/mean": float(lengths.mean()) if lengths.size else 0.0,
        "response_length/max": float(lengths.max()) if lengths.size else 0.0,
        "prompt_length/mean": float(np.mean([group.prompt_ids.size for group in groups])),
        "tokens": float(lengths.sum()),
        "staleness/mean": float(staleness.mean()) if staleness.size else 0.0,
        "staleness/max": float(staleness.max()) if staleness.size else 0.0,
    }
    described |= _describe_conversations(conversations)
    scored = [record for record, mine in zip(everyone, is_sampled, strict=True) if mine and record.reward is not None]
    for name in sorted({name for record in scored for name in record.rewards}):
        values = [record.rewards[name] for record in scored if name in record.rewards]  # rewards may change at a resume
        described[f"reward/{name}"] = float(np.mean(values))
    if scored:
        rewards = np.asarray([record.reward for record in scored])
        described |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        accuracy = described.get(f"reward/{accuracy_component or 'mean'}")
        described |= {} if accuracy is None else {"accuracy": accuracy}
    if provenance.saw_other_images.any():
        described["other_images/reward"] = float(batch.scores[provenance.saw_other_images].nanmean())
    rewards_of_groups: dict[int, set[float]] = {number: set() for number in range(len(groups))}
    for number, record, is_out in zip(batch.groups.tolist(), everyone, provenance.is_baseline, strict=True):
        if record.reward is not None and not is_out:
            rewards_of_groups[number].add(record.reward)
    alike = sum(len(rewards) <= 1 for rewards in rewards_of_groups.values())
    differing = len(groups) - alike
    if not compares_rows and len(set().union(*rewards_of_groups.values())) > 1:
        differing = len(groups)
    inserted = sum(item.provenance.is_inserted.any() for item in batch.received)  # they teach whatever they score
    described |= {
        "groups": float(len(groups)),
        "zero_variance_groups": float(alike),
        "teaching_groups": float(max(differing, inserted)),
    }
    if provenance.is_baseline.any():
        described["baseline/missing"] = float(sum(item.lacks_baseline for item in batch.received))
        described["baseline/reward"] = float(batch.scores[provenance.is_baseline].nanmean())
    if provenance.is_inserted.any():
        described["inserted/groups"] = float(inserted)
    return described


def _describe_conversations(groups: Sequence[Group]) -> dict[str, float]:
    """Statistics of trajectories that an environment answered, with waits and observations; empty without any."""
    records = [record for group in groups for record in group.trajectories]
    if not records:
        return {}
    sampled = sum(turn.end - turn.start for record in records for turn in record.turns)
    return describe_conversations(records) | {
        "env/seconds": sum(group.timings.environment_s for group in groups) / len(records),
        "env/observed_share": 1 - sampled / max(1, sum(int(group.lengths.sum()) for group in groups)),
    }


def segments_of(item: ReceivedGroup, index: int) -> tuple[Segment, ...]:
    """The segments of completion `index`, with the images that it was shown in each.

    Its bridges are made again, with pixels, of the messages and bytes that the group records: no environment is asked.
    What was made lately waits in the processor's cache. The group is verified.
    """
    bridge, rule = item.prepared.bridge, item.ticket.conversation
    if bridge is None or rule is None:
        return (Segment(),)  # a single turn
    record = item.group.trajectories[index]
    turns, starts = record.turns, record.segment_starts
    if not any(images_of(turn.observation) for turn in turns):
        return tuple(map(Segment, starts))
    token_ids = item.group.token_ids[item.group.span(index)]
    history, segments = History(bridge, rule, item.ticket.prompt, pixels=True), list[Segment]()

    def end_segment() -> None:
        row = history.pieces[0].followed_by(history.pieces[1:])
        segments.append(Segment(starts[len(segments)], row if len(row.image_hashes) else None))

    for turn, following in pairwise(turns):
        history.add_turn(token_ids[turn.start : turn.end])
        if following.context:
            end_segment()
        observation = observation_of(turn.observation, item.group.blobs)
        edited = history_of(turn.history, item.group.blobs)
        history.show(observation, history.after(observation, edited))
    history.add_turn(token_ids[turns[-1].start : turns[-1].end])
    end_segment()
    return tuple(segments)
