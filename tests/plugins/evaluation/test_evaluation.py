"""`asyncrl eval` with an environment: what that loses has no score, and a dead one ends the command with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.models.lora import write_adapter_folder
from asyncrl.models.published import published_tensors
from asyncrl.telemetry.jsonl import read_lines
from rollout_server.engines.hf.engine import HFEngine
from tests.rigs.adapters import lora_config, made_up_adapter, spec_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ROWS, SIZE = 4, 3
ENVIRONMENT = '''
import os
from pydantic import BaseModel
from asyncrl.environments.observation import StepResult

class Service:
    class Config(BaseModel):
        lost: int = 0
        """Trajectories of each group that it loses."""
        how: str = "raises"

    def reset(self, start):
        self.is_lost, self.how = start.index < start.config.lost, start.config.how

    def step(self, action):
        if self.is_lost and self.how == "dies":
            os._exit(7)
        if self.is_lost:
            raise ConnectionRefusedError("search:8080")
        return StepResult(None, 1.0, True)
'''


@pytest.fixture
def evaluate(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Exit code and output of the command with these further words; the tiny model's turns are of two tokens."""
    (tmp_path / "service.py").write_text(ENVIRONMENT)
    limits = {"turns": 2, "tokens_per_turn": 2}
    config = make_config(
        environment={"name": str(tmp_path / "service.py:Service"), "limits": limits, "workers": 4, "retries": 0},
        data={"max_response_length": 8, "max_val_rows": ROWS},
        rollout={"engine": "scripted", "engine_args": {"text": "7"}},
        reward={"functions": []},
        evaluation={"group_size": SIZE},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["eval", str(tmp_path / "config.yaml"), "--model", config.model.path, *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_what_the_environment_loses_is_counted_and_is_no_reward_of_zero(
    evaluate: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "scores.jsonl"
    code, said, _ = evaluate("environment.config.lost=1", "--out", str(out))
    assert code == 0
    assert f"reward 1.0000   rows {ROWS}   errors {ROWS}" in said
    assert f"ends   done {ROWS * (SIZE - 1)}   failed {ROWS}" in said
    assert f"without a score   environment_exception {ROWS}" in said
    scored = read_lines(out)
    assert [one["reward"] for one in scored] == [None, 1.0, 1.0] * ROWS
    assert "search:8080" in scored[0]["error"]


@pytest.mark.parametrize(("how", "kind"), [("raises", "environment_exception"), ("dies", "environment_died")])
def test_a_dead_environment_ends_the_command_with_its_reason(
    evaluate: Callable[..., tuple[int, str, str]], how: str, kind: str
) -> None:
    code, said, error = evaluate(f"environment.config={{lost: 2, how: {how}}}")
    assert (code, said) == (3, "")
    assert f"the environment failed in {2 * ROWS} of {SIZE * ROWS} trajectories ({2 * ROWS} {kind})" in error
    assert "search:8080" in error or how == "dies"


def test_an_environment_that_cannot_be_loaded_and_words_of_one_turn_are_refused(
    evaluate: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, error = evaluate("environment.config.lots=1")
    assert code == 2
    assert "Did you mean 'lost'?" in error
    code, _, error = evaluate("--prefix", "answer")
    assert code == 2
    assert "leave --prefix out" in error


def test_the_hf_engine_plays_a_folder_and_an_adapter_beside_its_base(
    evaluate: Callable[..., tuple[int, str, str]],
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["rollout.engine=hf", "rollout.engine_args={}", "evaluation.temperature=1", "--out", f"{tmp_path}/out"]
    code, said, _ = evaluate(*words)
    assert code == 0
    assert "conversations   turns 1.0000" in said
    base = (tmp_path / "out").read_text()
    assert evaluate(*words)[1] == said, "the same seeds"
    assert (tmp_path / "out").read_text() == base
    lora = {"rank": 2, "target_modules": ["q_proj", "up_proj"], "modules_to_save": ["connector"]}
    config = changed(lora_config(make_config, lora), {"model.dtype": "bfloat16"})
    adapter = made_up_adapter(config, 1)
    write_adapter_folder(tmp_path / "adapter", spec_of(config), adapter.items())
    loaded: list[tuple[torch.dtype, dict[str, torch.Tensor]]] = []
    load = HFEngine._load_weights

    def spy(engine: HFEngine, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load(engine, tensors)
        loaded.append((engine._model.dtype, dict(published_tensors(engine._model))))

    monkeypatch.setattr(HFEngine, "_load_weights", spy)
    for lora in ("model.lora.rank=0", "model.lora.rank=4"):  # whatever the file says
        assert evaluate(*words, lora, "model.dtype=bfloat16", "--model", f"{tmp_path}/adapter")[0] == 0
        assert (tmp_path / "out").read_text() != base
    for dtype, tensors in loaded:
        assert dtype is torch.bfloat16
        assert all(torch.equal(tensors[name], tensor) for name, tensor in adapter.items())
    assert len(loaded) == 2


@pytest.mark.parametrize(("key", "value"), [("use_dora", True), ("rank_pattern", {"q_proj": 8}), ("bias", "all")])
def test_an_adapter_that_engines_cannot_apply_is_refused_and_not_merged(
    evaluate: Callable[..., tuple[int, str, str]],
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    key: str,
    value: object,
) -> None:
    config, folder = lora_config(make_config), tmp_path / "adapter"
    write_adapter_folder(folder, spec_of(config), made_up_adapter(config, 1).items())
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**described, key: value}))
    code, _, said = evaluate("rollout.engine=hf", "rollout.engine_args={}", "--model", str(folder))
    assert code == 2
    assert f"is no plain LoRA ({key}), and engines apply no other. Merge it with PEFT" in " ".join(said.split())


MAKES_ROWS = """
    @classmethod
    def make_row(cls, index, split):
        return {"prompt": f"Which one? {index}"}
"""


def test_a_model_plays_one_episode_in_the_terminal(
    make_config: Callable[..., RunConfig],
    evaluate: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a run's engine and limits, of a run's configuration; a class alone is played by `hf`."""
    (tmp_path / "service.py").write_text(ENVIRONMENT + MAKES_ROWS)
    words = ["--model", make_config().model.path, "--seed", "3"]
    run, cls = (
        ["env", "try", f"{tmp_path}/config.yaml", *words],
        ["env", "try", f"{tmp_path}/service.py:Service", *words],
    )
    assert main(run) == 0
    turn = "--- turn 0\n  policy: 7\n    reward 1\nend: done   reward 1 in 1 turns\n"
    assert capsys.readouterr().out == f"  user: Which one? 3\n{turn}"
    assert main([*run, "config.lost=1"]) == 1
    assert "ConnectionRefusedError: search:8080" in capsys.readouterr().out.splitlines()[-1]
    assert main([*cls, "limits.tokens_per_turn=2"]) == 0, "a model of random weights does not end its turn"
    assert capsys.readouterr().out.endswith("end: cut   reward 0 in 1 turns\n")
