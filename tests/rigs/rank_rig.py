"""A made-up step on the ranks of one machine, for tests: `python -m tests.rigs.rank_rig FOLDER` in each rank.

FOLDER/rig.json has configurations; rank 0 writes metrics, weights and a checkpoint of each there.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from learner.ranks.group import Ranks
from learner.training import fsdp, sharded_state
from learner.training.engine import TorchEngine
from learner.training.fsdp import FullySharded
from learner.training.reference import Reference
from learner.training.roles import Critic, Roles
from learner.training.step import LearnerStep, NotFiniteError
from tests.rigs.made_up_batch import made_up_batch
from tests.rigs.prefork import fork_module
from tests.rigs.waiting import exit_codes
from tests.rigs.zero import make_small


def run_ranks(
    folder: Path, configs: Mapping[str, RunConfig], *, module: str = "rank_rig", size: int = 2, **settings: Any
) -> Any:
    """Run a rig on `size` ranks; returns what rank 0 finds."""
    folder.mkdir()
    dumped = {name: json.loads(config.model_dump_json()) for name, config in configs.items()}
    (folder / "rig.json").write_text(json.dumps({"configs": dumped, **settings}, default=str))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    store = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared = {**os.environ, **store, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    ranks = [
        fork_module(f"tests.rigs.{module}", [str(folder)], log, {**shared, "RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    codes = exit_codes(ranks, 600)
    assert codes == [0] * size, "\n".join(log.read_text()[-3000:] for log in logs)
    return json.loads((folder / "results.json").read_text())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_small()
    fsdp.GATHERED = 50_000  # bytes, as few that a tiny model is gathered in several pieces
    sharded_state.FILE_BYTES = 20_000  # else all of it is in one file
    rig: dict[str, Any] = json.loads((folder / "rig.json").read_text())
    ranks = join()
    results: dict[str, Any] = {}
    for name, sections in rig["configs"].items():
        gc.collect()
        gc.freeze()  # DeepSpeed's and other collections do not look at the engines before
        start = rig.get("starts", {}).get(name)
        results[name] = take_steps(
            RunConfig.model_validate(sections),
            folder / name,
            ranks,
            rig.get("steps", 2),
            Path(start) if start else None,
            poisoned=name in rig.get("poisoned", []),
            idle=rig.get("idle", False),
            sleeps=name in rig.get("sleeping", []),
            saves=rig.get("saves", True),
            once=name in rig.get("once", []),
        )
    if ranks.leads:
        (folder / "results.json").write_text(json.dumps(results))


def join() -> Ranks:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank())


def take_steps(
    config: RunConfig,
    folder: Path,
    ranks: Ranks,
    steps: int,
    start: Path | None = None,
    *,
    poisoned: bool = False,
    idle: bool = False,
    sleeps: bool = False,
    saves: bool = True,
    once: bool = False,
) -> dict[str, Any]:
    """Metrics, each rank's passes through vision towers, and its reductions of gradients, by steps. `folder` gets
    weights before and after each, and a checkpoint of the last, unless `saves` is False. `start`: such a folder, of as
    many steps. `poisoned`: the last rank has gradients that are not finite. `idle`: no step is made. `sleeps`: after
    each step what is on the device leaves it, and comes back. `once`: an update's gradients are reduced once."""
    torch.manual_seed(0)
    config = config.with_policy(start / "model" if start and not config.model.lora.rank else None)
    engine = TorchEngine(config.model_settings, config.learner.optim, steps, ranks)
    engine.prepare()
    critic = Critic(config.critic_settings, config.critic, steps, ranks) if "critic" in config.algorithm.needs else None
    reference = Reference(config.reference_settings, config.reference, ranks) if config.reference_model else None
    for role in (critic, reference):
        if role:
            role.prepare()
    if start:
        if engine.adapter:
            engine.load_published(load_file(start / f"{steps}.safetensors").items())
        engine.load(start)
        for role in (critic, reference if config.reference.moves else None):
            if role:
                role.load(start / role.role)
    if ranks.leads:
        folder.mkdir(exist_ok=True)
    if poisoned and ranks.rank == ranks.size - 1:
        engine.backward = lambda loss, **more: TorchEngine.backward(engine, loss * float("inf"), **more)
    for role in (engine, critic):
        if role:
            role.reduces_once = once
    passes = [_count_tower(role) for role in (engine, critic, reference) if role]
    towers: list[list[float]] = []
    reductions: list[int] = []
    step = LearnerStep(Roles(engine, critic, reference, ranks), config.step_settings, total_steps=steps)
    processor = PromptProcessor(config.model)
    engine.companions = tuple(role for role in (critic, reference) if role)
    batch = made_up_batch(config, processor)
    metrics: list[dict[str, float]] = []
    _save_weights(engine.published_state(), folder / "0.safetensors", ranks)
    first = 3 + steps if start else 3
    for version in range(first, first + steps * (not idle)):
        try:
            with mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=foreach_reduce) as reducing:
                metrics.append(step(batch, version))
            reductions.append(reducing.call_count)
            if sleeps:
                moved = engine.sleep()
                asleep = (t for role in (engine, *engine.companions) for t in role._in_memory())
                assert not any(tensor.untyped_storage().nbytes() for tensor in asleep)
                assert engine.wake() == moved > 0
            towers.append([sum(row) for row in ranks.gather([counted["passes"] for counted in passes])])
        except NotFiniteError as error:
            folder.mkdir(exist_ok=True)
            (folder / f"problem-{ranks.rank}").write_text(str(error))
            _save_weights(engine.published_state(), folder / "after.safetensors", ranks)
            return {}
        _save_weights(engine.published_state(), folder / f"{version - first + 1}.safetensors", ranks)
    if saves:
        _save_checkpoint(folder, Roles(engine, critic, reference, ranks), processor)
    return {"metrics": metrics, "tower passes": towers, "reductions": reductions}


def _save_checkpoint(folder: Path, roles: Roles, processor: PromptProcessor) -> None:
    engine = roles.actor
    others = [role for role in (roles.critic, roles.own_reference) if role]
    if roles.ranks.leads:
        for role in others:
            (folder / role.role).mkdir()
    gathered = AssertionError("a rank has gathered a whole tensor")
    with (
        mock.patch.object(DTensor, "full_tensor", side_effect=gathered),
        mock.patch.object(FullySharded, "_wholes", side_effect=gathered),
    ):
        if engine.adapter is None:
            engine.save_model(processor.processor, folder / "model")
        engine.files(copies=True)(folder)
        for role in others:
            role.files(copies=True)(folder / role.role)
    if engine.adapter is not None:
        engine.export(processor.processor, folder / "model")


def _count_tower(role: TorchEngine) -> dict[str, int]:
    """Count a role's passes through its vision tower, idle ones included."""
    counted = {"passes": 0}
    inner: Any = role.model.base_model
    original = getattr(inner, "get_image_features", None)
    if original is None:
        return counted

    def call(*args: Any, **kwargs: Any) -> Any:
        counted["passes"] += 1
        return original(*args, **kwargs)

    inner.get_image_features = call
    return counted


def _save_weights(tensors: Any, file: Path, ranks: Ranks) -> None:
    found = {name: tensor.clone() for name, tensor in tensors}
    if ranks.leads:
        save_file(found, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
