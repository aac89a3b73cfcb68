"""Memory of a rank while it trains: `python -m tests.rigs.rank_memory FOLDER` in each rank.

What the CPU's allocator gives and takes back is recorded by torch's profiler: also what kernels take for a moment, and
storages that FSDP empties and fills again, which no dispatch mode sees.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from asyncrl.config.schema import RunConfig
from asyncrl.memory_plan.live_bytes import nbytes
from asyncrl.models import sampling_distribution
from learner.ranks.group import Ranks
from learner.training.engine import TorchEngine
from learner.training.reference import Reference
from learner.training.roles import Critic
from tests.rigs.full_micro_batch import full_micro_batch
from tests.rigs.rank_rig import join
from tests.rigs.zero import HAS_ZERO, make_small

ZERO_BUCKET = 50_000
"""Small, as the models are."""


def make_buckets_small() -> None:
    make_small()
    if HAS_ZERO:
        from asyncrl_plugins.deepspeed import engine

        engine.ZERO_BUCKET = ZERO_BUCKET


def let_collectives_end() -> None:
    """Gloo's thread holds the buffers of a collective for a moment after it has ended. On a busy CPU that moment lasts
    into the next layer, and the peak is one that no device has."""
    wait = Work.wait

    def waited(self: Work, timeout: timedelta = timedelta(0)) -> bool:
        done = wait(self, timeout)
        time.sleep(0.002)
        return done

    Work.wait = waited


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_buckets_small()
    let_collectives_end()
    sampling_distribution.CACHED_VALUES = 2**40  # in one piece, as on the GPU that is planned
    rig: dict[str, Any] = json.loads((folder / "rig.json").read_text())
    ranks = join()
    results = {
        name: measure(RunConfig.model_validate(sections), ranks, rig["shapes"][name], once=name in rig.get("once", []))
        for name, sections in rig["configs"].items()
    }
    if ranks.leads:
        (folder / "results.json").write_text(json.dumps(results))


def measure(config: RunConfig, ranks: Ranks, shape: Any, *, once: bool) -> dict[str, int]:
    """Bytes of this rank, of all roles together; peaks are what is added to the bytes before. Rank 0 measures them: the
    others only take part. `once`: the gradients of two micro-batches are reduced together."""
    peak_of = _peak_of if ranks.leads else _no_peak
    gc.collect()
    gc.freeze()  # later collections do not look at the models before
    actor = TorchEngine(config.model_settings, config.learner.optim, 4, ranks)
    actor.prepare()
    critic = Critic(config.critic_settings, config.critic, 4, ranks) if "critic" in config.algorithm.needs else None
    reference = Reference(config.reference_settings, config.reference, ranks) if config.reference_model else None
    for role in (critic, reference):
        if role:
            role.prepare()
    trained = [role for role in (actor, critic) if role]
    micro_batch = full_micro_batch(actor.model, shape)
    actor.reduces_once = once

    def score_and_train() -> None:
        with torch.no_grad():
            actor.forward(micro_batch)
            if critic:
                critic.values(micro_batch)
            if reference:
                reference.forward(micro_batch)
        for is_last in (False, True) if once else (True,):
            actor.backward(actor.forward(micro_batch, entropy="value").logprobs.sum(), is_last=is_last)
        if critic:
            critic.backward(critic.values(micro_batch).sum())

    score_and_train()  # takes what lasts: gradients and buffers
    roles = [role for role in (actor, critic, reference) if role]
    passing: list[int] = []
    for _ in range(8):
        for role in roles:
            role.sharding.changed()
        passing.append(peak_of(score_and_train))
        if ranks.most(int(ranks.leads and passing.count(min(passing)) > 1)):
            break
    parameters = (getattr(p, "ds_tensor", p) for role in roles for p in role.model.parameters())
    weights = own_bytes((*parameters, *(t for role in roles for t in role.model.buffers())))
    gradients = own_bytes(t for role in trained for t in gradients_of(role))
    stepping = peak_of(lambda: [role.optimizer_step() for role in trained])
    zero = config.learner.engine == "deepspeed"
    optimizers: list[Any] = [vars(role.updates)["_optimizer" if zero else "optimizer"] for role in trained]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = own_bytes(value for state in states for name, value in state.items() if name != "step")
    masters = own_bytes(tensor for optimizer in optimizers if zero for tensor in optimizer.state)
    return {
        "weights": weights,
        "gradients": gradients,
        "masters": masters,
        "moments": moments,
        "passing": min(passing),
        "stepping": stepping,
    }


def gradients_of(role: Any) -> Iterator[torch.Tensor]:
    """Gradients that are summed over micro-batches; DeepSpeed has them in another place at each stage."""
    zero = vars(role.updates).get("_zero")
    parameters = list(role.model.parameters())
    if hasattr(zero, "grad_partitions_flat_buffer"):
        yield zero.grad_partitions_flat_buffer
        return
    yield from (p.grad for p in parameters if p.grad is not None)
    yield from (p.grad_accum for p in parameters if getattr(p, "grad_accum", None) is not None)
    if zero is not None:
        for sums in (zero.averaged_gradients, zero.all_grad_tensors):
            yield from (part for parts in sums.values() for part in parts or ())


def own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return nbytes(t.to_local() if isinstance(t, DTensor) else t for t in tensors)


def _no_peak(work: Callable[[], object]) -> int:
    work()
    return 0


def _peak_of(work: Callable[[], object]) -> int:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    profiler: Any = recorded.profiler
    events = profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


if __name__ == "__main__":
    main(Path(sys.argv[1]))
