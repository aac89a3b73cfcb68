"""docker-compose.yml's services, run as processes with a real Prometheus: start, crash, stop, continue, end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.recorder import read_status
from asyncrl_plugins.prometheus.learner_metrics import METRICS as LEARNER
from asyncrl_plugins.prometheus.metric_set import MetricSet
from asyncrl_plugins.prometheus.server_metrics import ENVIRONMENT
from tests.rigs.compose_services import COMPOSE, Container, image_commands, resolved
from tests.rigs.ports import own_port
from tests.rigs.prometheus_server import PROMETHEUS, Prometheus
from tests.rigs.tiny import GRPO, ROOT
from tests.rigs.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed"),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed"),
]
DASHBOARDS = ROOT / "docker" / "grafana" / "dashboards"
NO_END = 100_000
"""Steps of the run until it is told to end."""
LAST_STEPS = 12
"""Steps after the run has been stopped and continued, with an evaluation and a checkpoint among them."""
NOT_OURS = 1e30
"""Value of a neighbour's gauges on the same Prometheus, which no panel of ours may show."""
GRACE_S = 30.0
"""Stopping should take no longer, whatever Compose allows."""
OF_ENVIRONMENTS = re.compile(r"asyncrl_rollout_(turns_|limited_|environment_)")
"""Metrics that have series where there is an environment, which this run has not."""
MOST_SERIES = 1000
"""Time series of one process."""


class Stack:
    """`docker compose up --scale rollout_server=2`."""

    def __init__(self, folder: Path, model: Path, data: Path):
        _write_demo(folder / "runs" / "demo", model, data)
        services = resolved("cpu", ASYNCRL_DEMO="quick")["services"]
        bin = image_commands(folder / "bin")
        ports = {name: own_port() for name in ("7601", "7602", "9101", "server 1", "server 2", "prometheus")}
        replaced = {
            "/runs": str(folder / "runs"),
            "/run/secrets/keys": str(folder / "keys"),
            "network.host=learner": "network.host=127.0.0.1",
            "telemetry.host=0.0.0.0": "telemetry.host=127.0.0.1",
            "telemetry.linger_s=15": "telemetry.linger_s=7",  # two scrapes of this Prometheus
            **{number: str(ports[number]) for number in ("7601", "7602", "9101")},
        }
        self.run = folder / "runs" / "demo" / "grpo"
        self.prepare = Container(services["prepare"], replaced, bin, folder / "prepare.log")
        self.learner = Container(services["learner"], replaced, bin, folder / "learner.log")
        self.servers = [
            Container(
                services["rollout_server"], {**replaced, "9102": str(ports[f"server {n}"])}, bin, folder / f"{n}.log"
            )
            for n in (1, 2)
        ]
        self.neighbour = MetricSet(LEARNER, "learner", run="runs/of-somebody-else")
        for metric in LEARNER:
            if metric.kind == "gauge" and not metric.labels and "residual" not in metric.name:
                self.neighbour[metric.name].set(NOT_OURS)
        self.prometheus = Prometheus(
            folder / "prometheus",
            {
                "learner": [ports["9101"], self.neighbour.serve("127.0.0.1", 0)],
                "rollout_server": [ports["server 1"], ports["server 2"]],
            },
            ports["prometheus"],
            services["prometheus"]["command"],
        )

    @property
    def containers(self) -> list[Container]:
        return [self.learner, *self.servers]

    def step(self) -> int:
        return read_status(self.run).get("step", 0)

    def end_at(self, step: int) -> None:
        """Change the configuration that the learner reads when it starts."""
        file = self.run.parent / "config.yaml"
        file.write_text(dump_config(load_config(file, [f"trainer.max_steps={step}"])))

    def close(self) -> None:
        for container in (self.prepare, *self.containers):
            container.kill()
        self.prometheus.close()
        self.neighbour.close()


def _write_demo(folder: Path, model: Path, data: Path) -> None:
    """What asyncrl.demo.prepare would write, for a smaller model; tests/system/test_demo.py runs that."""
    small = [
        *(f"run_dir={folder}/grpo", f"model.path={model}"),
        *(f"data.train_files=[{data}/rl.parquet]", f"data.val_files=[{data}/eval.parquet]", "data.max_val_rows=4"),
        *("data.max_response_length=8", "batch.prompts_per_step=4", "batch.group_size=4"),
        *(f"trainer.max_steps={NO_END}", "trainer.save_freq=10", "evaluation.every_steps=10"),
        f"reward.functions=[{{function: {ROOT}/tests/rigs/short_reward.py:slowly}}]",
    ]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_config(GRPO, small)))


@pytest.fixture
def stack(tmp_path: Path, tiny_model: Path, digits_data: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, tiny_model, digits_data)
    try:
        yield stack
    finally:
        stack.close()


def test_the_whole_stack_through_crash_stop_and_end(stack: Stack, tmp_path: Path) -> None:
    made = (tmp_path / "runs" / "demo" / "config.yaml").stat().st_mtime_ns
    assert stack.prepare.run(timeout_s=60) == 0, (tmp_path / "prepare.log").read_text()[-3000:]
    assert (tmp_path / "runs" / "demo" / "config.yaml").stat().st_mtime_ns == made, "a prepared demo is kept"

    assert not any(container.is_healthy() for container in stack.containers), "their endpoints are not there yet"
    for container in (*stack.servers, stack.learner):  # in any order
        container.start()
    for container in (stack.learner, *stack.servers):
        wait_until(container.is_healthy, "health", tmp_path, timeout_s=120)
    wait_until(stack.prometheus.is_ready, "Prometheus", tmp_path / "prometheus")

    wait_until(lambda: stack.step() >= 6, "six steps", tmp_path, timeout_s=120)
    killed = stack.servers[0].process
    assert killed is not None
    killed.kill()
    wait_until(lambda: stack.servers[0].exits == [-9], "the crash")

    wait_until(lambda: stack.step() >= 14, "steps after the crash", tmp_path, timeout_s=120)
    first, killed_at = stack.learner.process, stack.step()
    assert first is not None
    first.kill()
    wait_until(lambda: stack.learner.exits == [-9] and stack.learner.process is not first, "a restart", tmp_path)
    wait_until(lambda: stack.step() > killed_at + 8, "the run that was killed", tmp_path, timeout_s=120)
    wait_until(lambda: stack.prometheus.value("count(up == 1)") == 4, "all to be scraped", tmp_path, timeout_s=60)
    wait_until(
        lambda: bool(stack.prometheus.query("asyncrl_learner_parity_max")), "a server that was compared", tmp_path
    )
    running_at = time.time()

    assert stack.learner.stop() < GRACE_S
    assert stack.learner.process is not None
    assert stack.learner.process.returncode == 130, (tmp_path / "learner.log").read_text()[-3000:]
    last = stack.step() + LAST_STEPS
    stack.end_at(last)
    stack.learner.start()
    wait_until(lambda: stack.step() == last, "the last step", tmp_path, timeout_s=120)
    wait_until(lambda: stack.prometheus.value("asyncrl_learner_stopped == 1") == 1, "the end", tmp_path)
    finished_at = time.time()
    _assert_every_panel_shows_something_of_this_run_alone(stack, running_at, finished_at)
    _assert_alerts_are_quiet(stack.prometheus, finished_at)
    for job in ("learner", "rollout_server"):
        assert (stack.prometheus.value(f'max(count by (instance) ({{job="{job}"}}))') or MOST_SERIES) < MOST_SERIES, job

    wait_until(lambda: all(c.exits and c.exits[-1] == 0 for c in stack.containers), "orderly ends", tmp_path)
    assert all(c.process is not None and c.process.poll() == 0 for c in stack.containers), "nobody starts again"
    again = Container(stack.learner.service, stack.learner.replaced, stack.learner.bin, tmp_path / "again.log")
    assert again.run(timeout_s=60) == 0
    assert "finished" in (tmp_path / "again.log").read_text()
    _assert_every_prompt_once(stack.run, last)


def _queries() -> list[tuple[str, str]]:
    """Titles of all panels, and PromQL."""
    boards = [json.loads(file.read_text()) for file in DASHBOARDS.glob("*.json")]
    return [
        (f"{board['title']}: {inner['title']}", target["expr"].replace("$__rate_interval", "1m"))
        for board in boards
        for panel in board["panels"]
        for inner in (panel, *panel.get("panels", ()))
        for target in inner.get("targets", ())
    ]


def _assert_every_panel_shows_something_of_this_run_alone(stack: Stack, *moments: float) -> None:
    """Some of what it shows is there only while servers are, some only after an evaluation."""
    queries = [(title, expression.replace("$run", str(stack.run))) for title, expression in _queries()]
    assert len(queries) > 100
    shown = {query: [s for at in moments for s in stack.prometheus.query(query[1], at)] for query in queries}
    empty = [query for query, series in shown.items() if not series]
    assert [query for query in empty if not OF_ENVIRONMENTS.search(query[1])] == []
    blended = [query for query, series in shown.items() if any(float(s["value"][1]) > NOT_OURS / 2 for s in series)]
    assert blended == []


def _assert_alerts_are_quiet(prometheus: Prometheus, at: float) -> None:
    """Assert that no alert fires, and that what the rules look at is there."""
    rules = prometheus.alerts()
    assert [name for name, rule in rules.items() if rule["health"] != "ok"] == []
    assert [name for name, rule in rules.items() if rule["state"] == "firing"] == []
    names = {name for rule in rules.values() for name in re.findall(r"asyncrl_[a-z_]+|\bup\b", rule["query"])}
    # Where a run has no environment, as this one, these metrics are not there; promtool tests their rules.
    of_environments = {metric.name for metric in ENVIRONMENT}
    assert len(names - of_environments) > 15
    assert [name for name in sorted(names - of_environments) if not prometheus.query(name, at)] == []


def _assert_every_prompt_once(run: Path, last: int) -> None:
    steps: list[dict[str, Any]] = read_lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, last + 1))
    assert {step["ledger_residual"] for step in steps} == {0}
