"""`asyncrl doctor`: every check names what it finds, none hangs, and one that fails hides no other."""

from __future__ import annotations

import fcntl
import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer
from asyncrl.doctor import examination, machine, network, trial
from asyncrl.doctor.examination import Examination
from asyncrl.doctor.findings import Finding, Findings, problem, split_fix
from asyncrl.doctor.network import find_network, is_local
from asyncrl.doctor.ports import find_ports
from asyncrl.doctor.prompts import Look, Purpose, find_prompts, find_twins
from asyncrl.doctor.rewards import find_rewards
from asyncrl.doctor.run_dir import find_run_dir
from asyncrl.errors import UserError
from asyncrl.launch.processes import JOURNAL_FILE, LOCK_FILE
from asyncrl.models.processing import PromptProcessor
from protocol.curve import LEARNER_SECRET, make_keys
from protocol.endpoints import free_port
from tests.small_runs import small
from tests.two_processes import write_config

MakeConfig = Callable[..., RunConfig]


def all_of(findings: Findings[Any]) -> list[Finding]:
    return list(findings)


def write_rows(tmp_path: Path, rows: Sequence[Mapping[str, Any]], **data: Any) -> dict[str, Any]:
    """The `data` section for these rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "x", **row}) + "\n" for row in rows))
    return {"train_files": [str(file)], "val_files": [], "max_prompt_length": 40, **data}


# --- the command ----------------------------------------------------------------------------------


def test_it_describes_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    asyncrl(["doctor"])
    printed = capsys.readouterr().out
    for name in ("python", "asyncrl", "packages", "libzmq", "cores", "memory", "shared memory", "disk", "devices"):
        assert re.search(rf"^(ok|-|WARNING)\s+{name}\s", printed, re.MULTILINE), printed


def test_a_good_configuration_has_no_problem(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(small(make_config, network={"control_port": free_port()}), tmp_path / "config")
    before = sorted(tmp_path.rglob("*"))
    assert asyncrl(["doctor", str(file), "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == 0
    found = {finding["what"]: finding for finding in told["findings"]}
    assert {"ports", "run_dir", "model", "host memory", "room to publish", "disk of run_dir", "training rows"} <= set(
        found
    )
    assert found["example"]["details"][0] == "| <|im_start|>user"
    assert "64 of 64 training rows looked at" in found["training rows"]["value"]
    assert [bar.split()[:2] for bar in found["prompt lengths"]["details"]] == [["30", "32"], ["31", "0"], ["32", "32"]]
    assert found["trial"]["value"] == "not made (--quick)"
    assert all(
        set(finding) == {"what", "value", "verdict", "fix", "details", "seconds"} for finding in told["findings"]
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_configuration_that_cannot_be_read_is_the_users_mistake(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(make_config(), tmp_path / "config")
    assert asyncrl(["doctor", str(file), "--quick", "batch.group_sise=4"]) == 2
    assert "batch.group_size" in capsys.readouterr().err
    assert asyncrl(["doctor", str(tmp_path / "nowhere.yaml")]) == 2
    assert asyncrl(["doctor", str(file), str(file)]) == 2


MISTAKES = {
    "template": (
        "data.format_prompt=no.jinja",
        r"template +data.format_prompt is 'no.jinja', but there is no such file",
    ),
    "reward": ("reward.functions=[{function: no.py:f}]", r"reward +reward file .*no.py does not exist"),
    "model": ("model.path=no", r"model +model.path is 'no'.*Fix: Name a Hugging Face model folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_is_one_problem(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    override, expected = MISTAKES[name]
    assert asyncrl(["doctor", str(write_config(make_config(), tmp_path / "config")), override]) == 1
    printed = capsys.readouterr().out
    assert printed.count("PROBLEM") == 1
    assert re.search(rf"PROBLEM {expected}", printed)
    assert "not made: 1 problem(s). Fix: solve the problems above first" in printed


def test_it_warns_of_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = type("Usage", (), {"free": 64 << 20, "total": 64 << 20})()
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: docker)
    (found,) = [finding for finding in all_of(machine.find_machine()) if finding.what == "shared memory"]
    assert (found.verdict, found.value[:26]) == ("warning", "/dev/shm has 64.0 MiB free")
    assert "--shm-size=8g" in found.fix


# --- how checks are run -----------------------------------------------------------------------------


def examined(findings: Findings[Any], deadline_s: float = 5.0) -> tuple[list[Finding], Any]:
    told: list[Finding] = []
    return told, Examination(lambda finding, seconds: told.append(finding)).check("it", findings, deadline_s=deadline_s)


def test_a_check_that_hangs_is_given_up() -> None:
    def hang() -> Findings[int]:
        yield Finding("it", "begins")
        time.sleep(60)
        return 1

    began = time.monotonic()
    told, product = examined(hang(), 0.2)
    assert time.monotonic() - began < 5
    assert product is None
    assert [finding.verdict for finding in told] == ["ok", "problem"]
    assert told[1].value == "was not done after 0.2 s"


@pytest.mark.parametrize(
    ("error", "value", "fix"),
    [
        (UserError("a port is taken. Set another"), "a port is taken", "Set another"),
        (ZeroDivisionError("by 0"), "could not be checked: ZeroDivisionError: by 0", examination._BROKEN),
    ],
)
def test_what_a_check_raises_is_a_problem(error: Exception, value: str, fix: str) -> None:
    def fail() -> Findings[None]:
        yield Finding("it", "begins")
        raise error

    told, _ = examined(fail())
    assert told[1] == Finding("it", value, "problem", fix)


def test_our_messages_are_split_where_the_fix_begins() -> None:
    assert split_fix("it has 1.5 GiB free. Make room. Or not.") == ("it has 1.5 GiB free", "Make room. Or not")
    assert split_fix("no column 'a'. Did you mean b?") == ("no column 'a'", "Did you mean b?")
    assert split_fix("a single sentence") == ("a single sentence", "")
    several = problem("it", UserError("2 problems in it:\n- one. Mend it\n- two"))
    assert (several.value, several.fix, several.details) == ("2 problems in it: one", "Mend it", ("- two",))


# --- run directory, ports, network --------------------------------------------------------------------


def test_a_run_directory_that_is_taken(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    (found,) = all_of(find_run_dir(config))
    assert found.verdict == "ok"
    config.run_path.mkdir()
    (config.run_path / "other.txt").touch()
    (found,) = all_of(find_run_dir(config))
    assert (found.verdict, found.fix) == (
        "problem",
        "There is no run in it to --resume: remove it, or set another run_dir=...",
    )
    (config.run_path / JOURNAL_FILE).touch()
    (found,) = all_of(find_run_dir(config))
    assert (found.verdict, found.fix[:26]) == ("warning", "Continue it with --resume,")


def test_a_learner_at_work_is_named(make_config: MakeConfig) -> None:
    from learner import run_lock

    assert run_lock.LOCK_FILE == LOCK_FILE
    config = make_config()
    config.run_path.mkdir()
    with (config.run_path / LOCK_FILE).open("w+") as lock:
        lock.write("123\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        (found,) = all_of(find_run_dir(config))
    assert found.value == f"a learner (process 123) works in {config.run_path}"
    assert found.verdict == "problem"


def test_a_folder_that_cannot_be_written(make_config: MakeConfig) -> None:
    (found,) = all_of(find_run_dir(make_config().model_copy(update={"run_dir": "/proc/self/run"})))
    assert (found.verdict, found.value[:32]) == ("problem", "nothing can be written in /proc/")


def test_one_port_for_two(make_config: MakeConfig) -> None:
    port = free_port()
    found = all_of(find_ports(make_config(network={"control_port": port, "weights_port": port})))
    assert found[0].value == f"network.control_port and network.weights_port are both {port}"
    assert found[0].fix == "set network.weights_port to another port, or to 0"
    assert found[1].value == f"{port} is free"


def test_keys_and_addresses(make_config: MakeConfig, tmp_path: Path) -> None:
    public = make_config(network={"host": "0.0.0.0"})
    (found,) = all_of(find_network(public))
    assert (found.verdict, found.fix[:28]) == ("problem", "Make keys with `asyncrl keys")
    keys = tmp_path / "keys"
    make_keys(keys)
    config = make_config(network={"host": "0.0.0.0", "keys_dir": str(keys)})
    assert [f.verdict for f in all_of(find_network(config))] == ["ok", "ok"]
    (keys / LEARNER_SECRET).chmod(0o644)
    assert "chmod 600" in next(f for f in all_of(find_network(config)) if f.verdict == "problem").fix
    assert not is_local("192.0.2.1")  # of no machine (RFC 5737)


def test_whether_a_learner_answers(make_config: MakeConfig) -> None:
    with socket.socket() as learner:
        learner.bind(("127.0.0.1", 0))
        learner.listen()
        control, weights = learner.getsockname()[1], free_port()
        config = make_config(network={"control_port": control, "weights_port": weights})
        answers, silent = all_of(network._learner(config))
    assert (answers.verdict, answers.value) == ("ok", f"127.0.0.1:{control} answers")
    assert silent.verdict == "warning"
    assert f"nobody answers at port {weights}: [Errno 111] Connection refused" in silent.value


# --- data ---------------------------------------------------------------------------------------------


def look_at(config: RunConfig, purpose: Purpose = "training") -> tuple[dict[str, Finding], Look]:
    told: list[Finding] = []
    findings = find_prompts(
        config.data, open_train(config.data), purpose, PromptRenderer(config.data), PromptProcessor(config.model)
    )
    look = Examination(lambda finding, seconds: told.append(finding)).check("prompts", findings)
    assert look is not None
    return {finding.what: finding for finding in told}, look


def test_rows_that_would_be_refused_are_counted_by_reason(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}"} for i in range(3)]
    rows += [{"prompt": f"<image> {i}", "images": []} for i in range(4)]
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows)))
    refused = found["refused rows"]
    assert refused.value.startswith("4 of 7 of 7 training rows would be refused (rows.jsonl:")
    assert refused.value.endswith("1 <image> placeholder(s) in the prompt, 0 image(s) in column 'images'")
    assert refused.fix == "Write one <image> per image, or none to put the images first"


def test_rows_that_are_too_long(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = [{"prompt": "q"}, {"prompt": "word " * 100}]
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows)))
    long = found["prompt lengths"]
    longest = re.search(r"to (\d+) tokens", long.value)
    assert long.verdict == "problem"
    assert "1 of 2 of 2 training rows are longer (rows.jsonl:1)" in long.value
    assert longest
    assert long.fix.startswith(f"set data.max_prompt_length={longest[1]}, or data.filter_overlong_prompts")
    assert long.details[-1].endswith("over data.max_prompt_length")
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows, filter_overlong_prompts=True)))
    assert found["prompt lengths"].verdict == "note"


def test_a_template_that_forgets_the_question(make_config: MakeConfig, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("Answer the question.")
    rows = [{"prompt": f"question {i}"} for i in range(3)]
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows, format_prompt=str(template))))
    assert found["template"].verdict == "problem"
    assert "data.format_prompt" in found["template"].fix


def test_held_out_rows_that_are_trained_on(make_config: MakeConfig, tmp_path: Path) -> None:
    _, train = look_at(make_config(data=write_rows(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])))
    _, twin = look_at(make_config(data=write_rows(tmp_path, [{"prompt": "b"}, {"prompt": "c"}])), "held-out")
    (found,) = all_of(find_twins(train, twin))
    assert found.value == "1 of 2 held-out prompts are trained on, too: rows.jsonl:0 is rows.jsonl:1"
    assert found.verdict == "warning"
    _, other = look_at(make_config(data=write_rows(tmp_path, [{"prompt": "c"}])), "held-out")
    assert [finding.verdict for finding in all_of(find_twins(train, other))] == ["ok"]


# --- rewards --------------------------------------------------------------------------------------------


def rewards_of(make_config: MakeConfig, tmp_path: Path, body: str, **reward: Any) -> list[Finding]:
    file = tmp_path / "my_reward.py"
    file.write_text(f"import time\ndef score(sample):\n    {body}\n")
    functions = [{"function": f"{file}:score"}]
    config = make_config(reward={"functions": functions, "workers": 1, **reward})
    return all_of(find_rewards(config, open_train(config.data), PromptRenderer(config.data)))


def test_what_a_reward_gives_for_the_answer_and_for_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    (found,) = rewards_of(make_config, tmp_path, "return float(sample.completion == sample.answer)")
    assert found.value == "score: 1, 1, 1 for the answer; 0, 0, 0 for nothing; 0, 0, 0 for target"


def test_a_reward_that_never_differs(make_config: MakeConfig, tmp_path: Path) -> None:
    _, warning = rewards_of(make_config, tmp_path, "return 0.5")
    assert warning.verdict == "warning"
    assert warning.value == "the weighted sum does not tell the answer or target from nothing"


def test_a_reward_that_hangs_is_named_in_time(make_config: MakeConfig, tmp_path: Path) -> None:
    (found,) = rewards_of(make_config, tmp_path, "time.sleep(60)", timeout_s=0.2)
    assert found.verdict == "problem"
    assert found.value.startswith("reward_timeout on the answer: reward component 'score' was not done after 0.2 s")


# --- the trial ------------------------------------------------------------------------------------------


def test_a_trial_differs_in_size_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        data={"max_response_length": 500, "filter_overlong_prompts": True},
        batch={"prompts_per_step": 8, "tokens_per_microbatch": 4096},
        algorithm={"updates_per_batch": 2},
        network={"host": "192.0.2.1", "insecure": True},
    )
    tiny = trial.smallest(config, tmp_path / "trial")
    assert (tiny.batch.prompts_per_step, tiny.batch.group_size, tiny.data.max_response_length) == (2, 2, 32)
    assert (tiny.data.max_train_rows, tiny.data.max_val_rows, tiny.network.host) == (256, 4, "127.0.0.1")
    for section in ("model", "algorithm", "learner", "rollout", "reward", "alignment", "gpu_memory"):
        assert getattr(tiny, section) == getattr(config, section)
    assert load_config(write_config(tiny, tmp_path / "config")) == tiny


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_trial_runs_the_real_thing_and_leaves_nothing(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    file = write_config(make_config(trainer={"mode": mode}), tmp_path / "config")
    before = sorted(tmp_path.rglob("*"))
    assert asyncrl(["doctor", str(file), "--json"]) == 0
    found = {finding["what"]: finding["value"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["trial"].startswith("2 steps of 1 x 2 completions")
    assert re.match(r"engine and learner differ by at most \S+ nats a token; 0.001", found["log-prob parity"])
    assert re.match(r"0.\d MiB written in \S+ s, over shm in \S+ s, into the engine in \S+ s", found["weight push"])
    assert ("sleep and wake" in found) == (mode == "sync")
    assert re.match(r"\d finished, \d truncated, 0 failed", found["completions"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trial_that_takes_too_long_is_stopped(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "BEYOND_START_S", 0.5)
    began = time.monotonic()
    _, late = all_of(trial.find_by_trial(make_config(network={"start_timeout_s": 0.1})))
    assert time.monotonic() - began < trial.STOP_S
    assert late.verdict == "problem"
    assert late.value.startswith("not done after 0.6 s; it said last: ")
    (folder,) = tmp_path.glob("asyncrl-trial-*")
    assert late.fix == f"look into {folder}: trial.log and run/logs"


@pytest.mark.slow
def test_a_trial_that_goes_wrong_is_kept_and_named(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that only fails on what a policy says."""
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def score(sample):\n    if sample.completion in ('', sample.answer, sample.columns['target']):\n"
        "        return 1.0 * len(sample.completion)\n    raise RuntimeError('what is this?')\n"
    )
    config = make_config(reward={"functions": [{"function": f"{reward}:score"}]})
    assert asyncrl(["doctor", str(write_config(config, tmp_path / "config"))]) == 1
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("PROBLEM")]
    assert re.match(r"PROBLEM \S+ .*RuntimeError: what is this\? \(my_reward.py:4 in score\).*\. Fix: \S+", line), (
        printed
    )
    (folder,) = tmp_path.glob("asyncrl-trial-*")
    assert str(folder) in printed
    assert (folder / "trial.log").is_file()
