"""The learner's threads on a CPU that servers use, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from learner.loop import thread_choice
from learner.loop.thread_choice import ThreadChoice

MakeConfig = Callable[..., RunConfig]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(thread_choice, "available_cores", lambda: 2)
    yield
    torch.set_num_threads(before)


def choose(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, seconds: dict[int, float], *, tokens_per_s: float
) -> int:
    """Threads after the choice, where a forward pass over half of the batch takes so many seconds by threads."""
    group: Any = SimpleNamespace(num_tokens=50)
    monkeypatch.setattr(thread_choice, "make_batch", lambda *_: SimpleNamespace(train_groups=(group, group)))
    monkeypatch.setattr(thread_choice, "plan_micro_batches", lambda *_: [[group], [group]])
    monkeypatch.setattr(thread_choice, "_seconds", lambda *_: seconds[torch.get_num_threads()])
    engine = SimpleNamespace(tokens_at_once=lambda tokens: tokens, pack=lambda groups: groups)
    training: Any = SimpleNamespace(engine=engine, config=config, processor=None)
    received: Any = [SimpleNamespace(group=SimpleNamespace(is_sampled=np.ones(100, bool)))]
    beats: Any = [SimpleNamespace(tokens_generated=10 * tokens_per_s, busy_s=10.0)]
    choice = ThreadChoice(config.run_path, config.learner, CPU, is_shared=config.trainer.mode == "async")
    choice.choose(training, received, beats)
    first = torch.get_num_threads()
    seconds.update({1: 9.0, 2: 0.1})
    choice.choose(training, received, beats)  # once in a run
    assert torch.get_num_threads() == first
    return first


def test_the_slower_side_has_the_idle_core(monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig) -> None:
    config = make_config(learner={"cpu_threads": 0})
    # A step takes 3 passes over two micro-batches of 1 s: 6 s. Its 100 tokens are sampled in 5 s, or in 10.
    assert choose(monkeypatch, config, {1: 1.0, 2: 0.6}, tokens_per_s=20) == 2
    torch.set_num_threads(1)
    assert choose(monkeypatch, config, {1: 1.0, 2: 0.6}, tokens_per_s=10) == 1


def test_threads_that_do_not_help_are_left(monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig) -> None:
    assert choose(monkeypatch, make_config(learner={"cpu_threads": 0}), {1: 1.0, 2: 0.95}, tokens_per_s=1000) == 1
    assert (
        choose(monkeypatch, make_config(learner={"cpu_threads": 0}), {1: 0.05, 2: 0.01}, tokens_per_s=10000) == 1
    )  # a tiny model


@pytest.mark.parametrize(
    "sections",
    [{"learner": {"cpu_threads": 1}}, {"trainer": {"mode": "sync"}, "learner": {"max_staleness": 0, "cpu_threads": 0}}],
)
def test_nothing_is_chosen_that_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig, sections: dict[str, Any]
) -> None:
    assert choose(monkeypatch, make_config(**sections), {1: 1.0, 2: 0.6}, tokens_per_s=1000) == 1


def test_a_resumed_run_has_the_threads_of_its_last_step(
    monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig
) -> None:
    config = make_config(learner={"cpu_threads": 0})
    config.run_path.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 1, "cpu_threads": 1}, {"step": 2, "cpu_threads": 2}]
    (config.run_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert choose(monkeypatch, config, {1: 1.0, 2: 1.0}, tokens_per_s=1000) == 2
