"""Demonstrations from the data to the step: requests of tickets, and what a step learns from inserted tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.checks.inputs import check_targets
from asyncrl.config.explain import schedule_notes
from asyncrl.config.installed_methods import methods
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.demonstrations.tickets import Demonstrations, part_ends
from learner.groups.ticket import ReceivedGroup
from learner.loop.resume import lasting_settings
from learner.tickets.ticket_hook import TicketRow
from learner.tickets.ticket_writer import ANSWERS, TicketWriter
from learner.training.batch import Batch, describe_batch
from learner.training.packing import plan_micro_batches
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.messages import TrajectoryRecord, TrajectoryRequest
from tests.rigs.made_up_batch import KeepGradients, made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
HYBRIDS = [name for name, method in methods("policy_loss").items() if "inserted" in method.needs]
SCORE_OF_RIGHT = {"hpt": {"success_gate": {"success_score": 0.8}}, "srft": {"srft": {"success_score": 0.8}}}
TEXT = "read 3 7 answer 10"
PIECES = ["read", " 3", " 7", " answer", " 10"]


def slot(number: int, version: int = 0) -> TicketSlot:
    return TicketSlot(number, number, version=version, bound=0)


def made(config: RunConfig) -> tuple[Demonstrations, PromptProcessor]:
    processor = PromptProcessor(config.model)
    stop = processor.tokenizer.eos_token_id
    (hook,) = TicketWriter(config.ticket_settings, processor, (stop,))._hooks
    assert isinstance(hook, Demonstrations)
    return hook, processor


def row(number: int, version: int = 0, text: str = TEXT, trajectories: int = 4) -> TicketRow:
    return TicketRow("row", [], target=text, trajectories=trajectories, version=version, done=0.0, seed=(1, number))


# --- requests ------------------------------------------------------------------------------------------------


def test_segments_are_sentences_or_words_in_equal_parts() -> None:
    def parts(text: str, most: int) -> list[str]:
        ends = part_ends(text, most)
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    assert parts(TEXT, 5) == parts(TEXT, 9) == PIECES
    assert parts(TEXT, 2) == ["read 3", " 7 answer 10"]
    assert parts("First it is so. Then so!\nSo it is 3.5.", 5) == ["First it is so.", " Then so!", "\nSo it is 3.5."]
    assert parts("one", 5) == ["one"]


def test_a_demonstration_is_the_tokens_of_a_completion_with_its_stop_token(make_config: MakeConfig) -> None:
    config = make_config(algorithm={"policy_loss": "luffy"})
    processor = PromptProcessor(config.model)
    stop = processor.tokenizer.eos_token_id
    writer = TicketWriter(config.ticket_settings, processor, (stop,))
    ticket = writer.write(slot(3)).ticket
    *sampled, demonstration = ticket.requests
    assert sampled == [TrajectoryRequest()] * 3
    assert demonstration.prefix[-1] == stop
    assert processor.decode(np.asarray(demonstration.prefix)) == ticket.prompt.columns["target"]
    assert writer.write(slot(3)).ticket == ticket, "a slot is always the same ticket"
    assert writer.write_evaluation(0, 0).ticket.requests == ()


def test_hints_are_the_first_segments_drawn_for_each_trajectory(make_config: MakeConfig) -> None:
    config = make_config(algorithm={"policy_loss": "uft", "demonstrations": {"hints": {"parts": 5}}})
    demonstrations, processor = made(config)
    beginnings = ["".join(PIECES[:j]) for j in range(6)]
    shares = []
    for version in (0, 150, 300, 301):
        drawn: Counter[int] = Counter()
        for number in range(300):
            changes = demonstrations(row(number, version))
            assert changes == demonstrations(row(number, version))
            prefixes = [changes[index].prefix if index in changes else () for index in range(4)]
            texts = [processor.tokenizer.decode(prefix) for prefix in prefixes]
            drawn.update(beginnings.index(text) for text in texts)  # no stop token: something is sampled behind it
        shares.append(sum(j * count for j, count in drawn.items()) / (5 * drawn.total()))
    assert shares == pytest.approx([0.95, 0.5, 0.05, 0.0], abs=0.03)


def test_rows_without_a_usable_demonstration_have_none(make_config: MakeConfig) -> None:
    config = make_config(algorithm={"policy_loss": "chord_mu", "demonstrations": {"share": 0.25}})
    demonstrations, processor = made(config)
    stop = processor.tokenizer.eos_token_id
    given = [bool(demonstrations(row(number, trajectories=3))) for number in range(400)]
    assert sum(given) / 400 == pytest.approx(0.25, abs=0.07)
    for text in ("", "read" + " 1" * 8, "read <|im_end|>", "<|image_pad|>"):
        assert demonstrations.token_ids(text) is None
    nothing = make_config(data={"target_key": "nothing"}, algorithm={"policy_loss": "luffy"})
    with pytest.raises(UserError, match=r"none of 64 training rows has one: column 'nothing' \(data\.target_key\)"):
        TicketWriter(nothing.ticket_settings, processor, (stop,))
    TicketWriter(make_config(data={"target_key": "nothing"}).ticket_settings, processor, (stop,))


def test_a_column_that_no_row_has_is_refused(make_config: MakeConfig) -> None:
    config = make_config(algorithm={"policy_loss": "luffy"}, data={"target_key": "digts"})
    with pytest.raises(UserError, match=r"has a column 'digts' \(data.target_key\). Did you mean 'digits'"):
        check_targets(config.algorithm, config.data.target_key, open_train(config.data))


def test_a_group_needs_room_for_what_is_sampled(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="leaves 1 completions to sample: chord_mu needs at least 2"):
        make_config(batch={"group_size": 2}, algorithm={"policy_loss": "chord_mu"})
    make_config(batch={"group_size": 2}, algorithm={"policy_loss": "luffy"})


def test_what_demonstrations_have_no_use_for_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.demonstrations\.rows and .* are 0.*Set rows=1"):
        make_config(algorithm={"policy_loss": "luffy", "demonstrations": {"rows": 0}})
    with pytest.raises(ValueError, match="drop the groups that have the most to learn"):
        make_config(algorithm={"policy_loss": "luffy", "filters": ["zero_variance"]})
    with pytest.raises(ValueError, match=r"success_gate needs tokens .* Set algorithm\.demonstrations"):
        make_config(algorithm={"selections": ["success_gate"]})


def test_a_resumed_run_must_make_the_same_requests(make_config: MakeConfig) -> None:
    recorded = []
    for algorithm in ({}, {"policy_loss": "luffy"}, {"policy_loss": "uft"}):
        config = make_config(algorithm=algorithm)
        processor = PromptProcessor(config.model)
        writer = TicketWriter(config.ticket_settings, processor, (1,))
        recorded.append(lasting_settings(config, writer, processor))
    plain, luffy, uft = recorded
    assert not any("demonstrations" in name for name in plain)
    assert (luffy["algorithm.demonstrations.rows"], uft["algorithm.demonstrations.rows"]) == (1, 0)
    assert uft["algorithm.demonstrations.hints.parts"] == 5
    assert ANSWERS in luffy, "targets, from which requests are made"
    assert ANSWERS not in plain


@pytest.mark.parametrize(
    ("name", "steps", "key"),
    [
        ("chord_mu", 600, "algorithm.chord_mu.warmup_steps (200) and decay_steps (400)"),
        ("uft", 300, "algorithm.demonstrations.hints.steps is 300"),
    ],
)
def test_a_schedule_that_the_run_is_too_short_for_is_named(
    make_config: MakeConfig, name: str, steps: int, key: str
) -> None:
    config = make_config(algorithm={"policy_loss": name})
    (note,) = schedule_notes(config, steps)
    assert key in note
    assert not list(schedule_notes(config, steps + 1))


# --- the step ----------------------------------------------------------------------------------------------


def prepared(make_config: MakeConfig, name: str, budget: int = 4096, **algorithm: Any) -> tuple[RunConfig, Batch]:
    config = make_config(
        data={"max_prompt_length": 64},
        batch={"tokens_per_microbatch": budget},
        algorithm={"policy_loss": name} | SCORE_OF_RIGHT.get(name, {}) | algorithm,
    )
    return config, made_up_batch(config, PromptProcessor(config.model))


def one_step(config: RunConfig, batch: Batch, version: int = 3) -> tuple[dict[str, float], KeepGradients]:
    engine = KeepGradients(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    return LearnerStep(Roles(engine), config.step_settings)(batch, version), engine


def distance(ours: KeepGradients, theirs: KeepGradients) -> float:
    norm = torch.stack([gradient.norm() for gradient in theirs.gradients.values()]).norm()
    difference = torch.stack([(ours.gradients[n] - g).norm() for n, g in theirs.gradients.items()]).norm()
    return float(difference / norm)


@pytest.mark.parametrize("name", HYBRIDS)
def test_micro_batching_changes_nothing(make_config: MakeConfig, name: str) -> None:
    config, batch = prepared(make_config, name, entropy_coeff=0.01)
    small, _ = prepared(make_config, name, 72, entropy_coeff=0.01)
    assert len(plan_micro_batches(batch.train_groups, 72)) >= 4
    assert batch.trained_provenance.is_inserted.any()
    (whole, one), (parts, many) = one_step(config, batch), one_step(small, batch)
    assert whole.keys() == parts.keys()
    for metric in ("loss", "loss/supervised", "supervised_weight", "inserted/tokens", "inserted/logprob"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-4, abs=1e-7)
    assert distance(many, one) < 1e-5


@pytest.mark.parametrize("name", HYBRIDS)
def test_expert_tokens_have_no_behaviour_policy(make_config: MakeConfig, name: str) -> None:
    """Log-probs and versions that stand for none change neither gradients nor what is said about the policy."""
    algorithm = {"entropy_coeff": 0.01, "updates_per_batch": 2, "correction": {"masks": [{"kind": "veto"}]}}
    config, batch = prepared(make_config, name, **algorithm)
    noise = torch.where(torch.from_numpy(batch.provenance.is_inserted), -5.0, batch.behaviour_logprobs)
    versions = np.where(batch.provenance.is_inserted, 0, batch.versions)
    other = replace(batch, behaviour_logprobs=noise, versions=versions)
    (metrics, engine), (noisy, same) = one_step(config, batch), one_step(config, other)
    assert noisy == metrics
    assert all(torch.equal(engine.gradients[n], g) for n, g in same.gradients.items())


@pytest.mark.parametrize(("name", "version"), [("chord_mu", 50), ("chord_mu", 400), ("chord_phi", 7), ("uft", 3)])
def test_the_supervised_part_is_what_the_formula_says(make_config: MakeConfig, name: str, version: int) -> None:
    config, batch = prepared(make_config, name)
    metrics, engine = one_step(config, batch, version)
    step = LearnerStep(Roles(engine), config.step_settings)
    logprobs = torch.from_numpy(_learner_logprobs(step, batch, version))[batch.trained_provenance.is_inserted]
    p = logprobs.exp()
    mu = {"chord_mu": 0.125 if version == 50 else 0.26, "chord_phi": 0.1, "uft": 1e-3}[name]
    weight = mu * (p * (1 - p) if name == "chord_phi" else torch.ones_like(p))
    assert metrics["supervised_weight"] == pytest.approx(float(weight.mean()), rel=1e-5)
    assert metrics["loss/supervised"] == pytest.approx(float(-(weight * logprobs).mean()), rel=1e-5)
    assert metrics["inserted/tokens"] == int(batch.trained_provenance.is_inserted.sum())
    plain_config, _ = prepared(make_config, "ppo")
    only_sampled = _without_experts(batch)
    plain, _ = one_step(plain_config, only_sampled, version)
    share = 1 - mu if name.startswith("chord") else 1.0
    assert metrics["loss"] == pytest.approx(share * plain["loss"] + metrics["loss/supervised"], rel=1e-4, abs=1e-7)
    for said in ("entropy", "ess", "mismatch_kl_k3", "clip_fraction", "ratio/p50"):
        assert metrics[said] == pytest.approx(plain[said], rel=1e-5), "what is said of the policy is of its own tokens"


def _learner_logprobs(step: LearnerStep, batch: Batch, version: int) -> np.ndarray:
    step(batch, version)
    return step.trained.logprobs[batch.trained.flat.numpy()]


def _without_experts(batch: Batch) -> Batch:
    """What plain reinforcement learning sees of a batch: no demonstration has a score, and no hint is trained."""
    kept = []
    for group in batch.train_groups:
        masked = (
            replace(c, is_trained=c.is_trained & ~_prefix_of(batch, c.row, len(c.is_trained)))
            for c in group.completions
        )
        kept.append(replace(group, completions=tuple(c for c in masked if c.is_trained.any())))
    scores = torch.where(batch.trained_provenance.is_demonstration, torch.nan, batch.scores)
    return replace(batch, train_groups=tuple(kept), scores=scores)


def _named(item: ReceivedGroup, component: str) -> Iterator[TrajectoryRecord]:
    """Records whose reward has one component."""
    for record in item.group.trajectories:
        rewards = {} if record.reward is None else {component: record.reward}
        yield record.model_copy(update={"rewards": rewards})


def _prefix_of(batch: Batch, row: int, length: int) -> np.ndarray:
    return batch.provenance.is_inserted[batch.row_start[row] :][:length]


def test_luffy_credits_demonstrations_as_members_of_their_group(make_config: MakeConfig) -> None:
    config, batch = prepared(make_config, "luffy")
    for name, credited in (("luffy", True), ("chord_mu", False)):
        config, batch = prepared(make_config, name)
        step = LearnerStep(Roles(KeepGradients(config.model_settings, config.learner.optim, 1)), config.step_settings)
        step.roles.actor.prepare()
        step(batch, 3)
        advantages = torch.from_numpy(step.trained.advantages)
        is_demonstration = batch.trained_provenance.is_demonstration
        assert bool((advantages[is_demonstration] != 0).any()) == credited
        members = batch.scores if credited else torch.where(is_demonstration, torch.nan, batch.scores)
        first = batch.groups == 0
        centred = members[first] - members[first].nanmean()
        if not credited:
            centred = centred / members[first][~members[first].isnan()].std()
        torch.testing.assert_close(advantages[first], centred.nan_to_num(), atol=1e-4, rtol=1e-4)


def test_hpt_trains_a_group_on_its_demonstration_or_on_what_it_sampled(make_config: MakeConfig) -> None:
    config, batch = prepared(make_config, "hpt", success_gate={"success_score": 0.5})
    scores = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    assert batch.trained_provenance.is_demonstration.tolist() == [False, False, False, True] * 4
    _, engine = one_step(config, batch := replace(batch, scores=scores))
    decided = LearnerStep(Roles(engine), config.step_settings)._decide(batch, 3)
    trained = {batch.trained.row[decided.batch.places_of([group])].unique().numel() for group in decided.train_groups}
    rows = [c.row for group in decided.train_groups for c in group.completions]
    assert rows == [3, 4, 5, 8, 9, 10, 15], "row 6 could not be scored"
    assert trained == {1, 2, 3}


def test_rewards_and_lengths_are_told_of_the_policy_alone(make_config: MakeConfig) -> None:
    config, batch = prepared(make_config, "luffy")
    component = config.reward.accuracy_component
    told = tuple(
        replace(item, group=item.group.model_copy(update={"trajectories": tuple(_named(item, component))}))
        for item in batch.received
    )
    described = describe_batch(replace(batch, received=told), 3, component)
    rewards = batch.scores[~batch.trained_provenance.is_demonstration]
    assert described["reward/mean"] == pytest.approx(float(rewards.nanmean()))
    assert described["inserted/groups"] == 4
