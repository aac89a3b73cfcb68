"""The check of log-probs where a server samples with weights of 8 bits."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.alignment_rig import answer, learner_engine, pair_config, parity_judge, parity_tickets
from tests.unit.learner.test_logprob_parity import with_logprobs

__all__ = ["pair_config"]


def test_of_weights_of_8_bits_a_token_may_be_far_off_and_the_mean_may_not(pair_config: RunConfig) -> None:
    rollout = pair_config.rollout.model_copy(update={"quantization": "int8"})
    config = pair_config.model_copy(update={"rollout": rollout})
    processor = PromptProcessor(config.model)
    received = answer(HFEngine(config, processor), processor, parity_tickets(config, processor))
    shifted = {"far": np.zeros(len(received[0].group.logprobs)), "wrong": np.full(len(received[0].group.logprobs), 0.3)}
    shifted["far"][1] = 0.8
    checks = [
        SimpleNamespace(
            server_id=name,
            groups={0: dataclasses.replace(received[0], group=with_logprobs(received[0].group, by)), 1: received[1]},
            tickets=(0, 1),
        )
        for name, by in shifted.items()
    ]
    shake = Mock(**{"take_complete.return_value": checks})
    judge = parity_judge(
        config, shake, lambda method, *words: method(*words), learner_engine(config), processor, Mock()
    )
    judge.judge(version=0)
    shake.accept_server.assert_called_once_with(checks[0], once=False)
    (refused, reason, _), _ = shake.refuse.call_args
    assert refused is checks[1]
    assert re.search(r"it samples with int8 weights\); 1 is accepted, and 0.1 on average", reason)
