"""The starting point of a learner: a new run, or the newest checkpoint and the journal of one that stopped."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.keys import all_keys
from asyncrl.config.run_sections import Durability, TrainerConfig
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import PARTS, DataConfig, ModelConfig, RewardConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalView
from asyncrl.journal.run_inputs import (
    ACCEPT,
    Recorded,
    RecordedUpdate,
    changed_inputs,
    check_scoring,
    describe_changes,
    recorded_updates,
    scoring_settings,
)
from asyncrl.journal.writer import Journal
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.published import tensor_bytes
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.contents import MODEL_FOLDER, checkpoint_folders, export_advice
from asyncrl.user_functions import own_functions, source_fingerprint
from learner.loop.checkpoint import DamagedCheckpoint, LearnerState, newest_checkpoint, read_state
from learner.tickets.ticket_writer import ANSWERS, PROMPTS, USABLE, TicketWriter
from protocol.messages import AdapterSpec

logger = logging.getLogger(__name__)

UPDATE = ("algorithm.", "critic.", "reference.", "learner.optim.", "learner.optimizer")
"""Beginnings of the settings of the update."""
MAY_CHANGE = (*UPDATE, "trainer.", "fingerprint of ")
"""Settings of the update that may change after a checkpoint, if no step after it has to be made again."""
FREE = ("reference.offload",)
"""Settings among these that always may: they change where a model is, and no number."""
FIXED = ("algorithm.updates_per_batch", "learner.optimizer")
"""Settings among these that may not: the learning rate is scheduled by the number of updates, and a checkpoint has the
moments of one optimiser."""
DATE = "model.template_date"
TOOLS = "tools that prompts tell of"
"""The recorded setting that has them as JSON, for a replay, which runs no environment."""
LENGTH = "data.max_response_length"
"""An input of the loss: it may change where no step has to be made again."""
ROW_DIGESTS = "row_digests.bin"
"""File of a run with those of its usable training rows (`RowSurvey.digests`)."""
LOADED = ("model.lora.target_modules", "model.lora.modules_to_save", "base weights")
"""Lasting settings that are known when the model is loaded."""


@dataclass(frozen=True)
class StartingPoint:
    """Journal and checkpoint of the run before this process. All None for a new run."""

    journal: Journal | None = None
    checkpoint: Path | None = None
    state: LearnerState | None = None

    @property
    def saved_step(self) -> int:
        """Step of the checkpoint; 0 without one."""
        return self.state.step if self.state else 0

    @property
    def model_path(self) -> Path | None:
        """The checkpoint's model folder; None also where it holds an adapter, for the model of `model.path`."""
        if self.checkpoint is None or (self.state and self.state.adapter):
            return None
        return self.checkpoint / MODEL_FOLDER


def find_start(config: RunConfig, *, resume: bool, resources: ExitStack, accept_changes: bool = False) -> StartingPoint:
    """Check that `resume` fits the run directory and its journal, before rows and models are looked at.

    The journal of a resumed run is open then, and goes to `resources`.
    """
    file = config.run_path / JOURNAL_FILE
    checkpoint = newest_checkpoint(config.run_path)
    if not resume:
        refuse_taken(config.run_path)
        return StartingPoint()
    if not file.exists() and checkpoint:
        raise UserError(
            f"--resume: {config.run_path} has a checkpoint but no {JOURNAL_FILE}. Restore it from a backup, or start a "
            f"new run from the checkpoint's model: {export_advice(config.run_path)}"
        )
    if not file.exists():
        raise UserError(f"--resume: there is no run in {config.run_path}. Start without --resume")
    damages: list[DamagedCheckpoint] = []
    checkpoint, state = _newest_whole(config.run_path, damages)
    saved_step = state.step if state else 0
    try:
        not_needed = config.last_step_not_needed(saved_step)
        journal = open_journal(config.run_path, config.trainer.durability, resources, not_needed)
        if damages and (missing := journal.first_step_not_kept(not_needed)):
            raise BadStateError(
                f"the journal {journal.path} no longer keeps all groups of step {missing} (trainer.keep_samples_gib), "
                f"and the checkpoint to go on from is of step {saved_step}"
            )
    except BadStateError as problem:
        if not damages:
            raise
        raise BadStateError(f"{damages[0]}. An older one cannot take its place: {problem}") from problem
    if damages:
        logger.warning(
            "%s is damaged (%s): the run goes on from %s, and makes steps %d to %d again, from the journal",
            *(damages[0].folder, damages[0].problem, checkpoint, saved_step + 1, journal.last_step()),
        )
    if recorded := recorded_updates(journal):  # else its learner died before it had begun
        if state and state.run_id != journal.meta("run_id"):
            raise UserError(
                f"{checkpoint} is a checkpoint of run {state.run_id}, {journal.path} is the journal of run "
                f"{journal.meta('run_id')}. Put the run's own checkpoints back, or remove that folder"
            )
        _check_update(journal, recorded[-1], update_settings(config), saved_step)
        if not accept_changes:
            check_scoring(journal, scoring_settings(config.reward, config.environment))
    return StartingPoint(journal, checkpoint, state)


def _newest_whole(run_path: Path, damages: list[DamagedCheckpoint]) -> tuple[Path | None, LearnerState | None]:
    """The newest checkpoint that is as it was written, and its state; None where there is none at all. What is wrong
    with newer ones is added to `damages`. Raises the newest one's DamagedCheckpoint where all are damaged."""
    for folder in reversed(checkpoint_folders(run_path).values()):
        try:
            return folder, read_state(folder)
        except DamagedCheckpoint as damage:
            damages.append(damage)
    if damages:
        raise damages[0]
    return None, None


def settle_day(config: ModelConfig, processor: PromptProcessor, journal: Journal | None = None) -> dict[str, str]:
    """Let the processor take one day for today in all prompts of a run: the configured one, else the one that the
    journal has recorded, else today. Returns the setting for the configuration; none where no template writes a day."""
    template = processor.template
    if not template.writes_date:
        return {}
    recorded = json.loads((journal and journal.meta("settings")) or "{}").get(DATE)
    template.day = config.template_date or recorded or template.day
    return {DATE: template.day}


def open_journal(run_path: Path, durability: Durability, resources: ExitStack, saved_step: int = 0) -> Journal:
    journal = Journal(run_path / JOURNAL_FILE, durability, saved_step=saved_step)
    resources.callback(journal.close)
    return journal


def refuse_taken(run_path: Path) -> None:
    """Raise UserError if the folder holds a run: a new one must not begin there."""
    if (run_path / JOURNAL_FILE).exists() or newest_checkpoint(run_path):
        raise UserError(f"{run_path} holds a run. Continue it with --resume, or set another run_dir=...")


def sign_journal(
    start: StartingPoint,
    journal: Journal,
    settings: Mapping[str, float | str],
    update: Mapping[str, Any],
    inputs: Mapping[str, Any],
    model: Iterable[tuple[str, torch.Tensor]],
) -> str:
    """Return the run id, from the journal or new; raise UserError if journal, checkpoint and settings disagree.

    `settings` decide which ticket is which and what it samples; a resumed run must have the same, and, without a
    checkpoint, the same initial `model`. `find_start` has compared `update`, and `check_input_changes` the `inputs`; a
    change is recorded, with the step after which it holds: rewards of steps that are made again stay as they were.
    """
    run_id = journal.meta("run_id")
    if run_id is None:
        run_id = uuid.uuid4().hex[:12]
        recorded = {"settings": settings, "update": update, "inputs": inputs}
        journal.set_meta(
            run_id=run_id, model=_digest(model), **{name: json.dumps(dict(one)) for name, one in recorded.items()}
        )
        return run_id
    check_lasting(journal, settings)
    if start.checkpoint is None:
        check_initial_model(journal, model)
    step = journal.last_step()
    now_set: dict[Recorded, Mapping[str, Any]] = {"update": update, "inputs": inputs}
    for name, now in now_set.items():
        recorded = recorded_updates(journal, name)
        if recorded and (changed := describe_changes(recorded[-1].settings, now)):
            journal.set_meta(**{f"{name}.{len(recorded)}": json.dumps([step, dict(now)])})
            if name == "update":
                logger.warning("steps after %d are made by other settings: %s", step, "; ".join(changed.values()))
    return run_id


def check_lasting(journal: Journal | None, settings: Mapping[str, float | str]) -> None:
    """Raise UserError where a resumed run has other lasting settings than it had. Before the model is loaded some are
    not known yet, and are not compared."""
    recorded = json.loads((journal and journal.meta("settings")) or "{}")
    changed = describe_changes(recorded, settings) if recorded else {}
    if journal and (said := [text for key, text in changed.items() if key in settings or key not in LOADED]):
        raise UserError(
            f"--resume of {journal.path}: {'; '.join(said)}. All groups of a run are handed out and sampled by the "
            f"same settings. {_same_or_new(journal)}"
        )


def check_input_changes(
    start: StartingPoint, inputs: Mapping[str, Any], *, accept: bool, name_rows: Callable[[bytes], str] = lambda _: ""
) -> str:
    """Raise UserError where a resumed run would get other rows or rewards than it had, unless `accept`. Returns a
    warning that describes the change; empty without one. `name_rows` names training rows by their digests before."""
    journal = start.journal
    recorded = recorded_updates(journal, "inputs") if journal else []
    if journal is None or not recorded or not (changed := describe_changes(recorded[-1].settings, inputs)):
        return ""
    file = journal.path.with_name(ROW_DIGESTS)
    if (of_rows := changed.keys() & {PROMPTS, ANSWERS}) and file.is_file() and (rows := name_rows(file.read_bytes())):
        changed |= {name: f"{changed[name]} ({rows})" for name in of_rows}
    if not accept:
        raise changed_inputs(journal, changed)
    last, saved_step = journal.last_step(), start.saved_step
    if last > saved_step and LENGTH in changed:
        raise UserError(
            f"--resume of {journal.path}: {changed[LENGTH]}. {ACCEPT} cannot take {LENGTH}: steps {saved_step + 1} to "
            f"{last} have no checkpoint, and are made again as they were. Put it back until a checkpoint holds the "
            f"last step. {_same_or_new(journal)}"
        )
    return f"steps after {last} are of other inputs: {'; '.join(changed.values())}"


def scoring_changes(journal: JournalView) -> int:
    """Count the accepted changes of what scores held-out rows: evaluations before and after one do not compare."""
    scoring = [
        {name: value for name, value in one.settings.items() if name not in (PROMPTS, ANSWERS)}
        for one in recorded_updates(journal, "inputs")
    ]
    return sum(before != after for before, after in pairwise(scoring))


def input_settings(writer: TicketWriter, reward: RewardConfig) -> dict[str, Any]:
    """Rows and rewards of a run, which change under it only where the user says so."""
    settings = writer.settings
    lasting = {USABLE, ANSWERS} if _tickets_need_answers(settings.algorithm, settings.data) else {USABLE}
    rows = {name: value for name, value in writer.fingerprints().items() if name not in lasting}
    return {LENGTH: settings.data.max_response_length, **rows, **scoring_settings(reward, settings.environment)}


def _check_update(journal: Journal, recorded: RecordedUpdate, now: Mapping[str, Any], saved_step: int) -> None:
    """Raise UserError where steps after the checkpoint would be made by other settings than before."""
    where, last = f"--resume of {journal.path}", journal.last_step()
    if saved_step < recorded.after_step:
        raise UserError(
            f"{where}: settings have changed after step {recorded.after_step}, and the newest checkpoint is of step "
            f"{saved_step}: the steps between cannot be made again. Restore the checkpoint of step "
            f"{recorded.after_step} from a backup"
        )
    changed = describe_changes(recorded.settings, now)
    fixed = [said for key, said in changed.items() if not key.startswith(MAY_CHANGE) or key in FIXED]
    if fixed:
        said = "; ".join(fixed)
        raise UserError(f"{where}: {said}. All steps of a run are made by the same. {_same_or_new(journal)}")
    if changed and last > saved_step:
        raise UserError(
            f"{where}: {'; '.join(changed.values())}. Steps {saved_step + 1} to {last} have no checkpoint, and are "
            "made again by the settings that they were made with; these may change where a checkpoint holds the last "
            f"step, as at the end of a run. {_same_or_new(journal)}"
        )


def _same_or_new(journal: Journal) -> str:
    return (
        "Resume with the same values, or start a new run from the checkpoint's model: "
        f"{export_advice(journal.path.parent)}"
    )


def check_steps_ahead(start: StartingPoint, trainer: TrainerConfig, total_steps: int) -> None:
    """Raise UserError if the run is past its last step. It may be at it: an end that was cut short is repeated."""
    journal = start.journal
    if journal and (step := max(start.saved_step, journal.last_step())) > total_steps:
        key = "trainer.max_steps" if trainer.max_steps else "trainer.total_epochs"
        raise UserError(
            f"--resume of {journal.path}: the run is at step {step}, and is to end at step {total_steps}. "
            f"Raise {key}, which is {trainer.max_steps or trainer.total_epochs}"
        )


def check_initial_model(journal: JournalView, model: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise UserError if the run began with another model, and has no checkpoint to begin at."""
    if journal.meta("model") != _digest(model):
        raise UserError(
            f"{journal.path} began with another model than model.path holds now, and there is no checkpoint to "
            "begin at. Put the initial model back, or start a new run"
        )


def adapter_settings(adapter: AdapterSpec | None, base: str) -> dict[str, str]:
    """The lasting settings that are known when the model is loaded."""
    if adapter is None:
        return {}
    layers, whole = (", ".join(names) for names in (adapter.target_modules, adapter.modules_to_save))
    return dict(zip(LOADED, (layers, whole, base), strict=True))


def lasting_settings(config: RunConfig, writer: TicketWriter, processor: PromptProcessor) -> dict[str, float | str]:
    """Settings that must not change on resume: they decide which ticket is which, and the journal's log-probs."""
    fingerprints = writer.fingerprints()
    settings: dict[str, float | str] = {
        "batch.prompts_per_step": config.batch.prompts_per_step,
        "batch.group_size": config.batch.group_size,
        "trajectories of a ticket": config.trajectories_per_group,
        "learner.max_staleness": config.learner.max_staleness,
        "learner.on_stale": config.learner.on_stale,
        "trainer.seed": config.trainer.seed,
        **{f"rollout.{n}": getattr(config.rollout, n) for n in ("temperature", "top_p", "top_k", "min_p")},
        "data.shuffle": config.data.shuffle,
        **{f"data.curriculum.{n}": getattr(config.data.curriculum, n) for n in ("order_by", "descending")},
        "prompt source": ", ".join(chosen_hooks("prompt_source", config.algorithm)),
        "staleness controller": ", ".join(chosen_hooks("staleness_controller", config.algorithm)),
        "number of training rows": writer.num_train_rows,
        USABLE: fingerprints[USABLE],
        "fingerprint of processor and chat template": processor.fingerprint,
    }
    if processor.template.writes_date:
        settings[DATE] = processor.template.day
    hooks = tuple(f"algorithm.{name}." for name in chosen_hooks("ticket_hook", config.algorithm))
    settings |= {key: attrgetter(key)(config) for key in all_keys() if hooks and key.startswith(hooks)}
    if "target" in config.algorithm.needs:
        settings |= {key: attrgetter(key)(config) for key in ("data.target_key", LENGTH)}
    if _tickets_need_answers(config.algorithm, config.data):
        settings[ANSWERS] = fingerprints[ANSWERS]
    if "total_steps" in config.algorithm.needs:
        settings["steps in all"] = config.total_steps(writer.num_train_rows)
    if config.environment.is_used:
        asked = config.environment.model_dump(mode="json", include={"name", "config", "limits"})
        rewriting = config.environment.model_dump(include={"history", "keep_images"}, exclude_defaults=True)
        settings["environment"] = json.dumps(asked | rewriting, sort_keys=True)
        if processor.shown_tools:
            settings[TOOLS] = processor.shown_tools.as_json
    if config.model.lora.rank:
        settings |= {"model.lora.rank": config.model.lora.rank, "model.lora.alpha": config.model.lora.effective_alpha}
    settings |= {"model.quantization": base} if (base := config.model.quantization) else {}
    return settings


def _tickets_need_answers(algorithm: AlgorithmConfig, data: DataConfig) -> bool:
    """Whether columns beside the prompt's decide which ticket is which, or what it puts into completions."""
    return "target" in algorithm.needs or bool(data.curriculum.order_by)


def update_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of the update, by dotted key, which must not change between a step and its repetition.

    Whatever sorts, logs, saves or shares the work out may change, and how long the run is: unless the learning rate
    or the KL's coefficient falls over the whole of it.
    """
    everything = config.model_dump(mode="json")
    names = [key for key in all_keys() if key.startswith(UPDATE) and ".N." not in key and key not in FREE]
    names += ["model.dtype", *(f"model.freeze_{part}" for part in PARTS)]
    if config.learner.optim.lr_scheduler_type != "constant" or config.algorithm.kl_control.kind == "linear":
        names += ["trainer.max_steps"] if config.trainer.max_steps else ["trainer.total_epochs"]
    settings: dict[str, Any] = {}
    for name in names:
        with suppress(KeyError):  # of a method that is not chosen
            settings[name] = reduce(getitem, name.split("."), everything)
    for function in own_functions(config.algorithm.functions):
        settings[f"fingerprint of {function.path.name}"] = source_fingerprint(function)
    for setting, model in config.other_models:
        if setting == "reference.path" or model.path != config.model.path:  # a checkpoint holds no frozen weights
            settings[f"fingerprint of {setting.removesuffix('.path')} weights"] = base_fingerprint(model)
    return settings


def _digest(model: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash the names and bytes of the tensors."""
    hashed = xxhash.xxh3_128()
    for name, tensor in model:
        hashed.update(name.encode())
        hashed.update(tensor_bytes(tensor))
    return hashed.hexdigest()


def forget_run(run_path: Path) -> None:
    """Remove the journal of a new run that could not start."""
    for file in run_path.glob(f"{JOURNAL_FILE}*"):
        file.unlink(missing_ok=True)
