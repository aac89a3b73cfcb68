"""bf16 weights are trained on fp32 masters: nothing of a small update is lost, across checkpoints and sleep either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.models import output_head
from asyncrl.models.loading import load_model
from asyncrl.models.published import published_tensors
from asyncrl.processing.processor import PromptProcessor
from learner.loop.policy_export import finish_export
from learner.training.engine import ENGINE_FILE, TorchEngine
from learner.training.packing import MicroBatch
from tests.rigs.made_up_batch import made_up_batch

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]
OPTIM = {"optim": {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.95], "max_grad_norm": 1e9}}


def prepared(make_config: MakeConfig, dtype: str, model: Any = None, **learner: Any) -> TorchEngine:
    config = make_config(model={"dtype": dtype, **(model or {})}, learner={**OPTIM, **learner})
    engine = TorchEngine(config.model_settings, config.learner.optim, 100)
    engine.prepare()
    return engine


def trained(engine: TorchEngine) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in engine.model.named_parameters() if p.requires_grad}


def direction(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    """A gradient that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(step * 1000 + len(name))
    return (torch.randn(parameter.shape, generator=generator) + 1).bfloat16().to(parameter.dtype)


def take_step(engine: TorchEngine, step: int) -> None:
    engine.backward(torch.stack([(p * direction(n, p, step)).float().sum() for n, p in trained(engine).items()]).sum())
    engine.optimizer_step()


def test_bf16_weights_are_those_of_fp32_training_rounded(make_config: MakeConfig) -> None:
    """50 updates of 1e-6, each far below the distance of two bf16 numbers: bf16 AdamW would lose nearly all of it."""
    engine = prepared(make_config, "bfloat16")
    exact = {name: p.detach().float() for name, p in trained(engine).items()}
    groups = [
        {"params": [w for w in exact.values() if w.ndim >= 2], "weight_decay": 0.01},
        {"params": [w for w in exact.values() if w.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95))
    for step in range(50):
        take_step(engine, step)
        for name, weight in exact.items():
            weight.grad = direction(name, weight, step)
        adamw.step()
    for name, p in trained(engine).items():
        assert torch.equal(p, exact[name].bfloat16()), name
        assert p.grad is None


@pytest.mark.parametrize("learner", [{}, {"cpu_offload": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clipped_updates_are_those_of_torch(make_config: MakeConfig, dtype: str, learner: dict[str, Any]) -> None:
    """The norm is taken where gradients arrive, of sums over micro-batches; AdamW clips and unscales as it reads."""
    optim = {"lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.95], "max_grad_norm": 0.5}
    engine = prepared(make_config, dtype, None, **learner, optim=optim)
    if dtype == "float16":
        engine.updates._scale.value = 2.0**10
    exact = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in trained(engine).items()}
    adamw = torch.optim.AdamW(exact.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for weight in exact.values():
            weight.grad = None
        for part in (2 * step, 2 * step + 1):
            given = {name: direction(name, p, part) / 64 for name, p in trained(engine).items()}
            engine.backward(torch.stack([(p * given[n]).float().sum() for n, p in trained(engine).items()]).sum())
            for name, weight in exact.items():
                weight.grad = given[name].float() + (0 if weight.grad is None else weight.grad)
        norm = torch.nn.utils.clip_grad_norm_(exact.values(), 0.5)
        said = engine.optimizer_step()
        assert said["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        adamw.step()
    for stepped, weight in zip(engine.updates.stepped(), exact.values(), strict=True):
        torch.testing.assert_close(stepped.float(), weight.detach(), rtol=1e-5, atol=1e-6)


def test_an_export_has_the_weights_that_sample_and_not_their_masters(make_config: MakeConfig, tmp_path: Path) -> None:
    """The policy is the masters rounded: a folder of masters would be another one."""
    for dtype in ("bfloat16", "float16"):
        engine, processor = prepared(make_config, dtype), PromptProcessor(make_config().model)
        for step in range(3):
            take_step(engine, step)
        engine.export(processor.processor, tmp_path / dtype)
        model = make_config(model={"path": str(tmp_path / dtype), "dtype": dtype}).model
        record = finish_export(model, "", processor, lambda: pytest.fail("nothing is to compare"), tmp_path / dtype)
        assert (record.form, record.dtype, record.differs) == ("model", dtype, False)
        exported = dict(published_tensors(load_model(model, device=torch.device("cpu"))))
        for name, tensor in engine.published_state():
            assert torch.equal(exported[name], tensor), name


def test_gradients_of_micro_batches_add_up_in_fp32(make_config: MakeConfig) -> None:
    """A bf16 sum would stay at 1: half of 2^-8 is less than it can show."""
    engine = prepared(make_config, "bfloat16")
    weight = next(iter(trained(engine).values()))
    engine.backward(weight.float().sum())
    for _ in range(256):
        engine.backward(weight.float().sum() * 2**-9)
    assert weight.grad is not None
    assert weight.grad.unique().tolist() == [1.5]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of one process, for an engine that is divided."""
    store: Any = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("learner", [{}, {"cpu_offload": True}, {"engine": "fsdp2", "num_processes": 2}], ids=str)
def test_gradients_of_the_output_layers_chunks_add_up_in_fp32(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, one_rank: None, learner: dict[str, Any]
) -> None:
    """In 16 chunks of 4 tokens a micro-batch has as exact a gradient as by one product, which is rounded once."""
    engine = prepared(make_config, "bfloat16", None, **learner)
    batch = made_up_batch(make_config(), PromptProcessor(make_config().model))
    micro_batch = engine.pack(batch.train_groups)
    assert len(micro_batch.targets) > 64
    micro_batch = replace(micro_batch, predict_from=micro_batch.predict_from[:64], targets=micro_batch.targets[:64])
    whole, by_chunk = (output_gradient(engine, micro_batch, monkeypatch, tokens) for tokens in (64, 4))
    assert not torch.equal(by_chunk.bfloat16().float(), by_chunk), "a sum of 16-bit numbers in fp32"
    pieces = torch.zeros_like(whole)
    for first in range(0, 64, 4):
        chunk = slice(first, first + 4)
        part = replace(micro_batch, predict_from=micro_batch.predict_from[chunk], targets=micro_batch.targets[chunk])
        pieces += output_gradient(engine, part, monkeypatch, 64)
    torch.testing.assert_close(by_chunk, pieces, rtol=1e-4, atol=float(pieces.abs().max()) * 1e-5)


def output_gradient(
    engine: TorchEngine, micro_batch: MicroBatch, monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int
) -> torch.Tensor:
    """fp32 gradient of the output layer, which is forgotten afterwards."""
    layer = engine.model.get_output_embeddings()
    monkeypatch.setattr(output_head, "LOGITS_PER_CHUNK", tokens_per_chunk * layer.weight.shape[0])
    engine.backward(engine.forward(micro_batch).logprobs.sum())
    masters = engine.updates.masters
    masters.take_gradients()
    place = next(place for place, parameter in enumerate(trained(engine).values()) if parameter is layer.weight)
    gradient = masters.stepped()[place].grad  # all of it, also on the one rank
    assert gradient is not None
    found = gradient.clone()
    engine.updates.optimizer.zero_grad(set_to_none=True)
    engine.updates.drop_gradients()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_continues_bit_for_bit(make_config: MakeConfig, tmp_path: Path, dtype: str) -> None:
    unbroken = prepared(make_config, dtype)
    for step in range(4):
        if step == 2:
            unbroken.model.save_pretrained(tmp_path / "model")
            unbroken.files(copies=False)(tmp_path)
        take_step(unbroken, step)
    again = prepared(make_config, dtype, {"path": str(tmp_path / "model")})
    again.load(tmp_path)
    for step in (2, 3):
        take_step(again, step)
    theirs = trained(again)
    assert all(torch.equal(p, theirs[name]) for name, p in trained(unbroken).items())
    for one, other in zip(unbroken.updates.masters.stepped(), again.updates.masters.stepped(), strict=True):
        assert torch.equal(one, other)
    assert len(again.updates.masters.copies()) == (len(theirs) if dtype == "bfloat16" else 0)


@pytest.mark.parametrize(
    ("dtype", "model"), [("bfloat16", {}), ("float32", {}), ("bfloat16", {"lora": {"rank": 4}})], ids=str
)
def test_offload_changes_where_and_not_what(
    make_config: MakeConfig, tmp_path: Path, dtype: str, model: dict[str, Any]
) -> None:
    """Two updates of three micro-batches, of which one is dropped; then each continues from the other's checkpoint."""
    sides = {offload: prepared(make_config, dtype, model, cpu_offload=offload) for offload in (False, True)}
    for engine in sides.values():
        for step in (0, 1):
            for micro_batch in range(3):
                engine.backward(
                    torch.stack(
                        [
                            (p * direction(n, p, 7 * step + micro_batch)).float().sum()
                            for n, p in trained(engine).items()
                        ]
                    ).sum()
                )
                if micro_batch == 0:
                    engine.drop_gradients()
            engine.optimizer_step()
    assert not any(p.grad is not None for p in trained(sides[True]).values())
    check_equal(*sides.values())
    for offload, engine in sides.items():
        (tmp_path / str(offload)).mkdir()
        engine.files(copies=False)(tmp_path / str(offload))
    for offload, engine in sides.items():
        engine.load(tmp_path / str(not offload))
        take_step(engine, 9)
    check_equal(*sides.values())


def test_float16_scales_the_loss_skips_what_overflows_and_stops_where_nothing_helps(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    engine = prepared(make_config, "float16")
    weight = max(trained(engine).values(), key=lambda p: p.numel())
    small = 1e-4 / weight.numel()
    assert small < 2**-25, "less than half of float16's smallest number: without a scale it is 0"
    engine.backward((weight * 1e-4).float().mean())
    found = engine.optimizer_step()
    assert (found["loss_scale"], found["skipped_updates"]) == (2**16, 0)
    assert found["grad_norm"] == pytest.approx(small * weight.numel() ** 0.5, rel=1e-3)

    before = {name: p.detach().clone() for name, p in trained(engine).items()}
    engine.backward((weight * 4).float().sum())  # 2^16 is over float16's largest number
    assert engine.optimizer_step() == {"lr": found["lr"], "loss_scale": 2**15, "skipped_updates": 1}
    assert all(torch.equal(p, before[name]) for name, p in trained(engine).items())
    engine.model.save_pretrained(tmp_path / "model")
    engine.files(copies=False)(tmp_path)
    again = prepared(make_config, "float16", {"path": str(tmp_path / "model")})
    again.load(tmp_path)
    assert again.optimizer_step()["loss_scale"] == 2**15
    for _ in range(15):
        engine.backward((weight * float("inf")).float().sum())
        assert engine.optimizer_step()["skipped_updates"] == 1
    engine.backward((weight * float("inf")).float().sum())
    with pytest.raises(BadStateError, match="at a loss scale of 1, the least"):
        engine.optimizer_step()


def check_equal(one: TorchEngine, other: TorchEngine) -> None:
    theirs = trained(other)
    assert all(torch.equal(p, theirs[name]) for name, p in trained(one).items())
    for mine, their in zip(one.updates.masters.stepped(), other.updates.masters.stepped(), strict=True):
        assert torch.equal(mine, their)


def test_an_older_checkpoint_loads_in_fp32_and_is_refused_in_bf16(make_config: MakeConfig, tmp_path: Path) -> None:
    engine = prepared(make_config, "float32")
    take_step(engine, 0)
    engine.files(copies=False)(tmp_path)
    state = torch.load(tmp_path / ENGINE_FILE, weights_only=True)
    assert not state.pop("masters"), "an fp32 weight is its own master"
    torch.save(state, tmp_path / ENGINE_FILE)
    prepared(make_config, "float32").load(tmp_path)
    with pytest.raises(UserError, match=r"holds no fp32 master weights of .* which is bfloat16 now.*Set model\.dtype"):
        prepared(make_config, "bfloat16").load(tmp_path)

    prepared(make_config, "bfloat16").files(copies=False)(tmp_path)
    with pytest.raises(UserError, match=r"holds fp32 master weights of .* which is float32 now.*Set model\.dtype"):
        prepared(make_config, "float32").load(tmp_path)


def test_adapters_on_bf16_weights_are_their_own_masters(make_config: MakeConfig) -> None:
    engine = prepared(make_config, "bfloat16", {"lora": {"rank": 4}})
    assert {p.dtype for p in trained(engine).values()} == {torch.float32}
    assert engine.updates.masters.copies() == []
    assert all(a is b for a, b in zip(engine.updates.masters.stepped(), trained(engine).values(), strict=True))


def test_a_connector_beside_adapters_is_published_saved_and_continued_in_its_dtype(
    make_config: MakeConfig, tmp_path: Path, one_rank: None
) -> None:
    """In bf16 with fp32 masters, whole or divided over ranks; and a checkpoint goes on with the same bits."""
    model = {"lora": {"rank": 4, "modules_to_save": ["connector"]}}
    whole, divided = (
        prepared(make_config, "bfloat16", model, **learner) for learner in ({}, {"engine": "fsdp2", "num_processes": 2})
    )
    batch = made_up_batch(make_config(), PromptProcessor(make_config().model))

    def take(engine: TorchEngine) -> dict[str, torch.Tensor]:
        for _ in range(2):
            engine.backward(-engine.forward(engine.pack(batch.train_groups)).logprobs.mean())
            engine.optimizer_step()
        return dict(engine.published_state())

    saved = take(whole)
    dtypes = {name: torch.float32 if ".lora_" in name else torch.bfloat16 for name in saved}
    assert any(".merger." in name for name in saved)
    assert {name: tensor.dtype for name, tensor in saved.items()} == dtypes
    assert len(whole.updates.masters.copies()) == list(dtypes.values()).count(torch.bfloat16)
    others = take(divided)
    assert {name: tensor.dtype for name, tensor in others.items()} == dtypes
    for name, tensor in saved.items():
        assert torch.allclose(tensor.float(), others[name].float(), rtol=1e-2, atol=1e-5), name
    whole.files(copies=False)(tmp_path)
    again = prepared(make_config, "bfloat16", model)
    again.load_published(saved.items())
    again.load(tmp_path)
    theirs = take(again)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in take(whole).items())


def test_a_checkpoint_is_continued_by_the_settings_of_now(make_config: MakeConfig, tmp_path: Path) -> None:
    """torch's load_state_dict would bring back the learning rate, betas and decay that were saved."""

    def engine(**optim: Any) -> TorchEngine:
        config = make_config(learner={"optim": {"lr_warmup_steps": 4, **optim}})
        made = TorchEngine(config.model_settings, config.learner.optim, 100)
        made.prepare()
        return made

    saved = engine(lr=1e-3)
    take_step(saved, 0)
    saved.files(copies=False)(tmp_path)
    for optim in ({"lr": 1e-3}, {"lr": 4e-3, "betas": [0.8, 0.9], "weight_decay": 0.5}):
        loaded = engine(**optim)
        loaded.load(tmp_path)
        groups, moments = loaded.updates.optimizer.param_groups, loaded.updates.optimizer.state_dict()["state"]
        assert loaded.updates.schedule.get_last_lr() == [group["lr"] for group in groups] == [optim["lr"] / 2] * 2
        if len(optim) > 1:
            assert (groups[0]["betas"], groups[0]["weight_decay"]) == ((0.8, 0.9), 0.5)
        for key, state in saved.updates.optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, moments[key][name]) for name, value in state.items())
        assert loaded.optimizer_step()["lr"] == optim["lr"] / 2
