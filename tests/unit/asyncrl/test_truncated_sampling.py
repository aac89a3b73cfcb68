"""Top-p, top-k and min-p: the log-probs are those of what is sampled, and whatever would hide that is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.sampling_rules import ENGINE_SAMPLING_KEYS
from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import TicketSlot
from asyncrl.models.loading import load_model
from asyncrl.models.sampling_distribution import draw, sampling_logprobs, truncated_logprobs
from asyncrl.processing.processor import PromptProcessor
from learner.tickets.ticket_writer import TicketWriter
from protocol.messages import TicketFailed, Tickets
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, GenerationRequest
from rollout_server.production.group_producer import check_sampling
from rollout_server.tickets_in_work import TicketsInWork

MakeConfig = Callable[..., RunConfig]

SETTINGS = [
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10**6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_p": 0.8, "top_k": 7},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
]


def reference(logits: np.ndarray, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """[V] -> [V] log-probs, one token at a time in float64: min-p, then top-k, then top-p."""
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()
    order = sorted(range(len(logits)), key=lambda i: (-probability[i], i))
    order = [i for i in order if probability[i] >= min_p * probability[order[0]] and probability[i] > 0]
    order = order[: top_k or None]
    total, mass, kept = sum(probability[i] for i in order), 0.0, []
    for i in order:
        if mass >= top_p * total and top_p < 1:
            break
        kept.append(i)
        mass += probability[i]
    result = np.full(len(logits), -np.inf)
    result[kept] = np.log(probability[kept] / mass)
    return result


def truncate(logits: torch.Tensor, *settings: dict[str, float]) -> torch.Tensor:
    columns = {
        name: torch.tensor([s.get(name, off) for s in settings], dtype=torch.float64)
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
    }
    return truncated_logprobs(torch.log_softmax(logits, -1), **columns)


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_truncated_log_probs_equal_the_reference(scale: float) -> None:
    logits = scale * torch.randn((len(SETTINGS), 50), generator=torch.Generator().manual_seed(3))
    logits[:, 7] = float("-inf")  # banned
    found = truncate(logits, *SETTINGS)
    for row, settings in enumerate(SETTINGS):
        expected = reference(logits[row].double().numpy(), **settings)
        np.testing.assert_array_equal(np.isfinite(found[row].numpy()), np.isfinite(expected), err_msg=str(settings))
        np.testing.assert_allclose(found[row].numpy(), expected, atol=1e-5)


def test_worked_numbers() -> None:
    """Probabilities 0.5, 0.3, 0.15, 0.05."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for settings in ({"top_p": 0.6}, {"top_k": 3, "min_p": 0.5}):
        torch.testing.assert_close(truncate(logits, settings).exp(), torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    assert truncate(torch.zeros(1, 4), {"top_k": 2}).exp().tolist() == [[0.5, 0.5, 0.0, 0.0]], "ties: lower ids first"


def test_a_draw_never_takes_a_token_of_probability_zero() -> None:
    logprobs = torch.tensor([[float("-inf"), 0.5, 0.5, float("-inf")]]).log_softmax(-1)
    for uniform, token in ((0.0, 1), (0.25, 1), (0.75, 2), (np.nextafter(1.0, 0.0), 2)):
        assert draw(logprobs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


# --- the engine -----------------------------------------------------------------------------------------


def request_of(config: RunConfig, processor: PromptProcessor, number: int, **sampling: Any) -> GenerationRequest:
    item = TicketWriter(config.ticket_settings, processor, (1,)).write(TicketSlot(number, number, version=0, bound=0))
    changed = item.ticket.sampling.model_copy(update={"stop_token_ids": (), **sampling})
    return GenerationRequest(number, processor.encode(item.ticket.prompt, item.blobs), 4, item.ticket.seed, changed)


def sample(config: RunConfig, processor: PromptProcessor, requests: list[GenerationRequest]) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = create_engine(config, processor)
        await engine.start()
        try:
            done = [c async for c in engine.generate(requests)]
        finally:
            await engine.close()
        return sorted(done, key=lambda c: (c.request_id, c.index))

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_the_engine_returns_log_probs_of_the_truncated_distribution(make_config: MakeConfig) -> None:
    """Each request of one batch has its own settings; a fresh forward pass is the judge."""
    config = make_config(rollout={"temperature": 0.8})
    processor = PromptProcessor(config.model)
    requests = [request_of(config, processor, i, **s) for i, s in enumerate([*SETTINGS, {}])]
    model: Any = load_model(config.model, device=torch.device("cpu"))
    banned = torch.tensor(processor.placeholder_ids)
    for done in sample(config, processor, requests):
        request = requests[done.request_id]
        prompt, s = request.prompt, request.sampling
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, done.token_ids])).long()[None]
        types = torch.from_numpy(np.concatenate([prompt.token_types, np.zeros_like(done.token_ids)])).long()[None]
        grids = torch.from_numpy(prompt.image_grids).long()
        with torch.no_grad():
            logits = model(
                input_ids=ids, mm_token_type_ids=types, pixel_values=prompt.pixel_values, image_grid_thw=grids
            ).logits[0, len(prompt.token_ids) - 1 : -1]
        full = sampling_logprobs(logits, temperature=s.temperature, banned=banned)
        for place, token in enumerate(done.token_ids):
            expected = reference(full[place].double().numpy(), top_p=s.top_p, top_k=s.top_k, min_p=s.min_p)
            assert done.logprobs[place] == pytest.approx(expected[token], abs=2e-5)
            assert np.exp(float(full[place, token]) - float(done.logprobs[place])) <= 1 + 1e-5, (
                "pi / mu is the kept mass"
            )


def test_truncated_neighbours_change_nothing(make_config: MakeConfig) -> None:
    config = make_config()
    processor = PromptProcessor(config.model)
    plain = request_of(config, processor, 0)
    neighbours = [
        sample(config, processor, [plain, request_of(config, processor, 1, **s)])[:4] for s in ({}, SETTINGS[0])
    ]
    for left, right in zip(*neighbours, strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)
        np.testing.assert_array_equal(left.logprobs, right.logprobs)


# --- what is refused at the start -----------------------------------------------------------------------


def refused(make_config: MakeConfig, expected: str, **sections: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=expected):
        make_config(**sections)


def test_sampling_that_makes_the_ratio_wrong_is_refused(make_config: MakeConfig) -> None:
    nested = {"engine": {"sampling": {"top_p": 0.7}}}
    refused(make_config, r"has engine.sampling.top_p, .* Set rollout.top_p", rollout={"engine_args": nested})
    for key, fix in ENGINE_SAMPLING_KEYS.items():
        refused(make_config, rf"engine_args has {key}, .*{fix[:20]}", rollout={"engine_args": {key: 1}})


DRIFT_MEASURES: list[dict[str, Any]] = [
    *({"correction": {"kind": f"{level}_{form}"}} for level in ("sequence", "geometric") for form in ("tis", "mis")),
    *({"correction": {"masks": [{"kind": kind}]}} for kind in ("sequence", "geometric", "dppo_tv", "opsm")),
    {"selections": ["m2po"]},
    {"proximal": "loglinear"},
    {"proximal": "linear"},
]


def test_what_takes_truncation_for_drift_is_refused(make_config: MakeConfig) -> None:
    for algorithm in DRIFT_MEASURES:
        make_config(algorithm=algorithm)
        expected = r"algorithm\.\S+ (is|has) \w+ and rollout.top_p=0.9: .*\(rollout.top_p=1\)"
        refused(make_config, expected, algorithm=algorithm, rollout={"top_p": 0.9})
    for kind in ("none", "token_tis", "token_mis", "icepop"):
        make_config(algorithm={"correction": {"kind": kind, "masks": [{"kind": "veto"}]}}, rollout={"top_k": 20})


def test_training_tickets_truncate_and_evaluation_does_not(make_config: MakeConfig) -> None:
    cut = make_config(rollout={"top_p": 0.9, "temperature": 0.7, "min_p": 0.05})
    writer = TicketWriter(cut.ticket_settings, PromptProcessor(cut.model), (1,))
    training = writer.write(TicketSlot(0, 0, version=0, bound=0)).ticket.sampling
    assert (training.temperature, training.top_p, training.top_k, training.min_p) == (0.7, 0.9, 0, 0.05)
    evaluation = writer.write_evaluation(0, 0).ticket.sampling
    assert (evaluation.temperature, evaluation.truncates) == (0, False)


def test_a_ticket_with_another_distribution_goes_back_to_the_learner(make_config: MakeConfig) -> None:
    mine, learner = make_config(), make_config(rollout={"top_p": 0.9})
    writer = TicketWriter(learner.ticket_settings, PromptProcessor(learner.model), (1,))
    ticket = writer.write(TicketSlot(0, 0, version=0, bound=0)).ticket
    check_sampling([ticket], learner.rollout)
    link = AsyncMock(unacknowledged={})

    async def receive() -> None:
        async with asyncio.TaskGroup() as tasks:
            in_work = TicketsInWork(mine.rollout, link, Mock(), Mock(), Mock(), tasks)
            in_work.begin(Tickets(tickets=(ticket,)))

    asyncio.run(receive())
    failed = link.send.await_args.args[0]
    assert isinstance(failed, TicketFailed)
    assert "rollout.top_p is 1 here and 0.9 at the learner" in failed.error_message
    assert "Start both services with the same configuration" in failed.error_message
