"""The check of log-probs where the learner's base has 4 bits: hf has its values, other engines a base of 16."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig, changed
from asyncrl.models.loading import load_model
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.quantization.nf4 import base_layers, dequantized
from learner.loop.logprob_parity import compare
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.adapters import MakeConfig
from tests.rigs.alignment_rig import answer, learner_engine, limit_of, pair_config, parity_tickets
from tests.rigs.policies import CPU, LENGTHS, gaps, initial_weights, moved, prompts, sample_with_updates

__all__ = ["pair_config", "prompts"]
pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.usefixtures("one_thread"),
]
USUAL = 1e-3


def parity(config: RunConfig, engine: RunConfig) -> Any:
    processor = PromptProcessor(config.model)
    received = answer(HFEngine(engine, processor), processor, parity_tickets(config, processor))
    return compare(learner_engine(config), processor, received, config.batch.microbatch_tokens)


def test_hf_samples_with_the_learners_own_values_and_other_engines_do_not(pair_config: RunConfig) -> None:
    plain = changed(pair_config, {"model.lora.rank": 4})
    config = changed(plain, {"model.quantization": "nf4"})
    assert config.rollout.precision("nf4") == "nf4"
    assert limit_of(config) == USUAL
    assert parity(config, config).largest < 1e-5
    other = changed(config, {"rollout.engine": "vllm"})
    assert other.rollout.precision("nf4") == ""
    assert limit_of(other) > USUAL
    mismatch = parity(config, plain)
    assert mismatch.largest > 1e-3
    assert mismatch.mean < limit_of(other) / 10
    assert mismatch.kl > 0


@pytest.mark.parametrize(
    ("base", "sampled", "expected"), [("nf4", "int8", 5.0), ("", "int8", 1.0), ("nf4", "nf4", 1e-3)]
)
def test_the_accepted_difference_is_that_of_the_coarser_weights(
    pair_config: RunConfig, base: str, sampled: str, expected: float
) -> None:
    config = changed(pair_config, {"model.lora.rank": 4, "model.quantization": base, "rollout.quantization": sampled})
    assert limit_of(config) == expected


def test_versions_of_a_whole_model_are_rounded_anew(
    make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...]
) -> None:
    """As a precision of rollouts alone, beside a learner that trains all weights."""
    config = make_config(rollout={"quantization": "nf4", "weight_update": "recompute"})
    names = {f"{name}.weight" for name in base_layers(load_model(config.model, device=CPU))}
    first = initial_weights(config)
    policies = [first, moved(first, 1, by=1.0)]
    rounded = [{n: dequantized(w) if n in names else w for n, w in policy.items()} for policy in policies]
    requests, done = sample_with_updates(config, prompts[:2], policies, LENGTHS[:2])
    assert {version for one in done for version in one.versions.tolist()} == {0, 1}
    for completion in done:
        request = requests[completion.request_id]
        assert gaps(config, rounded, request, completion).max() < 1e-4
        assert gaps(config, policies, request, completion).max() > 1e-3
