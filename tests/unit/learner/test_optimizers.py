"""`learner.optimizer=adamw_8bit`: near torch's AdamW, resumed bit for bit, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.parts import SMALLEST_8BIT
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan.live_bytes import nbytes
from asyncrl.memory_plan.plan import make_plan
from learner.training import optimizers
from tests.unit.learner.test_master_weights import check_equal, prepared, take_step, trained

MakeConfig = Callable[..., RunConfig]
NEEDS_8BIT = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
IN_8_BITS = {"optimizer": "adamw_8bit", "optim": {"lr": 1e-3, "weight_decay": 0.01}}
STEPS = 8
APART = 0.02
"""Distance of the two optimisers' weights after eight steps, as a share of their way: 0.005 measured."""


@NEEDS_8BIT
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}], ids=["on the device", "offloaded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_of_8_bits_go_the_way_of_adamw(make_config: MakeConfig, dtype: str, settings: dict[str, Any]) -> None:
    exact = prepared(make_config, dtype, **{**IN_8_BITS, **settings, "optimizer": "adamw"})
    rounded = prepared(make_config, dtype, **{**IN_8_BITS, **settings})
    start = [master.detach().clone() for master in exact.updates.masters.stepped()]
    for step in range(STEPS):
        for engine in (exact, rounded):
            take_step(engine, step)
    way = apart = 0.0
    for before, one, other in zip(
        start, exact.updates.masters.stepped(), rounded.updates.masters.stepped(), strict=True
    ):
        if one.numel() < SMALLEST_8BIT:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        way += (one - before).abs().sum().item()
        apart += (one - other).abs().sum().item()
    assert 0 < apart <= APART * way


@NEEDS_8BIT
@pytest.mark.usefixtures("one_thread")
def test_a_checkpoint_is_continued_bit_for_bit_and_by_no_other_optimizer(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    unbroken = prepared(make_config, "bfloat16", **IN_8_BITS)
    for step in range(4):
        if step == 2:
            unbroken.model.save_pretrained(tmp_path / "model")
            unbroken.files(copies=True)(tmp_path)
            unbroken.sleep()
            unbroken.wake()
        take_step(unbroken, step)
    model = {"path": str(tmp_path / "model")}
    again = prepared(make_config, "bfloat16", model, **IN_8_BITS)
    again.load(tmp_path)
    for step in (2, 3):
        take_step(again, step)
    check_equal(unbroken, again)
    with pytest.raises(UserError, match=r"moments of learner.optimizer=adamw_8bit, and it is adamw now"):
        prepared(make_config, "bfloat16", model).load(tmp_path)
    other = prepared(make_config, "bfloat16")
    take_step(other, 0)
    other.files(copies=False)(tmp_path)
    with pytest.raises(UserError, match=r"moments of learner.optimizer=adamw, and it is adamw_8bit now"):
        again.load(tmp_path)


@NEEDS_8BIT
def test_the_memory_plan_has_its_bytes(make_config: MakeConfig) -> None:
    engine = prepared(make_config, "bfloat16", **IN_8_BITS)
    take_step(engine, 0)
    states: list[Any] = list(engine.updates.optimizer.state.values())
    shared = {"qmap1", "qmap2", "step"}  # two tables of 1 KiB for all tensors
    measured = nbytes(value for state in states for name, value in state.items() if name not in shared)
    config = make_config(model={"dtype": "bfloat16"}, learner=IN_8_BITS)
    model = make_plan(config).model
    assert model.moments == measured
    assert any(p.numel() >= SMALLEST_8BIT for p in trained(engine).values())


def test_what_it_cannot_do_is_refused_with_the_fix(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=r"learner.engine is fsdp2.* Set learner.engine=torch or learner.opt"):
        make_config(learner={**IN_8_BITS, "engine": "fsdp2"})
    monkeypatch.setattr(optimizers, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'asyncrl\[learner-8bit\]', or set learner.optimizer=adamw"):
        prepared(make_config, "float32", **IN_8_BITS)
