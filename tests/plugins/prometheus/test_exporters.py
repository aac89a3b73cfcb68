"""Scrapes of each service: every value is the one that was said or is there to be looked at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal.writer import Journal
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.timeline import WaitClock
from asyncrl_plugins.prometheus.learner import MOST_SERVERS, PrometheusLearner
from asyncrl_plugins.prometheus.learner_metrics import GAUGE_OF_RECORD, GAUGE_OF_STALENESS_RECORD, PERCENTILE_OF_RECORD
from asyncrl_plugins.prometheus.learner_metrics import METRICS as LEARNER
from asyncrl_plugins.prometheus.metric_set import Metric
from asyncrl_plugins.prometheus.server import PrometheusServer
from asyncrl_plugins.prometheus.server_metrics import METRICS as ROLLOUT
from learner import training_loop
from learner.groups.ticket import ReceivedGroup
from learner.network.servers import ModelFacts
from learner.network.thread import NetworkThread
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from learner.training.batch import Batch
from learner.training.step import NotFiniteError
from protocol.messages import (
    FinishReason,
    GroupTimings,
    ServerHeartbeat,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
    WeightsLoaded,
)
from rollout_server.engines.base import EngineUsage
from tests.rigs.journal_groups import throwaway_journal
from tests.rigs.ports import own_port
from tests.system.test_bad_input import check_busy_port
from tests.unit.learner.test_step import one_step
from tests.unit.learner.test_tickets import issue, prepared, received

CPU = torch.device("cpu")
NOWHERE = TelemetryConfig(learner_port=0, rollout_port=0)
Values = dict[tuple[str, str], float]
"""(name without the service's prefix, labels as `name=value`) -> value."""


def scrape(registry: CollectorRegistry) -> Values:
    values: Values = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            values[short(sample.name), labels] = sample.value
    return values


def single_gauges(table: tuple[Metric, ...], values: Values) -> dict[str, float]:
    """Gauges without labels that have a series."""
    names = {short(metric.name) for metric in table if metric.kind == "gauge" and not metric.labels}
    return {name: values[name, ""] for name in names if (name, "") in values}


def short(name: str) -> str:
    return name.removeprefix("asyncrl_learner_").removeprefix("asyncrl_rollout_")


def by_label(values: Values, name: str) -> dict[str, float]:
    """Label (`name=value`) -> value of the series of one metric."""
    return {label: value for (metric, label), value in values.items() if metric == name}


class Rig:
    """A learner's exporter with a ledger and a network thread that is never started."""

    def __init__(self, config: RunConfig, folder: Path):
        network = config.network.model_copy(update={"control_port": own_port(), "weights_port": own_port()})
        self.folder = folder
        self.exporter = PrometheusLearner(config.telemetry, run="run")
        journal = Journal(folder / "journal.sqlite")
        self.ledger = TicketLedger(journal, prompts_per_step=2, bound=1, total_groups=20, on_stale="drop")
        self.network = NetworkThread(
            config.model_copy(update={"network": network}).network_settings,
            "run",
            ledger=self.ledger,
            write_ticket=prepared,
            publication=cast(Any, SimpleNamespace(nbytes=4096)),
            facts=ModelFacts("model", "processor", 9),
            version=0,
        )
        self.waits = WaitClock()

    def watch(self) -> None:
        about = {"device": CPU, "is_asleep": lambda: False, "run_path": self.folder, "step": 4, "total_steps": 50}
        self.exporter.watch(self.network, self.ledger, self.waits, **about)

    def scrape(self) -> Values:
        return scrape(self.exporter.registry)

    def welcome(self, server_id: str, *, max_groups: int = 8, aligned: bool = True) -> None:
        server: Any = SimpleNamespace(hello=SimpleNamespace(max_groups=max_groups), aligned=aligned)
        self.network.servers.connected[server_id] = server

    def one_group(self, version: int) -> Batch:
        return batch_of(received(issue(self.ledger, version)[0]))

    def close(self) -> None:
        self.exporter.close()
        self.network.stop(None)
        self.ledger.journal.close()


@pytest.fixture
def starting(make_config: Callable[..., RunConfig], tmp_path: Path) -> Iterator[Rig]:
    """A rig whose exporter answers already, and has nothing to look at."""
    made = Rig(make_config(), tmp_path)
    yield made
    made.close()


@pytest.fixture
def rig(starting: Rig) -> Rig:
    starting.watch()
    return starting


# --- nothing yet ---------------------------------------------------------------------------------------

READ_AT_SCRAPES = {short(metric.name) for metric in LEARNER if metric.set_on_scrape}


def test_a_gauge_of_the_learner_without_a_value_is_nan(starting: Rig) -> None:
    before = single_gauges(LEARNER, starting.scrape())
    assert all(map(math.isnan, before.values()))
    assert not before.keys() & READ_AT_SCRAPES, "a residual that is NaN is not 0: it would raise an alert"
    starting.watch()
    known = {name for name, value in single_gauges(LEARNER, starting.scrape()).items() if not math.isnan(value)}
    assert known == {*READ_AT_SCRAPES, "step", "total_steps"}


def test_a_gauge_of_the_server_without_a_value_is_nan(server: PrometheusServer) -> None:
    values = single_gauges(ROLLOUT, scrape(server.metrics.registry))
    assert {name for name, value in values.items() if not math.isnan(value)} == {"rss_bytes"}, "loading is no silence"


# --- the learner: a step ---------------------------------------------------------------------------------

VALUES = {name: 0.01 * number for number, name in enumerate(GAUGE_OF_RECORD, 1)}
STALE = {name: 0.1 * number for number, name in enumerate(GAUGE_OF_STALENESS_RECORD, 1)}
TIMES = {"step_s": 4.0, "wait_s": 1.0, "learn_s": 2.0, "publish_s": 0.2}


def record(**changed: float) -> dict[str, float]:
    values = VALUES | TIMES | {f"staleness_2/{name}": value for name, value in STALE.items()}
    values |= {"tokens": 640.0, "rows/finished": 7.0, "rows/error": 1.0, "reward/mean": 0.5, "reward/short": 0.75}
    values |= {"rank_busy_s/0": 1.5, "rank_busy_s/1": 1.25, "rank_tokens/1": 320.0, "rank_peak_gib/1": 0.5}
    return values | {"ratio/p01": 0.8, "ratio/p50": 1.01, "ratio/p99": 1.3} | changed


def batch_of(*groups: ReceivedGroup) -> Batch:
    nothing, versions = torch.zeros(0), np.concatenate([item.group.versions for item in groups])
    columns = {field.name: nothing for field in fields(Batch)}
    return Batch(**{**columns, "received": groups, "train_groups": (), "versions": versions})  # type: ignore[arg-type]


def stale_batch() -> Batch:
    """Tokens of versions 4, 6 and 5, 6, 6, whose last is not trained."""
    slots = TicketLedger(throwaway_journal(), prompts_per_step=2, bound=1, total_groups=2).admissible(0)
    first, second = received(prepared(slots[0]), 4, 6), received(prepared(slots[1]), 5, 6, 6)
    source = np.asarray([0, 0, 1], np.uint8)
    return batch_of(first, replace(second, group=second.group.model_copy(update={"source": source})))


def test_a_steps_numbers_are_in_the_gauges_of_their_names(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl_plugins.prometheus.learner.peak_flops", lambda device: 200.0)
    rig.exporter.step(9, 6, record(), stale_batch())
    values = rig.scrape()
    shown = {name: values[gauge, ""] for name, gauge in GAUGE_OF_RECORD.items() if name != "length_bias"}
    assert shown == {name: value for name, value in VALUES.items() if name != "length_bias"}  # that is the ledger's
    counted = {"step": 9, "policy_version": 7, "steps_total": 1, "tokens_total": 640, "groups_consumed_total": 2}
    assert {name: values[name, ""] for name in counted} == counted
    assert values["mfu", ""] == pytest.approx(VALUES["model_flops_per_s"] / 200)
    assert by_label(values, "reward") == {"component=mean": 0.5, "component=short": 0.75}
    assert by_label(values, "rank_busy_seconds") == {"rank=0": 1.5, "rank=1": 1.25}
    assert (by_label(values, "rank_tokens"), by_label(values, "rank_peak_bytes")) == (
        {"rank=1": 320},
        {"rank=1": 2**29},
    )
    for name in ("rows", "trajectories_total"):
        assert by_label(values, name) == {"status=finished": 7, "status=error": 1}
    for name in ("step", "wait", "learn", "publish"):
        assert (values[f"{name}_seconds_count", ""], values[f"{name}_seconds_sum", ""]) == (1, TIMES[f"{name}_s"])
    assert by_label(values, "ratio") == {"percentile=p01": 0.8, "percentile=p50": 1.01, "percentile=p99": 1.3}
    for name, metric in GAUGE_OF_STALENESS_RECORD.items():
        assert values[metric, "staleness=2"] == STALE[name]
        assert math.isnan(values[metric, "staleness=1"])
    for name, expected in (
        ("token", [2, 3, 4]),  # 2, 0 and 1, 0
        ("group", [0, 1, 2]),  # 2 and 1
    ):
        cumulative = [values[f"{name}_staleness_versions_bucket", f"le={v}.0"] for v in range(len(expected))]
        assert cumulative == expected, name


def test_what_the_last_step_does_not_know_is_not_what_an_earlier_one_knew(rig: Rig) -> None:
    rig.exporter.step(1, 0, record(), rig.one_group(0))
    none_scored = record()
    for name in ("accuracy", "reward/mean", "reward/short"):
        del none_scored[name]
    rig.exporter.step(2, 1, none_scored, rig.one_group(1))
    values = rig.scrape()
    assert math.isnan(values["accuracy", ""])
    assert by_label(values, "reward") == {}
    assert values["entropy", ""] == VALUES["entropy"]
    assert math.isnan(values["mfu", ""]), "the peak of a CPU is not known"


def test_a_learner_that_comes_back_knows_the_evaluations_before_it(
    rig: Rig, make_config: Callable[..., RunConfig]
) -> None:
    config = make_config()
    recorder = RunRecorder(config.run_path)
    for step, accuracy in ((0, 0.5), (2, 0.9), (4, float("nan")), (6, 0.7), (8, 0.99)):
        counted = {"rows": 16, "errors": 1, "seconds": step + 0.5}
        recorder.evaluation({"step": step, "version": step, "accuracy": accuracy, "reward": accuracy / 2, **counted})
    processor: Any = None
    reporter = Reporter(
        recorder,
        rig.network,
        rig.ledger,
        processor,
        rig.exporter,
        total_steps=50,
        trainer=config.trainer,
        accuracy="",
        group_size=1,
        has_turns=False,
    )
    reporter.truncate_after(6, made_again=7)
    values = rig.scrape()
    assert (values["held_out_accuracy", ""], values["held_out_reward", ""]) == (0.7, 0.35)
    assert (values["held_out_best", ""], values["held_out_rows", ""]) == (0.9, 15), "the one after step 7 was forgotten"
    assert values["held_out_seconds", ""] == 6.5
    reporter.close()


def test_the_best_accuracy_is_of_evaluations_that_the_last_one_compares_with(rig: Rig) -> None:
    """A reward that was changed under `--accept-changes` begins anew."""
    for accuracy, changes in ((0.9, 0), (0.5, 1), (0.4, 1)):
        rig.exporter.evaluated({"accuracy": accuracy, "scoring_changes": changes})
    assert rig.scrape()["held_out_best", ""] == 0.5


def test_a_step_reports_every_diagnostic_that_has_a_gauge_also_by_staleness(
    make_config: Callable[..., RunConfig],
) -> None:
    metrics, _, _ = one_step(make_config())
    buckets = {key.partition("/")[0] for key in metrics if key.startswith("staleness_")}
    assert buckets == {"staleness_1", "staleness_2", "staleness_3"}  # made up at versions 0 to 2, trained at 3
    names = {"loss", "entropy", "ess", "mismatch_kl_k1", "mismatch_kl_k3", "ratio_max", "logprob_diff_max"}
    names |= {"mask_fraction", "truncation_fraction", "clip_fraction"}
    assert names <= GAUGE_OF_RECORD.keys() & metrics.keys()
    assert {f"staleness_2/{name}" for name in GAUGE_OF_STALENESS_RECORD} <= metrics.keys()
    assert PERCENTILE_OF_RECORD.keys() <= metrics.keys()


def test_a_step_that_gives_up_is_counted_and_its_number_is_no_longer_the_last_finite_one(rig: Rig) -> None:
    def learn(groups: Any) -> Any:
        raise NotFiniteError("loss", "it is nan")

    rig.exporter.step(1, 0, record(entropy=math.nan), rig.one_group(0))
    counted = {"number=loss": 0.0, "number=grad_norm": 0.0, "number=entropy": 1.0}
    assert by_label(rig.scrape(), "not_finite_total") == counted
    learner: Any = SimpleNamespace(
        progress=SimpleNamespace(version=1), training=SimpleNamespace(learn=learn), exporter=rig.exporter
    )
    with pytest.raises(BadStateError, match="it is nan"):
        training_loop._learn(learner, [], 0.0, publish=True)
    values = rig.scrape()
    assert by_label(values, "not_finite_total") == counted | {"number=loss": 1.0}
    assert math.isnan(values["loss", ""])


# --- the learner: at a scrape ----------------------------------------------------------------------------


def fill(ledger: TicketLedger) -> None:
    """9 issued: 2 trained (2 and 4 tokens), 1 dropped (6), 1 buffered (5 tokens) for 5 s, 1 with server a for a
    minute, 4 waiting. And 3 that nobody knows of."""
    first = issue(ledger, 0)
    for item, tokens in zip(first[:3], (2, 4, 6), strict=True):
        ledger.receive([received(item, *[0] * tokens)])
    ledger.take()
    ledger.advance(1)
    ledger.advance(2)
    second = issue(ledger, 2)
    ledger.receive([replace(received(second[0], *[2] * 5), arrived_at=time.monotonic() - 5)])
    ledger.out.assign([3], "a")
    ledger.out._entries[3].issued_at -= 60
    ledger._counters["issued"] += 3


def test_each_scrape_looks_at_the_ledger(rig: Rig) -> None:
    fill(rig.ledger)
    rig.welcome("a", max_groups=8)
    rig.welcome("b", aligned=False)
    values = rig.scrape()
    states = {"issued": 12, "trained": 2, "dropped_stale": 1, "buffered": 1, "in_flight": 1, "waiting": 4}
    assert by_label(values, "groups") == {f"state={state}": count for state, count in states.items()}
    assert by_label(values, "mean_length") == {"state=trained": 3, "state=dropped": 6, "state=buffered": 5}
    expected = {"ledger_residual_groups": 3, "length_bias": -0.25, "servers": 2}
    expected |= {"oldest_ticket_seconds": 60}
    assert {name: values[name, ""] for name in expected} == pytest.approx(expected, abs=2, rel=0)
    assert values["ledger_residual_groups", ""] == 3


def test_each_scrape_looks_at_clocks_waits_errors_and_the_journal(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.waits, "totals", lambda: {"groups": 12.0})
    rig.network.servers.errors["muted"] = 4
    rig.network.servers.stalls.looked_at = time.monotonic() - 7
    rig.exporter._step_at -= 30
    item = issue(rig.ledger, 0)[0]
    rig.network.groups._arrived[0] = ("a", replace(received(item), arrived_at=time.monotonic() - 0.3))
    values = rig.scrape()
    assert values["pulse_age_seconds", ""] == pytest.approx(7, abs=2)
    assert values["last_step_age_seconds", ""] == pytest.approx(30, abs=2)
    assert values["waiting_seconds_total", "for=groups"] == 12
    assert values["errors_total", "kind=muted"] == 4
    assert (values["step", ""], values["total_steps", ""]) == (4, 50)
    rig.network.groups.keep()
    rig.exporter.step(5, 4, record(), rig.one_group(1))
    values = rig.scrape()
    assert values["last_step_age_seconds", ""] < 2
    assert values["journal_lag_seconds_count", ""] == 1
    assert values["journal_lag_seconds_sum", ""] == pytest.approx(0.3, abs=0.2)


def test_of_many_servers_those_that_differ_most_have_series(rig: Rig) -> None:
    for number in range(MOST_SERVERS + 20):
        rig.welcome(f"s{number}")
        rig.exporter.compared(f"s{number}", float(number), 0.0)
    shown = by_label(rig.scrape(), "parity_max")
    assert sorted(shown.values()) == list(range(20, MOST_SERVERS + 20))
    rig.network.weights_sent_bytes = 10
    values = rig.scrape()
    assert values[("weights_sent_bytes_total", "")] == 10


def test_a_servers_parity_is_shown_while_it_is_connected(rig: Rig) -> None:
    def shown() -> list[dict[str, float]]:
        values = rig.scrape()
        return [by_label(values, name) for name in ("parity_max", "parity_mean")]

    for number in range(2):
        server_id = f"host-{number}-a1b2c3"
        rig.welcome(server_id)
        rig.exporter.compared(server_id, 0.1 + number, 0.01 + number)
        assert shown() == [{f"server={server_id}": 0.1 + number}, {f"server={server_id}": 0.01 + number}]
        del rig.network.servers.connected[server_id]
        assert shown() == [{}, {}]
    rig.welcome("host-1-a1b2c3")  # again, and not compared again
    assert shown()[0] == {"server=host-1-a1b2c3": 1.1}


# --- the rollout server ----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[PrometheusServer]:
    exporter = PrometheusServer(NOWHERE, lambda: CPU, run="run")
    exporter.serve()
    yield exporter
    exporter.close()


def beat(uptime_s: float, busy_s: float) -> ServerHeartbeat:
    counts = {"groups_queued": 3, "groups_running": 2, "groups_unacknowledged": 1, "tokens_generated": 1000}
    return ServerHeartbeat(version=1, busy_s=busy_s, uptime_s=uptime_s, **counts)


def test_each_scrape_looks_at_the_servers_last_heartbeat(
    server: PrometheusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl_plugins.prometheus.server.memory_by_state", lambda device: {"allocated": 5, "free": 6})
    usage = EngineUsage(1000, 30.0, 5, update_pause_s=2.5, kv_cache_ratio=0.4)
    heard = time.monotonic() - 4
    server.beat(usage, beat(40.0, 30.0), heard_at=heard, waiting_for="weights", is_asleep=False)
    usage = replace(usage, busy_s=36.0)
    server.beat(usage, beat(48.0, 36.0), heard_at=heard, waiting_for="tickets", is_asleep=True)
    assert server._beat_at is not None
    server._beat_at -= 3
    values = scrape(server.metrics.registry)
    assert by_label(values, "held_groups") == {"state=queued": 3, "state=running": 2, "state=unacknowledged": 1}
    expected = {"tokens_total": 1000, "busy_seconds_total": 36, "update_pause_seconds_total": 2.5, "idle_ratio": 0.25}
    expected |= {"sequences_running": 5, "kv_cache_ratio": 0.4}
    assert {name: values[name, ""] for name in expected} == expected
    assert by_label(values, "waiting_seconds_total") == {"for=weights": 10, "for=tickets": 2}
    assert values["learner_silence_seconds", ""] == pytest.approx(4, abs=2)
    assert values["pulse_age_seconds", ""] == pytest.approx(3, abs=2)
    assert by_label(values, "device_bytes") == {
        f"phase={phase},state={state}": nbytes
        for phase in ("asleep", "awake")
        for state, nbytes in (("allocated", 5), ("free", 6))
    }


def test_a_server_without_a_welcome_yet_shows_how_long_it_waits_and_that_it_lives(
    server: PrometheusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("asyncrl_plugins.prometheus.server.time", SimpleNamespace(monotonic=lambda: now))

    def seen() -> tuple[float, float]:
        values = scrape(server.metrics.registry)
        return values["learner_silence_seconds", ""], values["pulse_age_seconds", ""]

    now += 400
    assert all(map(math.isnan, seen())), "it loads, and waits for nobody yet"
    server.said_hello()
    now += 400
    server.said_hello()
    now += 3
    assert seen() == pytest.approx((403, 3))
    nothing = EngineUsage(0, 0.0, 0)
    server.beat(nothing, beat(500.0, 0.0), heard_at=now - 1, waiting_for="tickets", is_asleep=False)
    assert seen() == pytest.approx((1, 0))


def test_what_the_server_produced_and_loaded(server: PrometheusServer) -> None:
    slot = TicketLedger(throwaway_journal(), prompts_per_step=1, bound=0, total_groups=1).admissible(0)[0]
    group = received(prepared(slot)).group
    timings = GroupTimings(generate_s=2, reward_s=0.5, environment_s=3)
    stop, turn = FinishReason.STOP, Turn(start=0, end=4)
    records = (
        TrajectoryRecord(status=TrajectoryStatus.FINISHED, finish_reason=stop, limit="turns", turns=(turn, turn)),
        TrajectoryRecord(
            status=TrajectoryStatus.TIMED_OUT, finish_reason=stop, error_kind="reward_timeout", turns=(turn,)
        ),
    )
    lengths = np.asarray([12, 12], np.int32)
    server.produced(group.model_copy(update={"timings": timings, "trajectories": records, "lengths": lengths}))
    answers = [("reset", 0.5), ("step", 1.0), ("step", 2.0)]
    pool: Any = SimpleNamespace(
        errors={"environment_died": 2}, restarts=1, live=4, suspended=3, take_answers=lambda: answers
    )
    counts = {("judge", "requests/retried"): 2, ("judge", "tokens/prompt"): 70}
    rewards: Any = SimpleNamespace(dropped_bytes=3, counts=counts)
    server.totals(rewards, pool)
    server.loaded(WeightsLoaded(version=5, channel="shm", transfer_s=0.3, load_s=0.7), nbytes=512)
    server.stopped("learner_left")
    values = scrape(server.metrics.registry)
    expected = {"groups_total": 1, "generate_seconds_sum": 2, "reward_seconds_sum": 0.5, "completion_tokens_sum": 24}
    expected |= {"policy_version": 5, "weight_bytes_total": 512, "turns_sum": 3, "turns_count": 2}
    expected |= {"environment_seconds_total": 3, "environment_restarts_total": 1}
    expected |= {"reward_output_dropped_bytes_total": 3}
    assert {name: values[name, ""] for name in expected} == pytest.approx(expected)
    for name, series in {
        "trajectories_total": {"status=finished": 1, "status=timed_out": 1},
        "reward_errors_total": {"kind=reward_timeout": 1},
        "limited_trajectories_total": {"limit=turns": 1},
        "environment_errors_total": {"kind=environment_died": 2},
        "reward_requests_total": {"component=judge,outcome=retried": 2},
        "reward_tokens_total": {"component=judge,kind=prompt": 70},
        "environment_trajectories": {"state=live": 4, "state=suspended": 3},
        "environment_answer_seconds_sum": {"do=reset": 0.5, "do=step": 3.0},
        "weight_seconds_sum": {"phase=transfer": 0.3, "phase=load": 0.7},
        "stopped": {"kind=learner_left": 1},
    }.items():
        assert {label: values[name, label] for label in series} == pytest.approx(series)


def test_turns_on_a_shared_device(server: PrometheusServer) -> None:
    server.stale_fence()
    server.took_device(5)
    server.woke(0.5, 20.0)
    server.fell_asleep(0.25, 7)
    server.ticket_failed("ticket")
    values = scrape(server.metrics.registry)
    expected = {"stale_fences_total": 1, "lease_fence": 5, "wake_seconds": 0.5, "asleep_seconds_total": 20}
    expected |= {"sleep_seconds": 0.25, "sleep_bytes": 7}
    assert {name: values[name, ""] for name in expected} == expected
    assert values["errors_total", "kind=ticket"] == 1


def test_a_learner_whose_port_of_metrics_is_busy_gives_everything_back(make_config: Callable[..., RunConfig]) -> None:
    check_busy_port(make_config, "telemetry.learner_port")
