"""Selections of the plug-in against published values."""

from __future__ import annotations

import json

import pytest
import torch

from asyncrl.algorithms.trajectories import Credit
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.methods.selections import cppo
from tests.rigs.tiny import ROOT
from tests.unit.asyncrl.test_selections import trajectories

pytestmark = pytest.mark.usefixtures("one_thread")
VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())


def pruning(prune: float) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"selections": ["cppo"], "cppo": {"prune": prune}})


def test_cppo_keeps_the_trajectories_of_largest_advantage_of_each_group() -> None:
    given = VECTORS["cppo"]
    advantages = torch.tensor(given["adv"])
    t = trajectories([1, 2, 3, 1], [0, 0, 0, 0])
    pruned = cppo(t, Credit(advantages[t.row]), pruning(given["prune"]))
    assert sorted(set(t.row[~pruned].tolist())) == given["kept"]
    # Of each group its own share, one at least; rows that train nothing are not counted.
    t = trajectories([1, 1, 1, 2, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0])
    credit = Credit(torch.tensor([0.1, -0.4, 0.3, 0.2, 0.2, 0.0, 5.0, -1.0, 0.0])[: len(t.row)])
    kept = t.row[~cppo(t, credit, pruning(0.5))].tolist()
    assert kept == [1, 2, 6]
    assert t.row[~cppo(t, credit, pruning(0.9))].tolist() == [1, 6]
    assert not cppo(t, credit, pruning(0.0)).any()
