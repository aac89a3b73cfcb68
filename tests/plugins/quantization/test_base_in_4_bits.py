"""A frozen base in 4 bits below adapters: its numbers, its bytes, what PEFT makes of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import linear

from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import UserError
from asyncrl.memory_plan.live_bytes import LiveBytes, nbytes
from asyncrl.memory_plan.plan import make_plan
from asyncrl.memory_plan.rehearsal import rehearse
from asyncrl.models import sampling_distribution
from asyncrl.models.loading import load_model
from asyncrl.models.parts import part_of
from asyncrl.processing.lean_imports import import_peft
from asyncrl_plugins.quantization import nf4
from asyncrl_plugins.quantization.nf4 import base_layers, dequantized
from learner.training.engine import TorchEngine
from tests.rigs.adapters import CPU
from tests.rigs.full_micro_batch import full_micro_batch
from tests.rigs.tiny import make_tiny_model
from tests.unit.learner.test_compiled_layers import NEEDS_COMPILER
from tests.unit.learner.test_master_weights import check_equal, take_step

pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.usefixtures("one_thread"),
]
MakeConfig = Callable[..., RunConfig]
SHAPE = 16, 8, 4, 2


def in_4_bits(make_config: MakeConfig, model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """A configuration with adapters on such a base."""
    given: dict[str, Any] = {"lora": {"rank": 4}, "quantization": "nf4", "freeze_vision_tower": True, **(model or {})}
    return make_config(model=given, **sections)


def prepared(config: RunConfig) -> TorchEngine:
    engine = TorchEngine(config.model_settings, config.learner.optim, 10)
    engine.prepare()
    return engine


def plain(config: RunConfig) -> RunConfig:
    return changed(config, {"model.quantization": ""})


def with_values(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """A plain engine of 16 or 32 bits whose base has the dequantised values."""

    def load(*given: Any, **named: Any) -> Any:
        model = load_model(*given, **named)
        nf4.nf4(model)
        return model

    with monkeypatch.context() as patch:
        patch.setattr("learner.training.engine.load_model", load)
        return prepared(plain(config))


def gradients(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}


def move_adapters(engine: TorchEngine) -> None:
    """Set adapters that change something: at first B is 0."""
    draw = torch.Generator().manual_seed(1)
    for name, parameter in engine.model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=draw))


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_that_of_the_dequantised_weight(dtype: torch.dtype, has_bias: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit

    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 160, bias=has_bias, dtype=dtype)
    layer: Any = nf4._in_4_bits(plain, dtype, CPU)
    values = dequantize_4bit(layer.weight, layer.weight.quant_state)
    assert values.dtype == dtype
    assert torch.equal(values, dequantized(plain.weight.detach())), "engines have others"
    states = torch.randn(3, 7, 96, dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 7, 160, dtype=dtype)
    found, expected = layer(states), linear(states, values, plain.bias)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    one, other = (torch.autograd.grad(output, states, upstream)[0] for output in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_weight_is_one_of_16_values_times_the_largest_of_its_block() -> None:
    """The values of QLoRA, appendix E: of a block that has 1 in it they are themselves, but for scales of 8 bits."""
    values = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    values += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    block = torch.tensor(values).repeat(4)[None]  # 64 numbers: one block, whose scale is the mean of all
    torch.testing.assert_close(dequantized(block), block, rtol=0, atol=1e-6)
    middle = (block[0, 9] + block[0, 10]) / 2
    block[0, 9] = middle + 1e-3
    assert dequantized(block)[0, 9].item() == pytest.approx(values[10], abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [("float32", {}), ("bfloat16", {}), ("float32", {"vision_tower": True, "modules_to_save": ["connector"]})],
)
def test_the_learner_computes_what_dequantised_weights_do_and_trains_adapters_alike(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, dtype: str, lora: dict[str, Any]
) -> None:
    """In 16 bits PEFT rounds an adapter's output once more than beside a plain layer."""
    config = in_4_bits(make_config, {"dtype": dtype, "lora": {"rank": 4, **lora}, "freeze_vision_tower": not lora})
    engine, rounded = prepared(config), with_values(config, monkeypatch)
    for each in (engine, rounded):
        move_adapters(each)
    micro_batch = full_micro_batch(engine.model, SHAPE)
    near, near_gradient = {"float32": (1e-6, 1e-5), "bfloat16": (0.01, 0.05)}[dtype]
    found, expected = (each.forward(micro_batch).logprobs for each in (engine, rounded))
    assert (found - expected).abs().max() <= near
    for each, logprobs in ((engine, found), (rounded, expected)):
        each.backward(logprobs.sum())
    mine, theirs = gradients(engine), gradients(rounded)
    assert mine.keys() == theirs.keys()
    assert all(".lora_" in name or ".modules_to_save." in name for name in mine)
    assert any("visual" in name for name in mine) == bool(lora)
    for name, gradient in mine.items():
        assert (gradient - theirs[name]).abs().max() <= near_gradient * theirs[name].abs().max(), name
    whole = prepared(plain(config))
    move_adapters(whole)
    assert (whole.forward(micro_batch).logprobs - expected).abs().max() > 0.02, "nothing was rounded"
    assert engine.facts.architecture == whole.facts.architecture
    assert vars(engine.facts.flops)["_flops"] == vars(whole.facts.flops)["_flops"], "a byte has two weights"


def test_bits_do_not_depend_on_threads() -> None:
    """Learner and engine have numbers of their own, and a run may resume with another one."""
    weight = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0))  # scales enough to be added by two
    one = dequantized(weight)
    torch.set_num_threads(2)
    assert torch.equal(dequantized(weight), one)


def test_eval_mode_changes_nothing(make_config: MakeConfig) -> None:
    """Without a hand on it bitsandbytes packs weights anew on CPUs with AVX512-BF16, with scales of 16 bits."""
    engine = prepared(in_4_bits(make_config))
    micro_batch = full_micro_batch(engine.model, SHAPE)
    with torch.no_grad():
        before = engine.forward(micro_batch).logprobs
        engine.model.eval()
        assert torch.equal(engine.forward(micro_batch).logprobs, before)


@pytest.mark.parametrize(
    ("setting", "near"),
    [("gradient_checkpointing", 0.0), pytest.param("compile_layers", 1e-5, marks=NEEDS_COMPILER)],
)
def test_layers_that_are_computed_again_or_compiled_have_the_same_gradients(
    make_config: MakeConfig, setting: str, near: float
) -> None:
    found = []
    for is_on in (False, True):
        engine = prepared(in_4_bits(make_config, learner={setting: is_on}))
        move_adapters(engine)
        engine.backward(engine.forward(full_micro_batch(engine.model, SHAPE)).logprobs.sum())
        found.append(gradients(engine))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).abs().max() <= near * gradient.abs().max(), name


# --- what is quantised, and its bytes -------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are wide enough for the tables that they share to be little."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "wide", intermediate=2048)


def test_linear_layers_of_the_language_model_alone_are_in_4_bits(make_config: MakeConfig, wide: Path) -> None:
    config = in_4_bits(make_config, {"path": str(wide), "dtype": "bfloat16"})
    whole: Any = load_model(config.model, device=CPU)
    names, weights = base_layers(whole), nbytes(whole.parameters())
    counts = {name: whole.get_submodule(name).weight.numel() for name in names}
    held: Any = load_model(config.model, device=CPU)
    nf4.held_by_learner(held, CPU)
    quantised = {name for name, p in held.named_parameters() if p.dtype == torch.uint8}
    assert quantised == {f"{name}.weight" for name in names}
    assert all(part_of(name.split(".")) == "language_model" and not name.startswith("lm_head") for name in quantised)
    assert {p.dtype for name, p in held.named_parameters() if name not in quantised} == {torch.bfloat16}
    assert any(part_of(name.split(".")) == "connector" for name, _ in held.named_parameters())
    saved = weights - nbytes([*held.parameters(), *_scales(held)])
    per_weight = 2 - saved / sum(counts.values())
    assert 0.5 < per_weight <= 0.6, per_weight


def _scales(model: Any) -> list[torch.Tensor]:
    return [tensor for name, tensor in model.named_buffers() if name.rpartition(".")[2] in nf4.BUFFERS]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_plan_counts_what_is_held_and_what_a_pass_takes(
    make_config: MakeConfig, wide: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    monkeypatch.setattr(sampling_distribution, "CACHED_VALUES", 2**40)
    shape = prompt, response, group, groups = 64, 32, 4, 2
    config = in_4_bits(
        make_config,
        {"path": str(wide), "dtype": "bfloat16"},
        data={"max_prompt_length": prompt, "max_response_length": response, "val_files": []},
        batch={"group_size": group, "tokens_per_microbatch": groups * (prompt + group * response)},
        learner={"device": "cpu", "gradient_checkpointing": checkpointing},
        rollout={"device": "cpu"},
    )
    plan, engine = rehearse(config), prepared(config)
    held = [*engine.model.parameters(), *engine.model.buffers()]
    assert plan.held == nbytes(held)
    assert plan.weights == rehearse(plain(config)).weights, "the engine's"
    micro_batch = full_micro_batch(engine.model, shape)
    engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
    sums = [p.grad for p in engine.model.parameters() if p.grad is not None]
    with LiveBytes("cpu", known=[*held, *sums]) as live:
        engine.backward(engine.forward(micro_batch, entropy="value").logprobs.sum())
    assert live.peak <= plan.passing <= 1.6 * live.peak
    in_learner, in_engine = (line for line in make_plan(config).phases[0].lines if line.name == "weights")
    assert (in_learner.nbytes, in_engine.nbytes) == (plan.held, plan.weights)
    assert "less by model.quantization" in in_learner.why


# --- sleep, checkpoints, adapters -----------------------------------------------------------


def test_all_of_it_sleeps_and_wakes(make_config: MakeConfig) -> None:
    engine = prepared(in_4_bits(make_config))
    micro_batch = full_micro_batch(engine.model, SHAPE)
    before = engine.forward(micro_batch).logprobs
    states = [module.weight.quant_state for module in engine.model.modules() if hasattr(module, "quant_state")]
    assert len(states) == 14

    def on_device() -> list[int]:
        scales = [[s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code] for s in states]
        return [tensor.numel() for each in scales for tensor in each]

    sizes = on_device()
    engine.sleep()
    assert not any(on_device())
    assert not any(p.numel() for p in engine.model.parameters())
    engine.wake()
    assert on_device() == sizes
    assert torch.equal(engine.forward(micro_batch).logprobs, before)


@pytest.mark.parametrize(
    "learner", [{}, {"cpu_offload": True}, {"optimizer": "adamw_8bit"}], ids=["plain", "offloaded", "8 bits"]
)
def test_a_checkpoint_is_continued_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, learner: dict[str, Any]
) -> None:
    """The base is quantised again, from the same file."""
    config = in_4_bits(make_config, {"dtype": "bfloat16"}, learner=learner)
    unbroken, again = prepared(config), prepared(config)
    for step in range(4):
        if step == 2:
            unbroken.files(copies=True)(tmp_path)
            again.load_published([(name, tensor.clone()) for name, tensor in unbroken.published_state()])
            again.load(tmp_path)
        take_step(unbroken, step)
    for step in (2, 3):
        take_step(again, step)
    check_equal(unbroken, again)
    published = dict(unbroken.published_state())
    assert all(torch.equal(tensor, published[name]) for name, tensor in again.published_state())
    assert all(".lora_" in name for name in published)


def test_peft_sees_the_layers_whatever_it_has_been_told_before(make_config: MakeConfig) -> None:
    """Told that bitsandbytes is not there, it would wrap them as plain layers."""
    import_peft()
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available
    from peft.tuners.lora.bnb import Linear4bit

    for known in (is_bnb_available, is_bnb_4bit_available):
        known.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name, *_: None)
        assert not is_bnb_4bit_available()
    assert not is_bnb_4bit_available(), "it is remembered"
    engine = prepared(in_4_bits(make_config))
    adapted = [m for name, m in engine.model.named_modules() if name.endswith("_proj") and hasattr(m, "lora_A")]
    assert {type(module) for module in adapted} == {Linear4bit}
    micro_batch = full_micro_batch(engine.model, SHAPE)
    base = engine.forward(micro_batch).logprobs
    move_adapters(engine)
    assert not torch.equal(engine.forward(micro_batch).logprobs, base)
    with engine.reference():
        assert torch.equal(engine.forward(micro_batch).logprobs, base), "the reference is the base in 4 bits"


# --- refusals -------------------------------------------------------------------------------


TRAINED = r"model.lora.rank is 0: weights of 4 bits cannot be trained. Set model.lora.rank=16"
UNCORRECTED: dict[str, dict[str, Any]] = {"algorithm": {"correction": {"kind": "none"}}}


@pytest.mark.parametrize(
    ("model", "sections", "problem"),
    [
        ({}, {}, None),
        ({"lora": {"rank": 0}}, {}, TRAINED),
        ({"quantization": "nf5"}, {}, r"model.quantization is 'nf5', and there is only nf4.* Did you mean 'nf4'"),
        ({"quantization": "int8"}, {}, r"model.quantization is 'int8', and there is only nf4"),
        ({}, {"learner": {"engine": "fsdp2"}}, r"learner.engine is fsdp2.*Set learner.engine=torch"),
        ({}, UNCORRECTED, None),  # hf has the learner's own values
        ({"quantization": ""}, {"rollout": {"quantization": "nf4"}}, None),
        (
            {"quantization": ""},
            {"rollout": {"quantization": "nf4"}, **UNCORRECTED},
            r"rollout.quantization is nf4: the policy that samples is not the learner's",
        ),
    ],
)
def test_a_base_in_4_bits_needs_adapters_and_one_process(
    make_config: MakeConfig, model: dict[str, Any], sections: dict[str, dict[str, Any]], problem: str | None
) -> None:
    if problem is None:
        in_4_bits(make_config, model, **sections)
    else:
        with pytest.raises(ValidationError, match=problem):
            in_4_bits(make_config, model, **sections)


def test_without_bitsandbytes_the_user_is_told_what_to_install(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"bitsandbytes is not installed here: pip install 'asyncrl\[qlora\]'"):
        prepared(in_4_bits(make_config))


def test_a_critic_keeps_its_precision(make_config: MakeConfig) -> None:
    config = in_4_bits(make_config, algorithm={"adv_estimator": "gae"})
    assert config.critic_model.quantization == ""
