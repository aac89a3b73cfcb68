"""Agents that call a model by OpenAI's chat completions: their turns are a trajectory of exact tokens."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Message, Observation, PastTurn
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl_plugins.tools.agent import VERIFIERS_PROGRAM
from protocol.messages import TrajectoryStatus
from tests.plugins.tools.asking_agent import ADD
from tests.rigs.environment_pools import run_pool, seen
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both

pytest.importorskip("openai", reason="the package openai, which vLLM brings, is not installed")
AGENT = f"{Path(__file__).with_name('asking_agent.py')}:run"
VERIFIERS = Path(os.environ.get("ASYNCRL_VERIFIERS_PYTHON", ROOT / ".venv" / "verifiers" / "bin" / "python"))
STEPS = 2


def test_an_agents_requests_are_turns_and_its_failures_are_no_rewards() -> None:
    async def scenario(pool: EnvironmentWorkers) -> None:
        def start(wish: str = "", prompt: str = "seed") -> Start:
            return Start({"wish": wish}, [{"role": "user", "content": prompt}], seed=3)

        one, other = await asyncio.gather(pool.begin(start()), pool.begin(start(prompt="")))
        assert one.opening is not None
        assert one.opening.messages[0].parts == (" 3",), "the row has the rest"
        assert other.opening is not None
        assert other.opening.messages[0].parts == ("seed 3",)
        assert seen(await one.step("I think")) == ["turn 0", (84, 56)]
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        assert seen(await one.step(call)) == ['{"a": 1} added']
        ended = await one.step("done")
        assert (ended.reward, ended.done) == (0.5, True)
        forgets = await pool.begin(start("forget"))
        await forgets.step("I think")
        edited = await forgets.step("I think")
        summary = PastTurn(None, "in short", Observation((Message("user", ("go on",)),)))
        assert edited.history == (summary, PastTurn(1)), "of equal answers the one that the newest message follows"
        assert (await forgets.step("done")).done
        await forgets.close()
        for wish, why in (("edit", "message 0 of the agent's request is .*something else"), ("raise", "own service")):
            episode = await pool.begin(start(wish))
            with pytest.raises(EnvironmentFailed, match=why) as failed:
                await episode.step("so")
            assert failed.value.kind == "environment_exception"
            await episode.close()
        with pytest.raises(EnvironmentFailed, match="ended without asking"):
            await pool.begin(start("silent"))
        with pytest.raises(EnvironmentFailed, match="the row has user: 'another'"):
            await pool.begin(start(prompt="another"))
        assert seen(await other.step("I too")) == ["turn 0", (84, 56)]
        await asyncio.gather(one.close(), other.close())

    run_pool(
        {"name": "agent", "config": {"run": AGENT, "tools": [ADD]}, "instances_per_worker": 4, "retries": 0}, scenario
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent", "verifiers"])
def test_a_run_trains_on_the_exact_tokens_of_an_agents_turns(
    make_config: Callable[..., RunConfig], tmp_path: Path, name: str
) -> None:
    data: dict[str, Any] = {"max_response_length": 160, "max_prompt_length": 390, "val_files": []}
    config: dict[str, Any] = {"run": AGENT, "tools": [ADD]}
    if name == "verifiers":
        config, data["train_files"] = verifiers(tmp_path)
    run = make_config(
        environment={
            "name": name,
            "config": config,
            "limits": {"turns": 4, "tokens_per_turn": 16, "images": 4},
            "workers": 1,
            "instances_per_worker": 16,
            "memory_limit_mib": 8192,
        },
        data=data,
        batch={"tokens_per_microbatch": 4096, "group_size": 2},
        rollout={"engine": "scripted", "engine_args": {"text": "answer 1"}},
        trainer={"max_steps": STEPS},
    )
    if name == "agent":
        run = run.model_copy(update={"data": run.data.model_copy(update={"train_files": [str(empty_rows(tmp_path))]})})
    assert run_both(run, tmp_path / "run") == (0, 0), logs(tmp_path / "run")
    with closing(JournalReader(tmp_path / "run" / JOURNAL_FILE)) as journal:
        groups = [journal.group(ticket_id) for ticket_id in journal.kept()]
    assert len(groups) == STEPS * run.batch.prompts_per_step
    edited = {any(turn.history for turn in record.turns) for group in groups for record in group.trajectories}
    assert edited == ({True, False} if name == "agent" else {False})
    for record in (record for group in groups for record in group.trajectories):
        assert record.status is TrajectoryStatus.FINISHED, record.error_message
        assert len(record.turns) == 3
        forgets = bool(record.turns[1].history)
        assert [bool(turn.context) for turn in record.turns] == [False, False, forgets]
        assert record.turns[2].end - record.turns[2].start == record.turns[0].end - record.turns[0].start
        from_agent = 0.5 if name == "agent" else 1.0
        assert record.reward == pytest.approx(from_agent + record.rewards["short"])


def empty_rows(folder: Path) -> Path:
    file, row = folder / "rows.jsonl", {"prompt": "", "answer": ""}
    file.write_text("".join(json.dumps(row | {"number": n, "wish": "forget" * (n % 2)}) + "\n" for n in range(8)))
    return file


def verifiers(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The section's config, and the rows that the package's taskset makes."""
    if not VERIFIERS.exists():
        pytest.skip("verifiers is not installed: it has an environment of its own (scripts/install_test_tools.sh)")
    (folder / "verifiers_guess.py").write_bytes(Path(__file__).with_name("verifiers_guess.py").read_bytes())
    taskset, agent = {"id": "verifiers_guess"}, {"harness": {"id": "verifiers_guess"}}
    wanted = json.dumps({"taskset": taskset, "agent": agent})
    rows = subprocess.run(
        [str(VERIFIERS), str(VERIFIERS_PROGRAM), wanted, "--rows", "4"], cwd=folder, stdout=-1, check=True
    )
    (folder / "rows.jsonl").write_bytes(rows.stdout)
    config = {"taskset": taskset, "agent": agent, "python": str(VERIFIERS), "folder": str(folder)}
    return config, [str(folder / "rows.jsonl")]
