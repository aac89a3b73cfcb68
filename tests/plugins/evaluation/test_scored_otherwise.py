"""`asyncrl eval` of a model of a run says where its rewards are not the run's."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.run_inputs import scoring_settings
from asyncrl.journal.writer import Journal
from asyncrl.run_folder.contents import checkpoint_folder
from asyncrl_plugins.evaluation.eval_command import scored_otherwise


def test_scores_by_other_rewards_than_the_runs_are_told_apart(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Of its export by the last ones, of a checkpoint by those of its step; other models are of no run."""
    reward = tmp_path / "rw.py"
    reward.write_text("def score(sample): return 1.0")
    config = make_config(reward={"functions": [{"function": f"{reward}:score"}]})
    run, first = config.run_path, scoring_settings(config.reward, config.environment)
    run.mkdir(parents=True)
    reward.write_text("def score(sample): return 2.0")
    second = scoring_settings(config.reward, config.environment)
    with closing(Journal(run / JOURNAL_FILE)) as journal:
        journal.set_meta(**{"inputs": json.dumps(first), "inputs.1": json.dumps([4, second])})
    early, late = (checkpoint_folder(run, step) / "model" for step in (4, 8))
    for folder in (early, late):
        folder.mkdir(parents=True)
    said = f"evaluations of {run}: reward component score: rw.py, or a file that it imports, is not what it was"
    assert scored_otherwise(config, early).endswith(said)
    assert scored_otherwise(config, late) == scored_otherwise(config, run / "export") == ""
    reward.write_text("def score(sample): return 3.0")
    assert scored_otherwise(config, run / "export").endswith(said)
    assert scored_otherwise(config, tmp_path / "model") == ""
    (run / JOURNAL_FILE).write_text("no journal")
    assert "is not known: " in scored_otherwise(config, run / "export")
