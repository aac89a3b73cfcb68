"""The files in examples/slurm, kubernetes and skypilot: what can be known of them without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from asyncrl.config.keys import all_keys
from asyncrl.config.load import load_config
from asyncrl.errors import ExitCode
from tests.rigs.tiny import GRPO
from tests.rigs.waiting import wait_until

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "slurm"
KUBERNETES = ROOT / "examples" / "kubernetes" / "asyncrl.yaml"
AUTOSCALED = KUBERNETES.with_name("autoscaled-rollout.yaml")
STAND_IN = """#!/bin/bash
echo "$CUDA_VISIBLE_DEVICES $*" >> "$CALLS"
[ "$1" = learn ] && exit "${LEARNER_CODE:-0}"
starts=$(grep -c "^$CUDA_VISIBLE_DEVICES rollout" "$CALLS")
[ -n "${SERVER_CODE:-}" ] && [ "$starts" -le "${TIMES:-99}" ] && exit "$SERVER_CODE"
[ -n "${THEN:-}" ] && exit "$THEN"
sleep 30 & wait $!
"""


def documents(file: Path = KUBERNETES) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def container(document: dict[str, Any]) -> dict[str, Any]:
    [only] = document["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("file", [KUBERNETES, AUTOSCALED], ids=lambda file: file.stem)
def test_manifests_are_what_kubernetes_takes(file: Path) -> None:
    for document in documents(file):
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_the_autoscaler_scales_the_servers_on_a_metric_that_they_have() -> None:
    deployment, scaler = documents(AUTOSCALED)
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (deployment["kind"], deployment["metadata"]["name"])
    pods = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    of_job = documents()[2]["spec"]["template"]
    assert pods == {**of_job, "spec": {key: value for key, value in of_job["spec"].items() if key != "restartPolicy"}}
    (rule,) = yaml.safe_load(AUTOSCALED.with_name("prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["name"]["as"] == scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert rule["seriesQuery"].partition("{")[0] in (ROOT / "docs" / "metrics.md").read_text()


def test_the_manifest_has_a_service_a_learner_and_servers() -> None:
    service, learner, servers = documents()
    assert [document["kind"] for document in (service, learner, servers)] == ["Service", "Job", "Job"]
    assert service["spec"]["clusterIP"] == "None"
    labels = learner["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert {port["port"] for port in service["spec"]["ports"]} == {7601, 7602, 9101}
    assert f"network.host={service['metadata']['name']}" in container(servers)["command"]


@pytest.mark.parametrize("number", [1, 2])
def test_jobs_name_keys_that_exist_and_do_not_repeat_what_cannot_succeed(number: int) -> None:
    document = documents()[number]
    rule = document["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [ExitCode.USER_ERROR], "after bad state --unattended decides"
    assert rule["onExitCodes"]["containerName"] == container(document)["name"]
    spec = document["spec"]["template"]["spec"]
    assert spec["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    overrides = [word for word in container(document)["command"] if "=" in word]
    assert {word.partition("=")[0] for word in overrides} <= set(all_keys())
    assert {mount["name"] for mount in container(document)["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
    assert spec["securityContext"]["runAsNonRoot"]
    secret = next(volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys")
    assert secret["defaultMode"] & 0o007 == 0, "asyncrl refuses a secret key that everybody can read"


@contextmanager
def running_node(folder: Path, node: int, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """node.sh with a stand-in for asyncrl, which writes calls-NODE."""
    stand_in = folder / "asyncrl"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    calls = folder / f"calls-{node}"
    calls.touch()
    environment = {
        **os.environ,
        "ASYNCRL": str(stand_in),
        "CONFIG": "my.yaml",
        "LEARNER_NODE": "node-a",
        "CALLS": str(calls),
        "CONTROL_PORT": "7601",
        "WEIGHTS_PORT": "7602",
        "KEYS": "keys",
        "FIRST_METRICS_PORT": "9102",
        "SLURM_NODEID": str(node),
        "SLURM_GPUS_ON_NODE": "3",
        **variables,
    }
    process = subprocess.Popen(["bash", str(SLURM / "node.sh"), "run_dir=runs/mine"], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_node(folder: Path, node: int, **variables: str) -> tuple[int, list[str]]:
    """Its exit code, and what was started."""
    with running_node(folder, node, **variables) as process:
        code = process.wait(timeout=20)
    return code, sorted((folder / f"calls-{node}").read_text().splitlines())


def test_the_first_node_has_the_learner_and_its_exit_code(tmp_path: Path) -> None:
    code, calls = run_node(tmp_path, 0, LEARNER_CODE="3", SERVER_CODE="0")
    network = "network.host=node-a network.control_port=7601 network.weights_port=7602 network.keys_dir=keys"
    learner = f"0 learn my.yaml --unattended {network} run_dir=runs/mine"
    assert code == 3
    assert learner in calls
    assert set(calls) <= {
        learner,
        f"1 rollout my.yaml {network} telemetry.rollout_port=9103 run_dir=runs/mine",
        f"2 rollout my.yaml {network} telemetry.rollout_port=9104 run_dir=runs/mine",
    }


def test_a_learner_of_several_ranks_has_as_many_gpus(tmp_path: Path) -> None:
    code, calls = run_node(tmp_path, 0, LEARNER_GPUS="2", SERVER_CODE="0")
    assert code == 0
    (learner,) = (call for call in calls if " learn " in call)
    assert learner.startswith("0,1 learn my.yaml --unattended ")
    assert learner.endswith(" learner.num_processes=2 run_dir=runs/mine"), "the configuration's engine is left to it"
    assert "learner.engine" not in learner
    assert {call.split()[0] for call in calls if " rollout " in call} <= {"2"}


def test_an_array_job_has_servers_alone_on_the_gpus_that_it_was_given(tmp_path: Path) -> None:
    mine = {"CUDA_VISIBLE_DEVICES": "5,7", "SLURM_GPUS_ON_NODE": "2", "FIRST_METRICS_PORT": "9110"}
    code, calls = run_node(tmp_path, 0, LEARNER_GPUS="0", SERVER_CODE="0", **mine)
    assert code == 0
    assert [(call.split()[:2], call.split()[-2]) for call in calls] == [
        (["5", "rollout"], "telemetry.rollout_port=9110"),
        (["7", "rollout"], "telemetry.rollout_port=9111"),
    ]


def test_machines_of_skypilot_have_the_roles_of_a_slurm_job(tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "examples" / "skypilot" / "train.yaml").read_text())
    said = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    stand_in, calls = tmp_path / "asyncrl", tmp_path / "calls"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, **task["envs"], **said, "PATH": path, "CALLS": str(calls), "SERVER_CODE": "0"}
    subprocess.run(["bash", "-c", task["run"]], env=environment, cwd=ROOT, check=True, timeout=20)
    assert sorted(line.split()[:4] for line in calls.read_text().splitlines()) == [
        [gpu, "rollout", "my_run.yaml", "network.host=10.0.0.5"] for gpu in ("0", "1")
    ]


def test_the_manifests_ranks_are_words_that_a_learner_takes() -> None:
    words = re.findall(r"^ *# - (learner\.\S+)$", KUBERNETES.read_text(), re.MULTILINE)
    learner = load_config(GRPO, words).learner
    assert (learner.engine, learner.num_processes) == ("fsdp2", 4)


def test_other_nodes_have_a_server_per_gpu(tmp_path: Path) -> None:
    code, calls = run_node(tmp_path, 1, SERVER_CODE="1")
    assert code == 0, "a server that crashes is missed by nobody"
    assert [call.split()[:2] for call in calls] == [["0", "rollout"], ["1", "rollout"], ["2", "rollout"]]
    assert run_node(tmp_path, 1, SERVER_CODE="2")[0] != 0, "one that is misconfigured ends the job"


def test_a_server_whose_learner_did_not_come_in_time_is_started_again(tmp_path: Path) -> None:
    late = {"SERVER_CODE": str(ExitCode.BAD_STATE.value), "TIMES": "2", "RESTART_DELAY": "0"}
    code, calls = run_node(tmp_path, 1, **late, THEN="0")
    assert code == 0
    assert [call.split()[0] for call in calls] == [*"000111222"]


def test_a_server_on_a_node_ends_with_the_job(tmp_path: Path) -> None:
    began = time.monotonic()
    with running_node(tmp_path, 1, SLURM_GPUS_ON_NODE="1") as node:
        calls = tmp_path / "calls-1"
        wait_until(lambda: bool(calls.read_text()), "a server", tmp_path)
        started = [child for child in psutil.Process(node.pid).children(recursive=True) if _serves(child)]
        assert started
        node.terminate()
        node.wait(timeout=10)
        assert not psutil.wait_procs(started, timeout=10)[1]
    assert time.monotonic() - began < 20


def _serves(process: psutil.Process) -> bool:
    """The stand-in, or for a moment what it forks."""
    try:
        return "rollout" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_slurm_scripts_are_bash_and_name_keys_that_exist() -> None:
    for script in SLURM.iterdir():
        subprocess.run(["bash", "-n", str(script)], check=True)
        for word in script.read_text().split():
            name, equals, _ = word.lstrip("(").partition("=")
            if equals and name.startswith(("network.", "telemetry.", "learner.")):
                assert name in all_keys(), word
