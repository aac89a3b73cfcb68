"""Errors of the user's functions: an attribute that an object of ours lacks is told with those that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.ratios import PolicyTokens
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.rewards.sample import RewardSample
from asyncrl.user_functions import one_line


def sample() -> Any:
    return RewardSample("It is 7.")


def tokens() -> Any:
    column = torch.zeros(2)
    return PolicyTokens(column, column, column, column, torch.zeros(2, dtype=torch.int64))


def test_a_loss_that_asks_for_another_field_is_told_all_fields(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "loss.py"
    file.write_text("def mine(tokens, config):\n    return tokens.log_probs.exp()\n")
    loss = load_method("policy_loss", f"{file}:mine", "algorithm.policy_loss")
    with pytest.raises(BadStateError) as error:
        loss(tokens(), make_config().algorithm)
    assert "Did you mean 'logprobs'? It has logprobs, proximal_logprobs, behaviour_logprobs" in str(error.value)
    assert all(field.name in str(error.value) for field in fields(PolicyTokens))
    assert "(loss.py:2 in mine)" in str(error.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sample().text, "It has completion, prompt, messages, answer, columns"),
        (lambda: tokens().of_token, "Did you mean 'of_tokens'?"),
        (lambda: sample().completions, "Did you mean 'completion'?"),
        (lambda: sample().completion.nothing, "AttributeError: 'str' object has no attribute 'nothing' ("),
        (lambda: sample().columns.level, "'dict' object has no attribute 'level' ("),
    ],
)
def test_objects_of_ours_tell_their_attributes_and_others_python_alone(call: Callable[[], object], said: str) -> None:
    with pytest.raises(AttributeError) as error:
        call()
    assert said in one_line(error.value)
