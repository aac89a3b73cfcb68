"""`asyncrl doctor`: every check names what it finds, none hangs, and one that fails hides no other."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.launch.ports import free_port
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.lines import WORKING
from asyncrl.memory_plan.plan import make_plan
from asyncrl_plugins.doctor import examine, network
from asyncrl_plugins.doctor.disk import HEADER_BYTES, _written_parts, find_disk, find_run_dir
from asyncrl_plugins.doctor.findings import Finding, Findings, Report
from asyncrl_plugins.doctor.host_memory import PIXELS, host_items
from asyncrl_plugins.doctor.machine import Device
from asyncrl_plugins.doctor.memory import find_memory
from asyncrl_plugins.doctor.network import find_network, find_ports, is_local
from protocol.curve import LEARNER_SECRET
from tests.rigs.curve_keys import make_keys
from tests.rigs.small_runs import small
from tests.rigs.two_processes import write_config

MakeConfig = Callable[..., RunConfig]


# --- the command ----------------------------------------------------------------------------------


def test_a_good_configuration_has_no_problem(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(small(make_config, network={"control_port": free_port()}), tmp_path / "config")
    before = sorted(tmp_path.rglob("*"))
    assert asyncrl(["doctor", str(file), "--quick", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["problems"] == 0
    found = {finding["what"]: finding for finding in printed["findings"]}
    machine = {"python", "asyncrl", "packages", "libzmq", "cores", "memory", "shared memory", "disk", "devices"}
    run = {"ports", "run_dir", "model", "algorithm", "host memory", "room to publish", "disk of run_dir"}
    assert machine | run <= set(found)
    assert "all of them looked at" in found["training rows"]["value"]
    assert found["prompt lengths"]["value"].startswith("26 to 27 tokens, median 26")
    assert found["trial"]["value"] == "not made (--quick)"
    assert all(set(one) == {"what", "value", "verdict", "fix", "details"} for one in found.values())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_configuration_that_cannot_be_read_is_the_users_mistake(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(make_config(), tmp_path / "config")
    assert asyncrl(["doctor", str(file), "--quick", "batch.group_sise=4"]) == 2
    assert "batch.group_size" in capsys.readouterr().err
    assert asyncrl(["doctor", str(file), "--quick", "--json", "batch.group_sise=4", "bad.key=1"]) == 2
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["what"], found["verdict"]) == ("configuration", "problem")
    assert "batch.group_sise" in found["value"]
    assert "bad" in found["details"][0]


def test_one_mistake_is_one_problem(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial is not made where there is a problem."""
    file = write_config(make_config(), tmp_path / "config")
    assert asyncrl(["doctor", str(file), "data.format_prompt=no.jinja"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("PROBLEM") == 1
    assert re.search(r"PROBLEM template +data.format_prompt is 'no.jinja', but there is no such file", printed)
    assert "not made: 1 problem(s). Fix: solve the problems above first" in printed


def test_an_estimator_that_is_not_there_is_a_problem(make_config: MakeConfig) -> None:
    report = Report(as_json=True)
    examine.run_check(report, "algorithm", examine._load_functions(make_config(algorithm={"adv_estimator": "gpro"})))
    (found,) = report.findings
    assert (found.verdict, "Did you mean 'grpo'?" in found.value + found.fix) == ("problem", True)


# --- how checks are run -----------------------------------------------------------------------------


def test_what_a_check_raises_is_a_problem() -> None:
    def fail(error: Exception) -> Findings[None]:
        yield Finding("it", "begins")
        raise error

    for error, found in (
        (UserError("a port is taken. Set another"), Finding("it", "a port is taken", "problem", "Set another")),
        (
            ZeroDivisionError("by 0"),
            Finding("it", "could not be checked: ZeroDivisionError: by 0", "problem", examine._BROKEN),
        ),
    ):
        report = Report(as_json=True)
        assert examine.run_check(report, "it", fail(error)) is None
        assert report.findings[1] == found


# --- run directory, ports, network --------------------------------------------------------------------


def test_a_run_directory_that_is_taken(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    (found,) = list(find_run_dir(config))
    assert found.verdict == "ok"
    config.run_path.mkdir()
    (config.run_path / "other.txt").touch()
    (found,) = list(find_run_dir(config))
    assert (found.verdict, found.fix) == (
        "problem",
        "There is no run in it to --resume: remove it, or set another run_dir=...",
    )
    (config.run_path / JOURNAL_FILE).touch()
    (found,) = list(find_run_dir(config))
    assert (found.verdict, found.fix[:26]) == ("warning", "Continue it with --resume,")


GROUPS_10_GIB = 10 * GIB // (128 * 16 + 4 * (4 + 8 * 17) + 4 * HEADER_BYTES)


@pytest.mark.parametrize(
    ("trainer", "num_rows", "verdict", "named", "lower"),
    [
        ({}, 64, "ok", "1 checkpoint of", ""),
        ({}, None, "note", "not known without its training rows", ""),
        ({"samples_per_step": 0}, 2 * GROUPS_10_GIB, "problem", "a journal of 10.0 GiB", "trainer.keep_samples_gib"),
        ({"max_steps": 999, "save_limit": 998, "save_freq": 1}, 64, "problem", "999 checkpoints", "trainer.save_limit"),
    ],
)
def test_a_run_needs_room_for_what_it_can_write(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    trainer: dict[str, int],
    num_rows: int | None,
    verdict: str,
    named: str,
    lower: str,
) -> None:
    config = make_config(trainer={"max_steps": 0, **trainer})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    (found,) = [found for found in find_disk(config, make_plan(config), num_rows) if found.what == "disk of run_dir"]
    assert (found.verdict, named in found.value) == (verdict, True), found
    fix = f"make room, set run_dir on a larger disk{lower and ', or lower '}{lower}"
    assert found.fix == (fix if verdict == "problem" else "")


def test_ranks_need_room_for_the_parts_of_a_model_that_they_write(make_config: MakeConfig) -> None:
    """Parts, and one file that they are put together in, beside the folder that comes of it."""

    def needed(**sections: Any) -> int:
        config = make_config(**sections)
        return sum(nbytes for _, nbytes, _ in _written_parts(config, make_plan(config), 4))

    ranks = {"engine": "fsdp2", "num_processes": 2}
    lora = {"lora": {"rank": 4}}
    assert needed(learner=ranks) - needed() == 2 * make_plan(make_config()).model.weights
    assert needed(learner=ranks, model=lora) == needed(model=lora)


def test_ports_are_those_of_this_machine(make_config: MakeConfig) -> None:
    """network.host may be a learner that starts later, elsewhere; telemetry.host is this machine's."""
    port = free_port()
    (found,) = list(find_ports(make_config(network={"control_port": port})))
    assert found.value == f"free: {port}"
    with pytest.raises(UserError, match=f"network.control_port and network.weights_port are both {port}"):
        list(find_ports(make_config(network={"control_port": port, "weights_port": port})))
    with pytest.raises(UserError, match="no address of this machine"):
        list(find_ports(make_config(telemetry={"host": "192.0.2.1"})))
    config = make_config(network={"host": "learner.invalid", "insecure": True})
    assert [one.verdict for one in find_ports(config)] == ["ok"]
    _, found, _ = list(find_network(config))
    assert found.verdict == "warning"
    assert found.value.startswith("network.host is learner.invalid, another machine, and port")


def test_keys_and_addresses(make_config: MakeConfig, tmp_path: Path) -> None:
    public = make_config(network={"host": "0.0.0.0"})
    (found,) = list(find_network(public))
    assert (found.verdict, found.fix[:28]) == ("problem", "Make keys with `asyncrl keys")
    keys = tmp_path / "keys"
    make_keys(keys)
    config = make_config(network={"host": "0.0.0.0", "keys_dir": str(keys)})
    assert [f.verdict for f in list(find_network(config))] == ["ok", "ok"]
    (keys / LEARNER_SECRET).chmod(0o644)
    assert "chmod 600" in next(f for f in list(find_network(config)) if f.verdict == "problem").fix
    assert not is_local("192.0.2.1")  # of no machine (RFC 5737)


def test_whether_a_learner_answers(make_config: MakeConfig) -> None:
    with socket.socket() as learner:
        learner.bind(("127.0.0.1", 0))
        learner.listen()
        control, weights = learner.getsockname()[1], free_port()
        config = make_config(network={"control_port": control, "weights_port": weights})
        answers, silent = list(network._learner(config))
    assert (answers.verdict, answers.value) == ("ok", f"127.0.0.1:{control} answers")
    assert silent.verdict == "warning"
    assert f"port {weights} does not answer: [Errno 111] Connection refused" in silent.value


# --- memory -------------------------------------------------------------------------------------------


def test_the_plan_is_compared_with_the_devices_that_are_there(make_config: MakeConfig) -> None:
    config = make_config(learner={"device": "cuda:0"}, rollout={"device": "cuda:0"})
    large, held = Device("large", 80 * GIB, 79 * GIB), Device("held", 80 * GIB, GIB // 2)
    for device, verdict in ((large, "ok"), (held, "warning"), (Device("small", GIB, GIB), "problem")):
        found = {finding.what: finding for finding in find_memory(config, (device,))}
        assert found["memory cuda:0"].verdict == verdict
        assert found["memory cuda:0"].value.startswith("learner and engine at the same time: 1.")
        assert found["host memory"].verdict == "ok"
    ranks = make_config(learner={"engine": "fsdp2", "num_processes": 2**20, "device": "cpu"}, rollout={"device": "cpu"})
    found = {finding.what: finding for finding in find_memory(ranks, ())}["host memory"]
    assert found.verdict == "problem"
    (fewer,) = map(int, re.findall(r"fewer ranks: learner\.num_processes=(\d+) fits", found.fix))
    again = find_memory(changed(ranks, {"learner.num_processes": fewer}), ())
    assert {finding.what: finding for finding in again}["host memory"].verdict != "problem"
    config = make_config(gpu_memory={"budget_gib": 1.3}, learner={"device": "cuda:0"}, rollout={"device": "cuda:0"})
    found = {finding.what: finding for finding in find_memory(config, (large,))}["memory budget"]
    assert found.verdict == "problem"
    assert re.fullmatch(r"Together .* fits: 1.3 GiB", found.fix)


def test_passes_that_may_never_be_so_long_are_no_problem_of_the_host(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(learner={"device": "cpu"}, rollout={"device": "cpu"})
    plan = make_plan(config)
    passes = sum(line.nbytes for phase in plan.phases for line in phase.lines if line.name == WORKING)
    items = sum(phase.nbytes for phase in plan.phases) + sum(item.nbytes for item in host_items(plan))
    pixels = sum(item.nbytes for item in host_items(plan) if item.name == PIXELS)
    for free, verdict in (
        (items, "ok"),
        (items - pixels - passes // 2, "warning"),
        (items - pixels - passes - 1, "problem"),
    ):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free))
        monkeypatch.setattr("asyncrl_plugins.doctor.memory.memory_limit", lambda: None)
        found = {finding.what: finding for finding in find_memory(config, ())}["host memory"]
        assert found.verdict == verdict, (free, found.value)
