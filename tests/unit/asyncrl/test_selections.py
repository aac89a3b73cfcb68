"""Selections against published values, and those of a user's own file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from asyncrl.algorithms.selections import Selections, overlong, top_entropy
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import method_of
from asyncrl.errors import UserError
from tests.rigs.provenance import provenance_of
from tests.rigs.tiny import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())


def top_entropy_of(fraction: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"selections": ["top_entropy"], "top_entropy": {"fraction": fraction}})


TOP_ENTROPY = top_entropy_of(0.2)
OWN = """
import torch
from asyncrl.algorithms.losses import PolicyLoss

METHODS = {
    "even": {"formula": "every other one", "needs": ["entropies"], "takes_from": "policy_loss"},
    "loss": {"marks": "even", "needs": ["critic"], "defaults": {"loss_agg_mode": "seq-mean-token-mean"}},
}

def even(t, credit, config):
    return torch.arange(len(t.row)) % 2 == 0

def plain(t, credit, config):
    return torch.ones(3) if config.gamma < 1 else t.row == 0

def loss(tokens, config):
    return PolicyLoss(torch.where(tokens.marked, 0.0, -tokens.advantages * tokens.logprobs), {})
"""


def trajectories(lengths: list[int], group: list[int], entropies: list[float] | None = None) -> Trajectories:
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    found = None if entropies is None else torch.tensor(entropies)
    return Trajectories(torch.zeros(len(lengths)), torch.tensor(group), row, torch.zeros(len(row)), entropies=found)


def test_top_entropy_keeps_the_share_of_highest_entropy_of_the_whole_batch() -> None:
    entropies = [0.1, 2.0, 0.3, 0.2, 1.5, 0.0, 0.4, 0.5, 0.6, 0.7]
    t = trajectories([6, 4], [0, 1], entropies)
    silent = top_entropy(t, Credit(torch.zeros(10)), TOP_ENTROPY)
    assert (~silent).nonzero()[:, 0].tolist() == [1, 4], "two of ten, wherever they are"
    assert not top_entropy(
        t,
        Credit(torch.zeros(10)),
        AlgorithmConfig.model_validate({"selections": ["top_entropy"], "top_entropy": {"fraction": 1.0}}),
    ).any()
    equal = trajectories([3], [0], [0.5, 0.5, 0.5])
    assert not top_entropy(equal, Credit(torch.zeros(3)), TOP_ENTROPY).any(), "at the threshold is above it"


def test_overlong_takes_trajectories_without_a_stop_token_out_of_the_batch() -> None:
    t = trajectories([2, 1, 0, 3], [0, 0, 1, 1])
    cut = overlong(replace(t, is_truncated=torch.tensor([False, True, True, True])), Credit(t.row), AlgorithmConfig())
    assert cut.tolist() == [False, False, True, True, True, True]
    assert not overlong(t, Credit(t.row), AlgorithmConfig()).any()


def test_a_users_own_methods_are_read_like_the_built_in_ones(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    config = AlgorithmConfig(policy_loss=f"{file}:loss", selections=(f"{file}:even", f"{file}:plain"))
    assert config.needs == {"critic", "entropies"}
    assert config.loss_agg_mode == "seq-mean-token-mean", "its defaults, too"
    selected = Selections(config)(trajectories([2, 2], [0, 0]), Credit(torch.zeros(4)))
    assert selected.from_policy_loss["even"].tolist() == [True, False, True, False]
    assert selected.from_loss["plain"].tolist() == [True, True, False, False]
    assert selected.marked is not None
    assert selected.marked.tolist() == [True, False, True, False], "the loss's marks are those of its own file"
    with pytest.raises(UserError, match=r"plain returned \(3,\) of torch.float32, but there are 4 trained tokens"):
        Selections(config.model_copy(update={"gamma": 0.5}))(trajectories([2, 2], [0, 0]), Credit(torch.zeros(4)))
    assert method_of("policy_loss", f"{file}:missing") is None, "whoever loads it says why"
    for written, wrong, said in (
        ('"critic"', '"critics"', r"METHODS\['loss'\] needs 'critics', which nothing provides\. Did you mean 'critic'"),
        ('"every other one"', "str(2)", "METHODS is no literal dict of dicts"),
        ('"marks"', '"mark"', r"METHODS\['loss'\] has mark\. Did you mean 'marks'"),
        ('"policy_loss"}', '"policy"}', "takes from 'policy': it is loss, policy_loss, batch"),
    ):
        file.write_text(OWN.replace(written, wrong))
        with pytest.raises(ValidationError, match=said):
            AlgorithmConfig(policy_loss=f"{file}:loss")


def test_tokens_of_demonstrations_are_not_chosen_and_enter_no_quantile() -> None:
    t = trajectories([4, 4], [0, 0], [9.0, 9.0, 9.0, 9.0, 0.1, 0.2, 0.3, 0.4])
    t = replace(t, provenance=provenance_of(t.row, torch.tensor([True] * 4 + [False] * 4)))
    config = top_entropy_of(0.25)
    silent = Selections(config)(t, Credit(torch.zeros(8))).from_policy_loss["top_entropy"]
    assert silent.tolist() == [False] * 4 + [True, True, True, False]


def test_unknown_and_repeated_selections_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"'top_entropie', which is unknown\. Did you mean 'top_entropy'"):
        AlgorithmConfig(selections=("top_entropie",))
    with pytest.raises(ValidationError, match=r"one twice: m2po, m2po\. Keep one"):
        AlgorithmConfig(selections=("m2po", "m2po"))
