"""Every way in which a reward can fail, with real processes: only its own sample gets an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.sections import RewardConfig, RewardFunctionConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from tests.rigs.reward_pools import run_pool
from tests.rigs.tiny import ROOT
from tests.rigs.waiting import wait_until

FAULTS = str(ROOT / "tests" / "rigs" / "reward_faults.py")
RAISE_LINE = Path(FAULTS).read_text().splitlines().index('    return {}["missing"]') + 1


def config_of(*functions: str, workers: int = 1, timeout_s: float = 5.0) -> RewardConfig:
    chosen = tuple(RewardFunctionConfig(function=function) for function in functions or (f"{FAULTS}:fault",))
    return RewardConfig(functions=chosen, workers=workers, timeout_s=timeout_s, memory_limit_mib=1024)


def sample_of(fault: str, **fields: Any) -> RewardSample:
    return RewardSample(completion=fault, row_id="rows.jsonl:4", **fields)


THEIRS = """
calls = 0

def parts(sample):
    global calls
    calls += 1
    return {"right": float(sample.completion == sample.answer), "calls": calls}

def empty(sample, log):
    print("called", file=open(log, "a"))
    return {}

def trl(completions, level, answer, bonus=0, **kwargs):
    return [len(text) + level[0] + bonus + (answer == ["4"]) for text in completions]

def trl_without_columns(completions):
    return [None]
"""


def test_a_dict_gives_several_components_and_trls_signature_is_called_with_lists(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(THEIRS)
    sample = RewardSample(completion="four", answer="4", columns={"level": 2, "source": "mine"})

    def score(*entries: dict[str, Any]) -> Score:
        functions = [{**entry, "function": f"{file}:{entry['function']}"} for entry in entries]
        config = RewardConfig.model_validate({"functions": functions, "workers": 1})
        return run_pool(config, lambda pool: pool.score(sample))

    parts = {"function": "parts"}
    done = score({**parts, "name": "right"}, {**parts, "name": "calls"}, {"function": "trl", "kwargs": {"bonus": 10}})
    assert done.components == {"right": 0.0, "calls": 1.0, "trl": 4 + 2 + 10 + 1}, "parts is called once"
    failed = score(parts)
    assert failed.error_kind == "reward_type"
    assert "returned a dict of right, calls, without 'parts'. Set `name`" in failed.error_message
    log = tmp_path / "calls"
    nothing = {"function": "empty", "kwargs": {"log": str(log)}}
    failed = score({**nothing, "name": "a"}, {**nothing, "name": "b"})
    assert (failed.status, failed.error_kind, failed.components) == ("error", "reward_type", {})
    assert "returned an empty dict, without 'a'. Return a number under" in failed.error_message
    assert log.read_text() == "called\n", "once for all its components"
    assert score({"function": "trl_without_columns"}).error_kind == "reward_type"
    with pytest.raises(UserError, match="'bonsu'"):
        score({"function": "trl_without_columns", "kwargs": {"bonsu": 1}})


ERRORS = [
    ("raise", "reward_exception", f"'fault': KeyError: 'missing' (reward_faults.py:{RAISE_LINE} in do_raise)"),
    ("raise_deep", "reward_exception", "in do_raise_deep)"),
    ("long_message", "reward_exception", "ValueError: xxx"),
    ("bad_str", "reward_exception", "Bad: (its own text failed with RuntimeError)"),
    ("sys_exit", "reward_exception", "SystemExit: 3"),
    ("nan", "reward_nan", "'fault': returned nan"),
    ("inf", "reward_nan", "returned -inf"),
    ("huge_int", "reward_nan", "integer too large"),
    ("string", "reward_type", "returned str '1.0', expected a number"),
    ("none", "reward_type", "returned NoneType None"),
    ("memory", "reward_memory", "over the limit of 1024 MiB (reward.memory_limit_mib): MemoryError"),
    ("os_exit", "reward_crash", "'fault' lost its worker: it exited with code 7"),
    ("kill9", "reward_crash", "killed by SIGKILL"),
    ("segfault", "reward_crash", "killed by SIGSEGV"),
    ("close_fds", "reward_crash", "'fault' lost its worker"),
]
NUMBERS = [("print", 1), ("read_stdin", 0), ("true", 1), ("int", 3), ("numpy", 1)]


def test_a_failing_reward_is_an_error_of_its_own_sample_only() -> None:
    """Each faulty sample is followed by a healthy one, on its worker or the successor."""

    async def scenario(pool: RewardScorer) -> None:
        for fault, kind, message in ERRORS:
            score, neighbour = await asyncio.gather(pool.score(sample_of(fault)), pool.score(sample_of("fine")))
            assert (score.status, score.error_kind, score.reward, score.components) == ("error", kind, None, {}), fault
            assert message in score.error_message, fault
            assert len(score.error_message) < 1000
            assert (neighbour.status, neighbour.reward) == ("ok", 1.0), fault
        for kind, value in NUMBERS:  # prints, and every kind of number
            score = await pool.score(sample_of(kind))
            assert (score.status, score.reward, score.components) == ("ok", value, {"fault": value}), kind

    run_pool(config_of(), scenario)


def test_a_reward_that_prints_without_end_fills_no_log(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(pool: RewardScorer) -> tuple[list[Score], int]:
        return [await pool.score(sample_of("flood")) for _ in range(5)], pool.dropped_bytes

    scores, dropped = run_pool(config_of(), scenario)
    assert [score.reward for score in scores] == [1.0] * 5
    shown = capfd.readouterr().err
    assert shown.startswith("noisenoise"), "the first of it is shown"
    assert len(shown) < 5 * 9000 + 2000
    assert dropped > 5 * 400_000 - 5 * 9000 - 400_000, "the last sample's may still be in the pipe"
    said = [record for record in caplog.records if "printed more than 8192 bytes" in record.getMessage()]
    assert len(said) == 1


def test_a_hanging_reward_is_killed_at_its_time_limit() -> None:
    async def scenario(pool: RewardScorer) -> None:
        for fault in ("sleep", "busy", "regex", "stop"):
            score, neighbour = await asyncio.gather(pool.score(sample_of(fault)), pool.score(sample_of("fine")))
            assert (score.status, score.error_kind, score.reward) == ("timed_out", "reward_timeout", None), fault
            assert "'fault' was not done after 0.4 s (reward.timeout_s)" in score.error_message
            assert 0.4 <= score.seconds < 2
            assert neighbour.status == "ok"

    run_pool(config_of(timeout_s=0.4), scenario)


def test_a_reward_sees_the_whole_sample() -> None:
    sample = RewardSample(
        completion="see \ud800",  # half a surrogate pair, as careless detokenisers give
        prompt="q",
        messages=[{"role": "user", "content": "q"}],
        answer={"x": 1.5},
        columns={"level": 3, "parts": (1, None)},
        images=[b"png"],
        row_id="d:1",
        finish_reason="length",
    )
    score = run_pool(config_of(), lambda pool: pool.score(sample))
    assert score.reward == 1.0, score


def test_components_are_weighted_and_the_first_failure_is_named() -> None:
    functions = (
        RewardFunctionConfig(function=f"{FAULTS}:length", weight=0.5, kwargs={"scale": 2.0}),
        RewardFunctionConfig(function=f"{FAULTS}:fault", weight=-3, name="inner"),
        RewardFunctionConfig(function="exact_match", name="accuracy"),
    )

    async def scenario(pool: RewardScorer) -> list[Score]:
        return [await pool.score(sample_of(fault, answer="fine")) for fault in ("fine", "sleep", "nan", "kill9")]

    config = config_of(timeout_s=0.4).model_copy(update={"functions": functions})
    fine, *failures = run_pool(config, scenario)
    assert fine.components == {"length": 8.0, "inner": 1.0, "accuracy": 1.0}
    assert fine.reward == 0.5 * 8 - 3 * 1 + 1
    assert all("reward component 'inner'" in failed.error_message for failed in failures)


def test_samples_are_spread_over_workers_and_only_the_one_being_scored_loses_its_worker() -> None:
    async def scenario(pool: RewardScorer) -> None:
        started = time.perf_counter()
        scores = await asyncio.gather(*(pool.score(sample_of("slow")) for _ in range(4)))
        assert [score.reward for score in scores] == [1.0] * 4
        assert time.perf_counter() - started < 4 * 0.3
        mixed = ["fine", "os_exit", "fine", "raise", "fine", "sleep", "fine", "kill9"] * 2
        scores = await asyncio.gather(*(pool.score(sample_of(fault)) for fault in mixed))
        for fault, score in zip(mixed, scores, strict=True):
            assert (score.status == "ok") == (fault == "fine"), (fault, score)
        kinds = Counter(score.error_kind for score in scores if score.error_kind)
        assert kinds == {"reward_crash": 4, "reward_exception": 2, "reward_timeout": 2}
        for fault in ("random", "set_order"):  # a score does not depend on the worker
            scores = await asyncio.gather(*(pool.score(sample_of(fault)) for _ in range(4)))
            assert len({score.reward for score in scores}) == 1
        assert len({(await pool.score(sample_of(f"random {i}"))).reward for i in range(4)}) == 4

    run_pool(config_of(workers=2, timeout_s=0.4), scenario)


def test_a_worker_keeps_its_state_until_it_is_lost_and_an_idle_death_costs_no_sample() -> None:
    async def scenario(pool: RewardScorer) -> None:
        words = ["count", "count", "raise", "count", "os_exit", "count", "memory", "count"]
        assert [(await pool.score(sample_of(word))).reward for word in words] == [1, 2, None, 3, None, 1, None, 1]
        assert (await pool.score(sample_of("die_later"))).status == "ok"
        await asyncio.sleep(0.4)
        assert (await pool.score(sample_of("fine"))).status == "ok"
        assert (await pool.score(sample_of("fork_returns"))).reward == 0.0, "it returns twice and answers once"
        assert (await pool.score(sample_of("fine"))).reward == 1.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score(sample_of("sleep")), 0.1)
        assert (await pool.score(sample_of("fine"))).status == "ok", "a cancelled score does not block its worker"

    run_pool(config_of(), scenario)


def test_children_of_a_reward_go_with_its_worker(tmp_path: Path) -> None:
    async def scenario(pool: RewardScorer) -> None:
        for fault in ("leave_child", "child_and_sleep", "child_and_exit"):
            pids = tmp_path / fault
            await pool.score(sample_of(fault, columns={"file": str(pids)}))
            await pool.score(sample_of("kill9"))
            await pool.score(sample_of("fine"))  # a successor exists, so its predecessor is gone
            assert not psutil.pid_exists(int(pids.read_text())), fault

    run_pool(config_of(timeout_s=0.4), scenario)


def test_nothing_survives_a_killed_pool(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import asyncio
from asyncrl.config.sections import RewardConfig, RewardFunctionConfig
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.sample import RewardSample
async def main():
    function = RewardFunctionConfig(function={FAULTS + ":fault"!r})
    pool = RewardScorer(RewardConfig(functions=(function,), workers=2))
    await pool.start()
    await pool.score(RewardSample("child_and_sleep", columns={{"file": {str(pids)!r}}}))
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), "the reward starts its child")
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(int(pids.read_text()))]
        assert len(family) >= 5  # two reapers, two workers, one child of a reward
        os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_close_during_a_sample_kills_and_says_so() -> None:
    async def scenario(pool: RewardScorer) -> None:
        running = [asyncio.create_task(pool.score(sample_of("sleep"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        for task in (*running, pool.score(sample_of("fine"))):
            with pytest.raises(RuntimeError, match="pool is closed"):
                await task

    run_pool(config_of(), scenario)


@pytest.mark.parametrize(
    ("changed", "text", "why"),
    [
        ("needed.py", "worth = 2.0", r"/needed\.py changed since the run began.* --resume --accept-changes"),
        ("broken", "", r"could not be started again: .*ZeroDivisionError"),
    ],
)
def test_a_running_run_keeps_its_reward_and_ends_where_a_worker_cannot_come_back_with_it(
    tmp_path: Path, changed: str, text: str, why: str
) -> None:
    file = tmp_path / "edited.py"
    file.write_text(
        f"import os, needed\n1 / (not os.path.exists({str(tmp_path / 'broken')!r}))\n"
        "def reward(sample): return needed.worth if sample.completion == 'fine' else os._exit(1)\n"
    )
    (tmp_path / "needed.py").write_text("worth = 1.0")

    async def scenario(pool: RewardScorer) -> None:
        file.write_text("syntax error here")
        assert (await pool.score(sample_of("die"))).error_kind == "reward_crash"
        assert (await pool.score(sample_of("fine"))).reward == 1.0
        (tmp_path / changed).write_text(text)
        assert (await pool.score(sample_of("die"))).error_kind == "reward_crash"
        for _ in range(2):
            with pytest.raises(BadStateError, match=why):
                await pool.score(sample_of("fine"))

    run_pool(config_of(f"{file}:reward"), scenario)
