"""Runs whose history is rewritten: turns are sampled, verified, trained and replayed segment by segment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.environments.recording import images_of
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.processing.processor import PromptProcessor
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.replay import replay
from protocol.messages import Group
from tests.rigs.small_runs import logs
from tests.rigs.thinking import make_thinking_model
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both
from tests.together.shown_conversations import check_segments

STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gigpo", "gae"])
def test_a_run_samples_trains_and_replays_rewritten_histories(
    make_config: Callable[..., RunConfig],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    estimator: str,
) -> None:
    """Two processes and the `hf` engine: thinking is stripped, and one image of observations stays."""
    config = make_config(
        model={"path": str(make_thinking_model(tiny_model, tmp_path / "model"))},
        environment={
            "name": str(ROOT / "tests" / "rigs" / "thinking.py:Zoom"),
            "limits": {"turns": 4, "tokens_per_turn": 20, "images": 4},
            "history": "strip_thinking",
            "keep_images": 1,
            "workers": 1,
            "instances_per_worker": 16,
        },
        data={"max_response_length": 500, "max_prompt_length": 128},
        batch={"prompts_per_step": 6, "tokens_per_microbatch": 640},
        learner={"optim": {"lr": 1e-4}},
        algorithm={"adv_estimator": estimator},
        trainer={"max_steps": STEPS},
    )
    run = tmp_path / "run"
    assert run_both(config, run) == (0, 0), logs(run)
    steps = read_lines(run / "metrics.jsonl")
    assert len(steps) == STEPS
    for step in steps:
        assert step["logprob_diff_max"] < 1e-4, "engine against learner in fp32, in later segments too"
        assert step["env/segments"] > 1
    with closing(JournalReader(run / JOURNAL_FILE)) as journal:
        groups = [journal.group(ticket_id) for ticket_id in journal.kept()]
    processor = PromptProcessor(config.model)
    why = Counter(reason for group in groups for reason in reasons(group, processor))
    assert why.keys() == {"thinking", "image", "both", "neither"}
    assert replay.main([str(run), "--step", str(STEPS)]) == 0
    check_segments(run, groups, capsys)


def reasons(group: Group, processor: PromptProcessor) -> list[str]:
    """Why each later turn of a group began a segment."""
    found: list[str] = []
    for index, record in enumerate(group.trajectories):
        token_ids = group.token_ids[group.span(index)]
        images, stays = 0, False
        for before, turn in pairwise(record.turns):
            text = processor.decode(token_ids[before.start : before.end])
            thought, shown = "</think>" in text, len(images_of(before.observation))
            gone, images = bool(images and shown), images + shown
            stays = bool(turn.context)
            assert stays == (thought or gone)
            found.append("both" if thought and gone else "thinking" if thought else "image" if gone else "neither")
    return found
