"""The check of log-probs where the learner's base has 4 bits: hf has its values, other engines a base of 16."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig, changed
from asyncrl.processing.processor import PromptProcessor
from learner.loop.logprob_parity import compare
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import answer, learner_engine, limit_of, pair_config, parity_tickets

__all__ = ["pair_config"]
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
