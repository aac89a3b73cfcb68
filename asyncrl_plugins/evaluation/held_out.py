"""Held-out rows played with the run's environment and scored, without a learner: `asyncrl eval CONFIG --model FOLDER`.

Tickets, conversations, engine and random streams are those of the evaluations that a run makes of itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path

from asyncrl.checks.inputs import check_engine, check_lengths
from asyncrl.config.schema import RunConfig
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.held_out import EVALUATION_IDS, evaluation_ticket, held_out_prompts
from asyncrl.devices.device import compute_in_full_float32, resolve_dtype
from asyncrl.environments.recording import EnvironmentHealth, described_turns
from asyncrl.errors import BadStateError, UserError
from asyncrl.model_files.folder import describe_folder
from asyncrl.models.loading import model_of_export
from asyncrl.models.lora import is_adapter_folder
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewarded
from asyncrl_plugins.evaluation.adapters import settings_of, start_policy
from asyncrl_plugins.evaluation.plain_scores import EvaluatedRow, EvaluationProgress
from protocol.messages import Group, Ticket, TicketFailed, TrajectoryRecord
from rollout_server.engines import create_engine
from rollout_server.engines.base import EngineDied, InferenceEngine
from rollout_server.production.environments import Environments, environment_workers, environments_of
from rollout_server.production.group_producer import GroupProducer


def play_held_out(config: RunConfig, folder: Path) -> list[EvaluatedRow]:
    """Play every held-out row with the model in `folder`, or with its adapter on `model.path`, by the run's engine.

    `evaluation.group_size` trajectories a row, those of a row one after the other. What an environment loses has a
    status and no score. Raises UserError, and BadStateError where the environment is dead.
    """
    return asyncio.run(_play(_with_model(config, folder), folder))


def play_row(config: RunConfig, folder: Path, rendered: RenderedPrompt) -> tuple[Group, PromptProcessor]:
    """Play one row once, as `play_held_out` does; the processor is the model's. Raises UserError, also where it does
    not begin."""

    async def play(config: RunConfig) -> tuple[Group, PromptProcessor]:
        one_process = config.environment.model_copy(update={"workers": 1})
        async with _playing(config.model_copy(update={"environment": one_process})) as (engine, producer, processor, _):
            await start_policy(engine, config, folder)
            ticket = _ticket(config, processor, 0, rendered)
            blobs = {digest: memoryview(data) for digest, data in rendered.blobs.items()}
            (answer,) = [answer async for answer in producer.produce([ticket], blobs)]
        if not isinstance(answer, Group):
            assert isinstance(answer, TicketFailed), "nobody asks for tickets back"
            raise UserError(f"{answer.error_kind}: {answer.error_message}")
        return answer, processor

    evaluation = config.evaluation.model_copy(update={"group_size": 1})
    return asyncio.run(play(_with_model(config.model_copy(update={"evaluation": evaluation}), folder)))


def _with_model(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with this model, or with this adapter of `model.path`, checked."""
    check_rewarded(config.reward, config.environment)
    config = resolve_dtype(config)
    compute_in_full_float32()
    if is_adapter_folder(folder):
        model = settings_of(config.model, folder)
    else:
        lora = config.model.lora.model_copy(update={"rank": 0})
        whole = {"path": str(folder), "lora": lora, "quantization": ""}
        model = model_of_export(config.model, folder).model_copy(update=whole)
    config = config.model_copy(update={"model": model})
    check_lengths(config, describe_folder(model))
    check_engine(config)
    return config


async def _play(config: RunConfig, folder: Path) -> list[EvaluatedRow]:
    async with _playing(config) as (engine, producer, processor, environments):
        num_rows, prompts = held_out_prompts(config.data, processor, config.network.max_message_mib, config.purpose)
        await start_policy(engine, config, folder)
        rows = _Rows(config, processor, num_rows, prompts)
        live = max(1, config.environment.capacity // config.evaluation.group_size)
        # Two halves, so that one goes on while the last ones of the other are played; rounds take all together.
        parts = [live] if environments.in_rounds or live == 1 else [live - live // 2, live // 2]
        await _all([rows.play(producer, rows_at_once) for rows_at_once in parts])
        return rows.scored()


@asynccontextmanager
async def _playing(
    config: RunConfig,
) -> AsyncIterator[tuple[InferenceEngine, GroupProducer, PromptProcessor, Environments]]:
    """Parts that play tickets, started but for the engine: what can be refused without a model is refused first."""
    processor = PromptProcessor(config.model, config.data.chat_template_kwargs)
    workers = environment_workers(config.environment, processor)
    assert workers is not None, "rows of one turn are scored by plain transformers"
    engine, rewards = create_engine(config, processor), RewardScorer(config.reward)
    try:
        await rewards.start()
        await workers.start()
        processor.show_tools(workers.tools)
        environments = environments_of(
            workers,
            config.environment,
            prompt_tokens=config.data.max_prompt_length,
            in_rounds=config.samples_in_rounds,
        )
        yield engine, GroupProducer(engine, rewards, processor, "eval", environments), processor, environments
    except EngineDied as died:
        raise BadStateError(f"the engine died: {died}") from died
    finally:
        await rewards.close()
        await workers.close()
        await engine.close()


async def _all(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Run the tasks side by side; the first error ends all."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Rows:
    """The rows of an evaluation, and what has come of them."""

    def __init__(self, config: RunConfig, processor: PromptProcessor, number: int, prompts: Iterator[RenderedPrompt]):
        self._processor = processor
        self._left = enumerate(prompts)
        self._ticket = partial(_ticket, config, processor)
        self._scored: dict[int, list[EvaluatedRow]] = {}
        """Scores by ticket."""
        self._health = EnvironmentHealth("then evaluate again")
        self._progress = EvaluationProgress(number * config.evaluation.group_size)

    async def play(self, producer: GroupProducer, rows_at_once: int) -> None:
        """Play rows until none is left, each time so many. Several of these share them."""
        while part := list(islice(self._left, rows_at_once)):
            tickets = {ticket.ticket_id: ticket for ticket in (self._ticket(*row) for row in part)}
            blobs = {digest: memoryview(data) for _, rendered in part for digest, data in rendered.blobs.items()}
            async for answer in producer.produce(list(tickets.values()), blobs):
                ticket = tickets[answer.ticket_id]
                if isinstance(answer, Group):
                    self._scored[ticket.ticket_id] = self._of_group(ticket, answer)
                    self._health.observe(answer.trajectories)
                else:
                    assert isinstance(answer, TicketFailed), "nobody asks for tickets back"
                    self._scored[ticket.ticket_id] = self._of_failure(ticket, answer)
                self._progress.reached(sum(map(len, self._scored.values())))

    def scored(self) -> list[EvaluatedRow]:
        """All of them in the order of the rows."""
        return [one for _, of_row in sorted(self._scored.items()) for one in of_row]

    def _of_group(self, ticket: Ticket, group: Group) -> list[EvaluatedRow]:
        found: list[EvaluatedRow] = []
        for index, record in enumerate(group.trajectories):
            turns = described_turns(group, index, self._processor.decode)
            found.append(EvaluatedRow(_sample(ticket, turns[-1]["text"]), _score(record), record, turns))
        return found

    def _of_failure(self, ticket: Ticket, failed: TicketFailed) -> list[EvaluatedRow]:
        """A row that could not be begun. Raises BadStateError where no other can be, either."""
        if failed.error_kind == BadStateError.__name__:
            raise BadStateError(f"row {ticket.prompt.row_id}: {failed.error_message}")
        score = Score(error_kind=failed.error_kind, error_message=failed.error_message)
        return [EvaluatedRow(_sample(ticket, ""), score)] * ticket.group_size


def _ticket(config: RunConfig, processor: PromptProcessor, index: int, rendered: RenderedPrompt) -> Ticket:
    return evaluation_ticket(
        config.evaluation,
        config.environment,
        rendered.prompt,
        index,
        ticket_id=EVALUATION_IDS + index,
        version=0,
        run_seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
        stop_token_ids=processor.ends.stop_token_ids,
        banned_token_ids=processor.placeholder_ids,
    )


def _sample(ticket: Ticket, completion: str) -> RewardSample:
    prompt = ticket.prompt
    return RewardSample(completion, answer=prompt.answer, columns=dict(prompt.columns), row_id=prompt.row_id)


def _score(record: TrajectoryRecord) -> Score:
    return Score(record.rewards, record.reward, record.error_kind, record.error_message)
