"""A rank other than 0: it loads the same model, and does what rank 0 commands, until the end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor, prompt_processor
from learner.groups.ticket import ReceivedGroup
from learner.loop.checkpoint import BackgroundWrite, LearnerState
from learner.loop.logprob_parity import compare
from learner.loop.trainer import Trainer
from learner.ranks.commands import REASONS, CommandChannel, RankCommand, Reasons, unpack_groups
from learner.ranks.group import Ranks
from learner.ranks.processes import check_local_ranks, given_store, join, leave_after_rank_0
from learner.ranks.rank_variables import STORE_PORT, RankVariables, rank_variables
from learner.training.engine import TorchEngine
from protocol.device_lock import read_tenure, use_device_for

logger = logging.getLogger(__name__)


Obey = Callable[[RankCommand], object]
Begin = Callable[[RunConfig, PromptProcessor, Ranks, Mapping[str, Any]], AbstractContextManager[Obey]]
"""Loads what rank 0 loads, by the values of its first command, and returns what each further command does."""


def follow(config: RunConfig, begin: Begin) -> None:
    """Run to the end. Raises what another rank has said of its end, or BadStateError when rank 0 has gone."""
    environment = rank_variables(config.learner, config.trainer.mode)
    if STORE_PORT not in os.environ:
        leave_after_rank_0(config.trainer.stop_grace_s)
    store = given_store(config.learner.wait_timeout_s)
    reasons = Reasons(store, environment.rank)
    try:
        check_local_ranks(config.learner.device, environment.local_rank + 1)
        _follow(config, begin, environment, store, reasons)
    except REASONS as error:
        reasons.say(error)
        raise reasons.of(0) or error from None
    except RuntimeError as error:  # a collective, where another rank has ended
        others = (rank for rank in range(environment.size) if rank != environment.rank)
        if said := reasons.wait_for_one(others):
            raise said from error
        raise


def _follow(config: RunConfig, begin: Begin, environment: RankVariables, store: Store, reasons: Reasons) -> None:
    def check() -> None:
        if said := reasons.of(0):
            raise said

    network = config.network
    commands = CommandChannel(
        PrefixStore("commands", store),
        leads=False,
        every_s=network.heartbeat_s,
        silence_s=network.timeout_s,
        start_s=config.learner.wait_timeout_s,
        check=check,
    )
    check()
    processor = prompt_processor(config.model, config.environment, config.data.chat_template_kwargs)
    command = commands.take()
    if command.kind == "end":
        return
    processor.template.day = command.values["template_date"] or processor.template.day
    if config.trainer.mode == "sync":
        tenure = read_tenure(config.run_path)
        assert tenure is not None, "rank 0 takes the device before it gives commands"
        use_device_for(tenure.pid, config.run_path)
    ranks = join(config.learner, store, environment, commands, check)
    logger.info("rank %d of %d has joined", ranks.rank, ranks.size)
    with begin(config, processor, ranks, command.values) as obey:
        while (command := commands.take()).kind != "end":
            obey(command)


@contextmanager
def trainer(
    config: RunConfig, processor: PromptProcessor, ranks: Ranks, values: Mapping[str, Any]
) -> Generator[Obey, None, None]:
    """The trainer of this rank."""
    state = LearnerState(**values["state"]) if values["state"] else None
    checkpoint = Path(values["checkpoint"]) if values["checkpoint"] else None
    policy = config.with_policy(Path(values["model_path"]) if values["model_path"] else None)
    training = Trainer(policy, processor, values["num_rows"], checkpoint, state, ranks)
    training.step.budget.keep_in_run(config.run_path, config.batch, config.learner)
    saving: BackgroundWrite | None = None

    def obey(command: RankCommand) -> None:
        nonlocal saving
        if command.kind == "snapshot":
            if saving:
                saving.wait(config.learner.wait_timeout_s)
            saving = _save(training, command)
            if not command.values["copies"]:  # what is written is what is here, and ranks may write by collectives
                saving.wait(config.learner.wait_timeout_s)
        else:
            _obey(training, command)

    yield obey
    if saving:
        saving.wait(config.learner.wait_timeout_s)


def _save(training: Trainer, command: RankCommand) -> BackgroundWrite:
    """Begin to write this rank's parts of a checkpoint. What goes wrong is known to rank 0, too, which ends the run."""
    building = Path(command.values["folder"])
    snapshot = training.snapshot("", building, copies=command.values["copies"])
    return BackgroundWrite(lambda: snapshot.write_files(building))


def _obey(training: Trainer, command: RankCommand) -> None:
    ranks, engine = training.ranks, training.roles[command.values.get("role", "actor")]

    def sent() -> list[ReceivedGroup]:
        return unpack_groups(ranks.broadcast(b""), training.processor)

    calls: dict[str, Callable[[], object]] = {
        "learn": lambda: training.learn(sent()),
        "sleep": engine.sleep,
        "wake": engine.wake,
        "compare": lambda: compare(engine, training.processor, sent(), training.config.batch.microbatch_tokens),
        **engine_calls(engine, training.processor, command),
    }
    calls[command.kind]()


def engine_calls(
    engine: TorchEngine, processor: PromptProcessor, command: RankCommand
) -> dict[str, Callable[[], object]]:
    """Calls that an engine of rank 0 broadcasts by itself."""
    return {
        "published_state": lambda: sum(1 for _ in engine.published_state()),
        "save_model": lambda: engine.save_model(processor.processor, Path(command.values["folder"])),
    }
