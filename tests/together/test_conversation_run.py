"""A run of conversations with an environment that shows images: sampled, trained, replayed without it, and shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.environments.recording import images_of
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.replay import replay
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both
from tests.together.shown_conversations import check_shown

STEPS = 2


@pytest.mark.slow
def test_a_run_samples_trains_and_replays_conversations(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes, and the environment in processes of its own."""
    config = make_config(
        environment={
            "name": str(ROOT / "tests" / "rigs" / "lamp.py:Lamp"),
            "limits": {"turns": 4, "tokens_per_turn": 16, "images": 4},
            "workers": 1,
            "instances_per_worker": 16,
        },
        data={"max_response_length": 120, "max_prompt_length": 390},
        algorithm={"adv_estimator": "gigpo"},
        rollout={"engine": "scripted", "engine_args": {"text": "answer 1"}},
        trainer={"max_steps": STEPS},
    )
    assert run_both(config, tmp_path / "run") == (0, 0), logs(tmp_path / "run")
    with closing(JournalReader(tmp_path / "run" / JOURNAL_FILE)) as journal:
        groups = [journal.group(ticket_id) for ticket_id in journal.kept()]
    assert len(groups) == STEPS * config.batch.prompts_per_step
    tokenizer = PromptProcessor(config.model).tokenizer
    for group in groups:
        assert group.opening
        assert "switch: Switch the lamp." not in tokenizer.decode(group.prompt_ids), "the lamp's calls are JSON"
        assert '"description": "Switch the lamp."' in tokenizer.decode(group.prompt_ids)
        assert group.timings.environment_s > 0
        for record in group.trajectories:
            assert [len(images_of(turn.observation)) for turn in record.turns] == [1, 1, 0]
            assert record.reward == pytest.approx(0.75 + record.rewards["short"])
    assert replay.main([str(tmp_path / "run"), "--step", str(STEPS)]) == 0
    check_shown(tmp_path / "run", groups[0], capsys)
