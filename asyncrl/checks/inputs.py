"""Checks before anything is loaded: the model folder's small files, data, functions, devices, memory plan. A failed one
leaves no run directory behind. Torch is only imported where devices, a plan or the user's own estimator are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.method import NEEDS
from asyncrl.config.rules import two_devices
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig, ModelConfig, Purpose, RewardConfig
from asyncrl.data.dataset import RowSource, open_train, open_validation
from asyncrl.devices.gpu_assignment import check_assignment
from asyncrl.environments.episodes import prompt_tools
from asyncrl.errors import UserError, did_you_mean
from asyncrl.model_files.folder import (
    check_same_inputs,
    check_weights,
    describe_folder,
    has_eyes,
    read_config,
    text_part,
)
from asyncrl.rewards.spec import check_rewarded, check_rewards, hidden_columns
from asyncrl.telemetry.tracker import check_trackers
from asyncrl.user_functions import load, own_functions

Side = Literal["learner", "rollout_server"]

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices of NVIDIA's driver, on Linux and in WSL: without one there is no GPU, and torch need not be asked."""
CHANGING_ROTARY = ("longrope", "su", "dynamic")
"""Types of rotary positions whose frequencies follow from the longest row of a pass."""
ROWS_LOOKED_AT = 64
"""Rows of each data source that are searched for images or videos."""


def check_inputs(config: RunConfig, *sides: Side) -> None:
    """Check what the named sides of a run, which start on this machine, will need. Raises UserError with the fix."""
    check_references(config, *sides)
    check_devices(config, sides)
    if "rollout_server" in sides:
        check_engine(config)
    check_weights(config.model)
    if "learner" in sides:
        for _, model in config.other_models:
            check_weights(model)
        check_publishing()
    check_budget(config, *sides)
    if config.environment.asks_a_server:
        prompt_tools(config.environment)  # services need half a minute to find that it is not there


def check_publishing() -> None:
    """Refuse shared memory that the learner, on this machine, may not write."""
    from protocol.weight_file import PublicationError
    from protocol.weights import publication_folder

    try:
        publication_folder()
    except PublicationError as error:
        raise UserError(str(error)) from None


def check_budget(config: RunConfig, *sides: Side) -> None:
    """Refuse a memory budget that is too small, and too little shared memory where the learner is here."""
    if config.gpu_memory.budget_gib:
        from asyncrl.memory_plan.plan import check_plan, check_shared_memory

        plan = check_plan(config)  # both halves, whichever side starts here: its numbers are one run's
        if plan is not None and "learner" in sides:
            check_shared_memory(plan)


def dry_run(config: RunConfig, *, whole: bool = False) -> None:
    """Explain the configuration, and refuse what `train` would refuse of it on any machine; what this one has not,
    devices or what the engine needs, is a note. `whole`: print keys at their defaults, too. Raises UserError."""
    from asyncrl.config.explain import explain
    from asyncrl.processing.lean_imports import import_processors, uncollected
    from asyncrl.rewards.scorer import try_loading

    with uncollected():
        check_references(config, "learner", "rollout_server")
        asyncio.run(try_loading(config.reward))
        check_budget(config)  # before processors are imported without the models that a plan needs
        import_processors()
        from asyncrl.checks.prompt_rows import preview_rows

        seen, num_rows = preview_rows(config)
        print(explain(config, num_rows, whole=whole))
        print(seen)
        for note in data_notes(config.data, config.reward, config.environment, config.purpose):
            print(f"note: {note}")
        if config.batch.tokens_per_microbatch == "auto":
            from asyncrl.devices.device import gpu_bytes
            from asyncrl.memory_plan.token_choice import settle_tokens

            print(f"note: {settle_tokens(config, gpu_bytes(config.learner.device))[1]}")
        try:
            check_devices(config, ("learner", "rollout_server"))
            check_engine(config)
            check_publishing()
        except UserError as problem:
            print(f"note: this machine cannot train it: {problem}")


def check_references(config: RunConfig, *sides: Side) -> None:
    """Check whatever the configuration names that the sides will open, on any machine: model folder, data, functions.

    Rewards are looked at, not run: `asyncrl.rewards.scorer.try_loading` does that.
    """
    described = check_model(config.model)
    check_lengths(config, described)
    check_rewarded(config.reward, config.environment)
    if "learner" in sides:
        check_trackers(config.telemetry)
        check_algorithm(config.algorithm)
        for setting, model in config.other_models:
            check_same_inputs(config.model, model, setting)
            check_rotary(config.data.max_prompt_length + config.longest_completion, model, read_config(model))
        check_data(config, described, config.purpose)
    if "rollout_server" in sides:
        check_rewards(config.reward)


def data_notes(
    data: DataConfig, reward: RewardConfig, environment: EnvironmentConfig, purpose: Purpose
) -> Iterator[str]:
    """Yield a sentence for each column that a reward does not get, and for files that are trained on and held out."""
    rows, held_out = open_train(data, purpose), open_validation(data, purpose)
    yield from hidden_columns(reward, {*rows.columns} - data.prompt_columns)
    if held_out is None or environment.is_used:  # which tells rows of one file apart
        return
    if shared := rows.files_shared_with(held_out):
        yield (
            f"{', '.join(shared)} is in data.train_files and in data.val_files: held-out accuracy is that of rows that "
            "are trained on. Hold other rows out"
        )


def check_algorithm(config: AlgorithmConfig) -> None:
    """Refuse an estimator or a loss that is not there. The user's own are loaded, as the learner will load them."""
    for function in own_functions(config.functions):
        load(function)


def check_model(config: ModelConfig) -> dict[str, Any]:
    """Check the model folder's small files. Returns its config.json."""
    described = describe_folder(config)
    if config.lora.rank:
        from asyncrl.models.lora import resolve_adapter

        resolve_adapter(config)
    return described


def known_positions(described: Mapping[str, Any]) -> int | None:
    """Most tokens of a sample that a model knows, by its config.json; None where it does not say."""
    text = text_part(described)
    positions = text.get("max_position_embeddings") or described.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def check_lengths(config: RunConfig, described: Mapping[str, Any]) -> None:
    positions = known_positions(described)
    longest = config.data.max_prompt_length + config.longest_completion
    if positions is not None and longest > positions:
        raise UserError(
            f"one sample may have {longest} tokens (data.max_prompt_length + data.max_response_length"
            f"{' or evaluation.limits.tokens' * bool(config.evaluation.limits.tokens)}), but the model "
            f"in {config.model.path} knows {positions} positions (max_position_embeddings). Lower one of the former"
        )
    check_rotary(longest, config.model, described)


def check_rotary(longest: int, model: ModelConfig, described: Mapping[str, Any]) -> None:
    """Refuse rows of `longest` tokens over the length at which a model's rotary frequencies change: a long row would
    change its neighbours in a pass, and a completion its own beginning."""
    for kind, until in rotary_changes(described):
        if longest > until:
            raise UserError(
                f"one sample may have {longest} tokens (data.max_prompt_length + data.max_response_length), and the "
                f"rotary frequencies of the model in {model.path} ({kind}) are others in rows of more than {until}: a "
                f"long row would change the log-probs of others. Lower both to {until} together, or use a model with "
                "another rope_type"
            )


def rotary_changes(described: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield types of rotary positions of a config.json whose frequencies change, and the longest row before that."""
    text = text_part(described)
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for rotary in (settings, *(of_layers for of_layers in settings.values() if isinstance(of_layers, Mapping))):
        kind = rotary.get("rope_type") or rotary.get("type")
        if kind not in CHANGING_ROTARY:
            continue
        before = rotary.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        until = before if kind != "dynamic" and before else text.get("max_position_embeddings")
        if isinstance(until, int):
            yield kind, until


def check_data(config: RunConfig, described: Mapping[str, Any], purpose: Purpose) -> None:
    train = open_train(config.data, purpose)
    if purpose != "sft":
        check_targets(config.algorithm, config.data.target_key, train)
        check_order(config.data.curriculum.order_by, train)
    for rows in (train, open_validation(config.data, purpose) if purpose != "sft" else None):
        if rows is not None:
            check_media(config.model, config.data, described, rows)


def check_targets(algorithm: AlgorithmConfig, key: str, rows: RowSource) -> None:
    """Refuse a column of texts to learn from that no training row has. Whether any is filled is seen with all rows."""
    needing = [method.name for method in algorithm.chosen_methods if "target" in method.needs]
    if needing and key not in rows.columns:
        raise UserError(
            f"{needing[0]} needs {NEEDS['target']}, and no training row has a column {key!r} (data.target_key)."
            f"{did_you_mean(key, rows.columns)} Columns are {', '.join(rows.columns)}. Name the one that has them, or "
            f"leave {needing[0]} out"
        )


def check_order(key: str, rows: RowSource) -> None:
    """Refuse a column to order rows by that no training row has."""
    if key and key not in rows.columns:
        raise UserError(
            f"data.curriculum.order_by is {key!r}, and no training row has such a column."
            f"{did_you_mean(key, rows.columns)} Columns are {', '.join(rows.columns)}"
        )


def check_media(model: ModelConfig, data: DataConfig, described: Mapping[str, Any], rows: RowSource) -> None:
    """Refuse images and videos for a model that reads text only."""
    if has_eyes(described):
        return
    columns = {"data.image_key": data.image_key, "data.video_key": data.video_key}
    for setting, column in columns.items():
        row_id = _first_row_with(rows, column)
        if row_id:
            raise UserError(
                f"row {row_id} has images or videos in column {column!r}, but the model in {model.path} has no "
                "vision tower (no vision_config in config.json): it reads text only. Use a vision-language model, or "
                f"set {setting}= (nothing)"
            )


def _first_row_with(rows: RowSource, key: str) -> str | None:
    """Find the first row that has something in this column; its name."""
    if key not in rows.columns:
        return None
    for index in range(min(len(rows), ROWS_LOOKED_AT)):
        media = rows[index].get(key)
        if media is not None and (not hasattr(media, "__len__") or len(media)):
            return rows.row_id(index)
    return None


def check_devices(config: RunConfig, sides: tuple[Side, ...]) -> None:
    """Check that named devices exist, are one in sync mode, have CUDA for a channel between devices, and that no GPU
    of an asynchronous run has two processes without a budget."""
    names: dict[Side, str] = {"learner": config.learner.device, "rollout_server": config.rollout.device}
    alike = names["learner"] == names["rollout_server"]
    plain = all(name in ("auto", "cpu") for name in names.values()) and alike
    has_driver = "auto" in names.values() and any(driver.exists() for driver in DRIVERS)
    if plain and not config.rollout.uses_device_channel and not has_driver:
        return
    import torch

    from asyncrl.devices.device import check_device_channel, resolve_device

    keys: dict[Side, str] = {"learner": "learner.device", "rollout_server": "rollout.device"}
    for side in sides:
        resolve_device(names[side], keys[side])
        check_device_channel(config.rollout, keys[side], names[side])
    if config.trainer.mode == "sync" and not config.on_one_device(cuda=torch.cuda.is_available()):
        raise UserError(two_devices(config))
    if len(sides) == 2:
        check_assignment(config, gpus_of_run(*names.values()))


def gpus_of_run(*devices: str) -> Sequence[str]:
    """GPUs that this process sees; empty where no process of a run on these `devices` can use one. Then torch is not
    asked."""
    if {*devices} == {"cpu"} or not any(driver.exists() for driver in DRIVERS):
        return ()
    from asyncrl.devices.device import visible_gpus

    return visible_gpus()


def check_engine(config: RunConfig) -> None:
    """Check what the inference engine itself would refuse."""
    from rollout_server.engines import check_rules

    check_rules(config)
