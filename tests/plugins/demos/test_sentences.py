"""Rows and rewards of the demo of words, and its settings."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.demo.choice import DemoRequest
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.demos import llm, sentences


def test_no_held_out_word_is_in_a_row_of_training(tmp_path: Path) -> None:
    """A seed orders rows of training, and leaves the held-out ones."""
    parts = {}
    for seed in (1, 2):
        sentences.write_rows(tmp_path / str(seed), seed)
        for name in ("rl", "eval"):
            parts[name, seed] = pq.read_table(tmp_path / str(seed) / f"{name}.parquet")["answer"].to_pylist()
    assert parts["eval", 1] == parts["eval", 2]
    assert parts["rl", 1] != parts["rl", 2]
    assert sorted(parts["rl", 1]) == sorted(parts["rl", 2])
    assert not {*parts["rl", 1]} & {*parts["eval", 1]}
    assert min(len(parts["rl", 1]), len(parts["eval", 1])) >= 100


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("A violin is a small instrument.", 1.0),
        (" It has four strings, a violin!\n", 1.0),
        ("A VIOLIN " + "very " * 12 + "small.", 1.0),
        ("A violin " + "very " * 13 + "small.", 0.0),
        ("A violin is small.", 0.0),  # a fragment
        ("A violin is a small instrument", 0.0),  # cut
        ("a violin is a small instrument.", 0.0),
        ("A violin is an instrument. It is small.", 0.0),
        ("A violin is\na small instrument.", 0.0),
        ("Violins are instruments of four strings.", 0.0),
        ("It is a small instrument of wood.", 0.0),
        ("A violin is a violin.", 0.0),  # says nothing, and was learnt where it was paid
        ("", 0.0),
    ],
)
def test_reward_of_a_sentence(completion: str, reward: float) -> None:
    assert sentences.short_sentence(RewardSample(completion=completion, answer="violin")) == reward


def test_the_word_lora_trains_adapters_and_nothing_else_changes() -> None:
    whole, adapters = load_config(llm.CONFIG), load_config(llm.CONFIG, [str(llm.ADAPTERS)])
    assert (whole.model.lora.rank, adapters.model.lora.rank) == (0, 16)
    assert adapters.learner.optim.lr > whole.learner.optim.lr
    assert (adapters.batch, adapters.data, adapters.reward) == (whole.batch, whole.data, whole.reward)


@pytest.mark.parametrize(
    "request_",
    [
        DemoRequest(changes=["run_dir=elsewhere"]),
        DemoRequest(changes=["lora", "evaluation.before_training=false"]),
        DemoRequest(from_scratch=True),
    ],
    ids=["run_dir", "before_training", "from_scratch"],
)
def test_what_the_demo_cannot_do_is_refused_at_once(
    request_: DemoRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"leave (run_dir|evaluation|out --from-scratch)"):
        llm.demo(request_)
    assert not list(tmp_path.iterdir())


def test_the_prepared_folder_is_one_to_train_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[tuple[str, ...]] = []
    monkeypatch.setattr(llm, "run", lambda title, *words: stages.append(words) or 1.0)
    seconds = llm.prepare(tmp_path, DemoRequest(seed=7, quick=True))
    assert list(seconds) == ["data", "model"]
    assert [Path(stage[2]).name for stage in stages] == ["data", "model"]
    config = load_config(tmp_path / "config.yaml")
    assert (config.run_dir, config.model.path) == (str(tmp_path / "grpo"), str(tmp_path / "model"))
    assert (config.trainer.seed, config.trainer.max_steps) == (7, 2)
