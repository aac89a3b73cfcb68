"""docker-compose.yml, .env and the Dockerfile: what can be wrong with them without a container running."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.cli import _parser
from asyncrl.config.load import load_config
from tests.rigs.compose_services import COMPOSE, ROOT, resolved, seconds
from tests.rigs.tiny import GRPO

DOCKERFILE = ROOT / "docker" / "Dockerfile"
OURS = {"prepare", "learner", "rollout_server", "learner_gpu", "rollout_server_gpu"}
COPIED = r"^COPY ((?:[^\s-]\S* )+)\S+$"
"""Instructions that copy from the repository, not from another stage."""
needs_compose = pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return resolved("cpu", "gpu", "sync")["services"]


@needs_compose
def test_services_have_no_privileges_start_again_after_crashes_and_have_time_for_a_checkpoint(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        if name != "grafana":  # its image is of user 472
            assert int(service["user"].partition(":")[0]) > 0, name
        for port in service.get("ports", ()):
            assert name in ("prometheus", "grafana"), "only dashboards are published"
            assert str(port).startswith("127.0.0.1:")
    for name in OURS - {"prepare"}:
        service = services[name]
        assert re.fullmatch(r"on-failure:\d+", service["restart"]), "a finished run stays finished"
        assert seconds(service["stop_grace_period"]) >= 60
        if name.startswith(("learner", "sync")):
            (grace,) = (word for word in service["command"] if word.startswith("trainer.stop_grace_s="))
            assert float(grace.partition("=")[2]) == seconds(service["stop_grace_period"])
        assert service["init"] is True
        assert service["logging"]["options"], "logs of days are bounded"


@needs_compose
def test_health_checks_ask_the_port_that_the_service_serves_and_prometheus_scrapes(
    services: dict[str, dict[str, Any]],
) -> None:
    scraped = {}
    for job in yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())["scrape_configs"]:
        for found in job["dns_sd_configs"]:
            scraped |= dict.fromkeys(found["names"], found["port"])
    for name in OURS - {"prepare"}:
        service = services[name]
        (setting,) = (word for word in service["command"] if re.match(r"telemetry\.\w+_port=", word))
        port = int(setting.partition("=")[2])
        known = {name, *(service["networks"]["asyncrl"] or {}).get("aliases", ())}
        assert {scraped[each] for each in known if each in scraped} == {port}, name
        assert service["healthcheck"]["test"] == ["CMD", "asyncrl", "health", f"http://127.0.0.1:{port}/metrics"]


@needs_compose
def test_commands_are_of_the_cli_and_agree_with_each_other(services: dict[str, dict[str, Any]]) -> None:
    networks = set()
    for name in OURS - {"prepare"}:
        program, command, file, *rest = services[name]["command"]
        assert (program, file) == ("asyncrl", "/runs/demo/config.yaml")
        flags = [word for word in rest if word.startswith("--")]
        assert flags == ["--unattended"]
        _parser().parse_args([command, file, *flags])
        overrides = [word for word in rest if "=" in word]
        config = load_config(GRPO, overrides)
        networks.add((config.network.control_endpoint, config.network.weights_endpoint, config.network.keys_dir))
    assert networks == {("tcp://learner:7601", "tcp://learner:7602", "/run/secrets/keys")}


@needs_compose
def test_servers_read_what_the_learner_publishes_and_write_nothing(services: dict[str, dict[str, Any]]) -> None:
    for name in OURS - {"prepare"}:
        (shared,) = (volume for volume in services[name]["volumes"] if "shm" in str(volume))
        assert (shared["source"], shared["target"]) == ("shm", "/dev/shm"), name
        assert shared["volume"]["nocopy"], "the image's /dev/shm, which is root's, is not its owner and mode"
        assert "ipc" not in services[name], "nobody's namespace: each may start again without the others"
    assert resolved("cpu")["volumes"]["shm"]["driver_opts"]["type"] == "tmpfs"
    assert "runs:/runs:ro" in services["rollout_server"]["volumes"]
    assert "keys:/run/secrets/keys:ro" in services["rollout_server"]["volumes"]
    targets = {secret["target"] for secret in services["rollout_server_gpu"]["secrets"]}
    assert targets == {"keys/learner.public", "keys/server.secret"}, "not the learner's secret"


@needs_compose
def test_images_for_cpus_and_for_gpus_have_names_of_their_own(services: dict[str, dict[str, Any]]) -> None:
    """Compose builds nothing where an image of the name exists."""
    assert set(resolved("cpu")["services"]) == {"prepare", "learner", "rollout_server", "prometheus", "grafana"}
    assert set(resolved("gpu")["services"]) == {"learner_gpu", "rollout_server_gpu", "prometheus", "grafana"}
    built = {name: (services[name]["image"], services[name]["build"]["args"]["DEVICE"]) for name in OURS}
    assert all(image.endswith(f"-{device}") for image, device in built.values()), built
    assert {name for name, (_, device) in built.items() if device == "cuda"} == {"learner_gpu", "rollout_server_gpu"}


@needs_compose
def test_what_the_page_writes_into_dot_env_chooses_gpus_and_the_user_however_often_it_is_run(tmp_path: Path) -> None:
    for name in ("docker-compose.yml", ".env"):
        shutil.copy(ROOT / name, tmp_path)
    edits = re.findall(r"^sed .*$", (ROOT / "docker" / "README.md").read_text(), re.MULTILINE)
    for uid in ("501", "1234"):
        script = "\n".join([f"uid={uid} gid=20", *edits])
        subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
        (profiles,) = re.findall(r"^COMPOSE_PROFILES=(\w+)", (tmp_path / ".env").read_text(), re.MULTILINE)
        learner = resolved(profiles, folder=tmp_path)["services"]["learner_gpu"]
        assert learner["user"] == f"{uid}:20"
        assert "/workspace/config.yaml" in learner["command"]


@needs_compose
def test_one_gpu_is_shared_by_one_container(services: dict[str, dict[str, Any]]) -> None:
    """In two, neither would see whether the other's process lives, which its turn on the device depends on."""
    assert set(resolved("sync")["services"]) == {"sync_gpu", "prometheus", "grafana"}
    sync, learner = services["sync_gpu"], services["learner_gpu"]
    program, command, file, *rest = sync["command"]
    assert (program, command, file) == ("asyncrl", "sync", "/runs/demo/config.yaml")
    _parser().parse_args([command, file, *(word for word in rest if word.startswith("--"))])
    config = load_config(GRPO, [word for word in rest if "=" in word])
    assert config.network.control_endpoint.startswith("tcp://127.0.0.1:")
    assert (config.telemetry.learner_port, config.telemetry.rollout_port) == (9101, 9102)
    assert sync["networks"]["asyncrl"]["aliases"] == ["learner", "rollout_server"]
    for same in ("deploy", "restart", "volumes", "healthcheck", "stop_grace_period"):
        assert sync[same] == learner[same], same
    assert sync["image"] == services["rollout_server_gpu"]["image"], "which has vLLM"


def test_an_edit_of_our_code_leaves_the_layers_of_torch_and_vllm_alone() -> None:
    """The first of two identical installations sees the versions alone, and ends before it would need our code."""
    base, _, *stages = re.split(r"^FROM \S+ AS (?:source|learner|rollout)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"^COPY (.*) \S+$", base, re.MULTILINE)) == {"pyproject.toml", "scripts/install.sh"}
    assert len(stages) == 2
    for stage in stages:
        steps = re.findall(r"^(RUN DEVICE.*|COPY .*)$", stage, re.MULTILINE)
        assert steps[0] == steps[2]
        assert "scripts/install.sh" in steps[0]
        assert steps[1] == "COPY --from=source /app ./"


def test_what_is_compiled_and_downloaded_is_kept_on_a_volume() -> None:
    text = DOCKERFILE.read_text()
    assert "ENV XDG_CACHE_HOME=/caches TRITON_CACHE_DIR=/caches/triton TORCHINDUCTOR_CACHE_DIR=/caches/inductor" in text
    assert re.search(r"chmod 1777 .*/caches ", text), "for whoever Compose names as the user"
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert "caches" in compose["volumes"]
    for name in ("learner_gpu", "gpu_server", "sync_gpu"):
        assert "caches:/caches" in compose["services"][name]["volumes"], name
    for document in yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "asyncrl.yaml").read_text()):
        if document["kind"] == "Job":
            pod = document["spec"]["template"]["spec"]
            assert "/caches" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert "TRITON_CACHE_DIR" in (ROOT / "examples" / "slurm" / "train.sbatch").read_text()


def test_every_variable_is_explained_in_dot_env() -> None:
    text = re.sub(r"#.*$", "", (ROOT / "docker-compose.yml").read_text(), flags=re.MULTILINE)
    used = set(re.findall(r"\$\{([A-Z_]+)", text))
    explained = set(re.findall(r"^#? ?([A-Z_]+)=", (ROOT / ".env").read_text(), re.MULTILINE))
    assert used - explained == set()
    assert explained - used == {"COMPOSE_PROFILES"}


def test_the_images_are_lean_and_copy_what_is_there() -> None:
    text = DOCKERFILE.read_text()
    for source in re.findall(COPIED, text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name
    learner, rollout = text.split("FROM base AS learner")[1].split("FROM base AS rollout")
    assert "WITH_VLLM" not in learner
    assert "deepspeed" not in rollout
    for stage in (learner, rollout):
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE) == ["1000:1000"]
        # Compose may name another user, who is in no passwd file: caches need a folder, torch's the name of a user.
        assert re.findall(r"^ENV HOME=(\S+) USER=\S+$", stage, re.MULTILINE) == ["/home/asyncrl"]
    assert re.search(r"chmod 1777 .*/home/asyncrl$", text, re.MULTILINE)


def test_builders_are_sent_what_the_images_copy_and_no_keys() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    copied = re.findall(COPIED, DOCKERFILE.read_text(), re.MULTILINE)
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(" ".join(copied).split())
    assert {"/keys/", "/workspace/", "/models/"} <= set((ROOT / ".gitignore").read_text().splitlines())


def test_the_dockerfile_has_no_findings() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@needs_compose
def test_the_pages_learner_of_two_ranks_has_two_gpus(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docker" / "README.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "learner_gpu" in block)
    override = tmp_path / "docker-compose.override.yml"
    override.write_text(block)
    files = f"{ROOT / 'docker-compose.yml'}:{override}"
    learner = resolved("gpu", COMPOSE_FILE=files)["services"]["learner_gpu"]
    devices = learner["deploy"]["resources"]["reservations"]["devices"]
    assert sorted(number for device in devices for number in device["device_ids"]) == ["0", "1"]
