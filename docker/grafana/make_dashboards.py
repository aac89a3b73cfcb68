"""Write docker/grafana/dashboards/*.json from the tables below, with Grafana's own types; a test compares them.

    python docker/grafana/make_dashboards.py

Each dashboard shows one run, which its variable `run` chooses. What a panel means and what is healthy comes from the
tables of metrics (asyncrl_plugins/prometheus/learner_metrics.py, server_metrics.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ScaleDistributionConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable, Row, ThresholdsConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphDrawStyle,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

from asyncrl_plugins.prometheus.learner_metrics import METRICS as LEARNER
from asyncrl_plugins.prometheus.server_metrics import METRICS as ROLLOUT
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import THRESHOLDS

FOLDER = Path(__file__).parent / "dashboards"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="asyncrl-prometheus")
REFRESH = "10s"
WINDOW = "$__rate_interval"
"""Four scrapes: for what moves all the time."""
STEPS = "10m"
"""Window for series that move once a step, a version or a group: over less, the rate is 0 or a spike."""
COLUMNS, WIDTH, HEIGHT, STAT_HEIGHT = 24, 8, 8, 4
TABLE = {metric.name: metric for metric in (*LEARNER, *ROLLOUT)}
_NAME = re.compile(r"asyncrl_(?:learner|rollout)_[a-z0-9_]+")
_OF_A_RUN = re.compile(rf"({_NAME.pattern}|process_start_time_seconds)(\{{)?")
"""A name of a metric that has the label `run`, and the beginning of its selector."""
RUNS = 'label_values(process_start_time_seconds{run!=""}, run)'


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    """A unit of Grafana's: short, percentunit, s, bytes, ..."""
    queries: tuple[tuple[str, str], ...]
    """PromQL, and the legend of its series."""
    stat: bool = False
    """One large number instead of curves."""
    logarithmic: bool = False
    least: float | None = None
    """Smallest healthy value: below it is red."""
    below: float | None = None
    """Smallest value that is not healthy any more: from it on it is red."""


def chart(title: str, unit: str, *queries: tuple[str, str], **options: Any) -> Chart:
    return Chart(title, unit, queries, **options)


def alert(name: str) -> float:
    return THRESHOLDS[name].value


def rate(metric: str, by: str = "", window: str = WINDOW) -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[{window}]))"


def per_step_second(metric: str) -> str:
    """Counter per second of steps: equal in the first minute of a run, too."""
    return f"sum(rate({metric}[{STEPS}])) / sum(rate({L}step_seconds_sum[{STEPS}]))"


def quantiles(metric: str, *values: float, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[{STEPS}])))",
            f"p{round(q * 100)}{legend}",
        )
        for q in values
    )


L, R = "asyncrl_learner_", "asyncrl_rollout_"
FIRING = 'ALERTS{alertstate="firing", run="$run"} or ALERTS{alertstate="firing", run=""}'
"""Alerts of the run, and those that know none."""

DASHBOARDS: dict[str, tuple[str, dict[str, tuple[Chart, ...]]]] = {
    "learning": (
        "Is it learning?",
        {
            "Now": (
                chart("Step", "short", (f"max({L}step)", "step"), stat=True),
                chart("Of the run", "percentunit", (f"max({L}step) / max({L}total_steps)", "done"), stat=True),
                chart(
                    "Time left",
                    "s",
                    (f"(max({L}total_steps) - max({L}step)) / (sum(rate({L}steps_total[15m])) > 0)", "left"),
                    stat=True,
                ),
                chart("Reward", "short", (f'max({L}reward{{component="mean"}})', "reward"), stat=True),
                chart("Held-out accuracy", "percentunit", (f"max({L}held_out_accuracy)", "accuracy"), stat=True),
                chart("Policy version", "short", (f"max({L}policy_version)", "version"), stat=True),
            ),
            "Reward": (
                chart(
                    "Reward by component",
                    "short",
                    (f"{L}reward", "{{component}}"),
                    (f"{L}held_out_reward", "held out"),
                    (f"{L}baseline_reward", "greedy"),
                ),
                chart(
                    "Accuracy: in training and held out",
                    "percentunit",
                    (f"{L}accuracy", "training"),
                    (f"{L}held_out_accuracy", "held out"),
                ),
                chart(
                    "Rows of a batch, and groups that teach nothing",
                    "short",
                    (f"{L}rows", "{{status}}"),
                    (f"{L}zero_variance_groups", "groups without variance"),
                    (f"{L}baselines_missing", "groups without a baseline"),
                    (f"{L}replayed_groups", "replayed groups"),
                ),
            ),
            "Policy": (
                chart("Entropy per token", "short", (f"{L}entropy", "nats"), least=alert("EntropyCollapse")),
                chart("KL to the reference", "short", (f"{L}reference_kl", "reference")),
                chart("Loss", "short", (f"{L}loss", "loss")),
                chart(
                    "Critic",
                    "short",
                    (f"{L}critic_explained_variance", "explained variance"),
                    (f"{L}critic_loss", "loss"),
                ),
                chart(
                    "Demonstrations",
                    "short",
                    (f"{L}supervised_loss", "part of the loss"),
                    (f"{L}supervised_weight", "weight"),
                    (f"{L}inserted_logprob", "log-prob"),
                    (f"{L}inserted_tokens", "tokens"),
                ),
                chart("Gradient norm before clipping", "short", (f"{L}grad_norm", "norm"), logarithmic=True),
                chart("Learning rate", "sci", (f"{L}learning_rate", "rate")),
                chart(
                    "Completion length",
                    "short",
                    (f"{L}completion_tokens", "mean of a batch"),
                    *quantiles(f"{R}completion_tokens", 0.5, 0.99),
                ),
            ),
            "Off-policyness": (
                chart(
                    "Effective sample size",
                    "percentunit",
                    (f"{L}effective_sample_size", "all"),
                    (f"{L}effective_sample_size_by_staleness", "staleness {{staleness}}"),
                    least=alert("EffectiveSampleSizeCollapse"),
                ),
                chart(
                    "KL(behaviour || learner) per token",
                    "short",
                    (f"{L}mismatch_kl", "k3"),
                    (f"{L}mismatch_kl_k1", "k1"),
                    (f"{L}mismatch_kl_by_staleness", "staleness {{staleness}}"),
                    logarithmic=True,
                    below=alert("MismatchKl"),
                ),
                chart(
                    "Raw ratio learner/behaviour",
                    "short",
                    (f"{L}ratio", "{{percentile}}"),
                    (f"{L}ratio_max", "max"),
                    (f"{L}ratio_p99_by_staleness", "p99, staleness {{staleness}}"),
                    logarithmic=True,
                ),
                chart(
                    "Clipped, masked, truncated",
                    "percentunit",
                    (f"{L}clip_fraction", "clipped"),
                    (f"{L}mask_fraction", "masked"),
                    (f"{L}truncation_fraction", "truncated"),
                ),
                chart(
                    "Largest difference of log-probs",
                    "short",
                    (f"{L}logprob_diff_max", "learner - engine"),
                    (f"{L}parity_max", "{{server}} as it joined"),
                    logarithmic=True,
                ),
                chart(
                    "Token staleness",
                    "short",
                    *quantiles(f"{L}token_staleness_versions", 0.5, 0.99),
                    (f"{L}staleness_bound", "bound"),
                ),
                chart("Oldest token of a group", "short", *quantiles(f"{L}group_staleness_versions", 0.5, 0.99)),
                chart("Tokens by staleness", "short", (f"{L}tokens_by_staleness", "{{staleness}} versions")),
                chart(
                    "Clipped, masked and truncated by staleness",
                    "percentunit",
                    *(
                        (f"{L}{what}_fraction_by_staleness", f"{what}, {{{{staleness}}}}")
                        for what in ("clip", "mask", "truncation")
                    ),
                ),
            ),
        },
    ),
    "pipeline": (
        "Is the pipeline healthy?",
        {
            "Now": (
                chart("Alerts", "short", (f"count({FIRING}) or vector(0)", "firing"), stat=True, below=1),
                chart(
                    "Since the last step",
                    "s",
                    (f"max({L}last_step_age_seconds)", "age"),
                    stat=True,
                    below=alert("NoProgress"),
                ),
                chart(
                    "Ledger residual",
                    "short",
                    (f"max({L}ledger_residual_groups)", "must be 0"),
                    stat=True,
                    least=0,
                    below=1,
                ),
                chart("Rollout servers", "short", (f"max({L}servers)", "servers"), stat=True, least=1),
                chart(
                    "Learner idle",
                    "percentunit",
                    (f"max({L}idle_ratio)", "idle"),
                    stat=True,
                    below=alert("LearnerStarves"),
                ),
                chart("Servers idle", "percentunit", (f"avg({R}idle_ratio)", "idle"), stat=True),
                chart("Version lag", "short", (f"max({L}policy_version) - min({R}policy_version)", "lag"), stat=True),
                chart(
                    "Errors in an hour",
                    "short",
                    (f"sum(increase({L}errors_total[1h])) + sum(increase({R}errors_total[1h]))", "errors"),
                    stat=True,
                    below=1,
                ),
            ),
            "Ledger": (
                chart(
                    "Groups: buffered, in flight, waiting",
                    "short",
                    (f'{L}groups{{state=~"buffered|in_flight|waiting"}}', "{{state}}"),
                ),
                chart("Trained and dropped", "short", (f'{L}groups{{state=~"trained|dropped.*"}}', "{{state}}")),
                chart("Dropped by filters, of a step's groups", "percentunit", (f"{L}filtered_ratio", "filtered")),
                chart(
                    "Length: trained, dropped, buffered",
                    "short",
                    (f"{L}mean_length", "{{state}}"),
                    (f"{L}length_bias", "bias"),
                ),
            ),
            "Waiting": (
                chart(
                    "Learner: what it waits for", "percentunit", (rate(f"{L}waiting_seconds_total", "for"), "{{for}}")
                ),
                chart(
                    "Servers: what they wait for",
                    "percentunit",
                    (rate(f"{R}waiting_seconds_total", "for, instance"), "{{for}} {{instance}}"),
                ),
                chart("Oldest group that a step waits for", "s", (f"{L}oldest_ticket_seconds", "age")),
            ),
            "Trajectories": (
                chart(
                    "By how they ended",
                    "short",
                    (rate(f"{R}trajectories_total", "status", STEPS), "{{status}} per second"),
                ),
                chart(
                    "Failed rewards",
                    "short",
                    (rate(f"{R}reward_errors_total", "kind", STEPS), "{{kind}} per second"),
                ),
                chart("Groups held by servers", "short", (f"sum by (state) ({R}held_groups)", "{{state}}")),
                chart("Generation of a group", "s", *quantiles(f"{R}generate_seconds", 0.5, 0.99)),
                chart("Scoring of a group", "s", *quantiles(f"{R}reward_seconds", 0.5, 0.99)),
                chart(
                    "Errors",
                    "short",
                    (rate(f"{L}errors_total", "kind"), "learner: {{kind}}"),
                    (rate(f"{R}errors_total", "kind"), "server: {{kind}}"),
                ),
            ),
            "Environment": (
                chart("Turns of a trajectory", "short", *quantiles(f"{R}turns", 0.5, 0.99)),
                chart(
                    "Ended by a limit",
                    "short",
                    (rate(f"{R}limited_trajectories_total", "limit", STEPS), "{{limit}} per second"),
                ),
                chart(
                    "Failures and restarts",
                    "short",
                    (rate(f"{R}environment_errors_total", "kind", STEPS), "{{kind}} per second"),
                    (rate(f"{R}environment_restarts_total", window=STEPS), "restarts per second"),
                ),
                chart("Answer of the environment", "s", *quantiles(f"{R}environment_answer_seconds", 0.5, 0.95)),
                chart("Live and suspended", "short", (f"sum by (state) ({R}environment_trajectories)", "{{state}}")),
                chart(
                    "Waiting for it, at a time",
                    "short",
                    (rate(f"{R}environment_seconds_total", window=STEPS), "trajectories"),
                ),
            ),
            "Weights": (
                chart(
                    "Policy version by process",
                    "short",
                    (f"{L}policy_version", "learner"),
                    (f"{R}policy_version", "{{instance}}"),
                ),
                chart("Publishing a version", "s", *quantiles(f"{L}publish_seconds", 0.5, 0.99)),
                chart("Transfer and load", "s", *quantiles(f"{R}weight_seconds", 0.99, by="phase")),
                chart(
                    "Pause of running sequences",
                    "percentunit",
                    (rate(f"{R}update_pause_seconds_total", "instance", STEPS), "{{instance}}"),
                    below=0.05,
                ),
                chart("Size of a version", "bytes", (f"{L}publish_bytes", "published")),
            ),
            "Life": (
                chart(
                    "Alerts that fire",
                    "short",
                    (
                        f'count by (alertname) ({FIRING}) or label_replace(vector(0), "alertname", "none", "", "")',
                        "{{alertname}}",
                    ),
                ),
                chart("Since the last step", "s", (f"{L}last_step_age_seconds", "age"), below=alert("NoProgress")),
                chart(
                    "Silence",
                    "s",
                    (f"{L}pulse_age_seconds", "learner's exchange"),
                    (f"{R}pulse_age_seconds", "{{instance}}"),
                    (f"{R}learner_silence_seconds", "learner, as {{instance}} hears it"),
                    below=alert("LearnerSilent"),
                ),
                chart(
                    "Up, of all runs", "short", ('up{job=~"learner|rollout_server"}', "{{job}} {{instance}}"), least=1
                ),
                chart(
                    "Restarts in an hour",
                    "short",
                    ('changes(process_start_time_seconds{job=~"learner|rollout_server"}[1h])', "{{job}} {{instance}}"),
                    below=3,
                ),
            ),
        },
    ),
    "resources": (
        "Memory and throughput",
        {
            "Now": (
                chart("Sampled tokens/s", "short", (rate(f"{R}tokens_total"), "all servers"), stat=True),
                chart("Trained tokens/s", "short", (per_step_second(f"{L}tokens_total"), "learner"), stat=True),
                chart("Groups/s", "short", (per_step_second(f"{L}groups_consumed_total"), "consumed"), stat=True),
                chart("Trajectories/s", "short", (per_step_second(f"{L}trajectories_total"), "consumed"), stat=True),
                chart(
                    "Seconds a step",
                    "s",
                    (f"sum(rate({L}step_seconds_sum[15m])) / sum(rate({L}step_seconds_count[15m]))", "mean"),
                    stat=True,
                ),
                chart(
                    "Disk left",
                    "bytes",
                    (f"min({L}disk_free_bytes)", "free"),
                    stat=True,
                    least=alert("DiskFilling"),
                ),
            ),
            "Throughput": (
                chart(
                    "Tokens per second",
                    "short",
                    (rate(f"{R}tokens_total", "instance"), "sampled, {{instance}}"),
                    (per_step_second(f"{L}tokens_total"), "trained"),
                ),
                chart(
                    "A step",
                    "s",
                    *(
                        (
                            f"sum(rate({L}{part}_seconds_sum[{STEPS}])) / sum(rate({L}{part}_seconds_count[{STEPS}]))",
                            part,
                        )
                        for part in ("step", "wait", "learn", "publish")
                    ),
                ),
                chart("Model FLOPs of the learner", "flops", (f"{L}model_flops", "learning")),
                chart("Model FLOPs utilisation", "percentunit", (f"{L}mfu", "learner")),
                chart("Engine busy", "percentunit", (rate(f"{R}busy_seconds_total", "instance"), "{{instance}}")),
                chart("Sequences decoded", "short", (f"{R}sequences_running", "{{instance}}")),
                chart(
                    "Groups per second",
                    "short",
                    (rate(f"{R}groups_total", "instance", STEPS), "produced, {{instance}}"),
                ),
                chart(
                    "Weight bytes received",
                    "Bps",
                    (rate(f"{R}weight_bytes_total", "instance", STEPS), "{{instance}}"),
                ),
            ),
            "Memory": (
                chart("Resident", "bytes", (f"{L}rss_bytes", "learner"), (f"{R}rss_bytes", "{{instance}}")),
                chart("Device, learner", "bytes", (f"{L}device_bytes", "{{state}}, {{phase}}")),
                chart("Device, servers", "bytes", (f"{R}device_bytes", "{{state}}, {{phase}} {{instance}}")),
                chart("Key-value cache in use", "percentunit", (f"{R}kv_cache_ratio", "{{instance}}"), below=0.95),
                chart(
                    "Shared memory",
                    "bytes",
                    (f"{L}shared_memory_bytes", "published"),
                    (f"{L}shared_memory_free_bytes", "free"),
                ),
                chart(
                    "Disk", "bytes", (f"{L}journal_bytes", "journal"), (f"{L}disk_free_bytes", "free"), logarithmic=True
                ),
            ),
            "One device for both": (
                chart("Turns", "short", (f"{L}lease_fence", "learner's fence"), (f"{R}lease_fence", "server's fence")),
                chart(
                    "Falling asleep, waking up",
                    "s",
                    (f"{L}sleep_seconds", "learner sleeps"),
                    (f"{L}wake_seconds", "learner wakes"),
                    (f"{R}sleep_seconds", "server sleeps"),
                    (f"{R}wake_seconds", "server wakes"),
                ),
                chart(
                    "Asleep",
                    "s",
                    (f"{L}asleep_seconds", "learner, of a step"),
                    (rate(f"{R}asleep_seconds_total", "instance", STEPS), "server, per second"),
                ),
                chart("What leaves the device", "bytes", (f"{L}sleep_bytes", "learner"), (f"{R}sleep_bytes", "server")),
            ),
        },
    ),
}


def describe(queries: tuple[tuple[str, str], ...]) -> str:
    """Meaning and healthy values of the metrics that a panel shows, from their tables. Raises KeyError for others."""
    found: dict[str, str] = {}
    for expression, _ in queries:
        for name in _NAME.findall(expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = TABLE.get(name) or TABLE[base]
            found[metric.name] = f"{metric.help} Healthy: {metric.healthy}. (`{metric.name}`)"
    return "\n\n".join(found.values())


def of_the_run(expression: str) -> str:
    """The expression with every series of a service restricted to the run that the dashboard's variable names."""

    def selected(name: re.Match[str]) -> str:
        return f'{name[1]}{{run="$run"' + (", " if name[2] else "}")

    return _OF_A_RUN.sub(selected, expression)


def thresholds(chart: Chart) -> ThresholdsConfig:
    """Green between the limits that are healthy, red beyond; Grafana colours what is equal or larger."""
    steps = [Threshold(value=None, color="green" if chart.least is None else "red")]
    if chart.least is not None:
        steps.append(Threshold(value=chart.least, color="green"))
    if chart.below is not None:
        steps.append(Threshold(value=chart.below, color="red"))
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def panel(chart: Chart) -> Stat | TimeSeries:
    has_limits = chart.least is not None or chart.below is not None
    if chart.stat:
        built = Stat().height(STAT_HEIGHT).span(COLUMNS // 6)
    else:
        built = (
            TimeSeries()
            .height(HEIGHT)
            .span(WIDTH)
            .draw_style(GraphDrawStyle.LINE)
            .fill_opacity(8)
            .line_width(2)
            .legend(
                VizLegendOptions()
                .display_mode(LegendDisplayMode.LIST)
                .placement(LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        )
        if chart.logarithmic:
            built = built.scale_distribution(ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
        if has_limits:
            built = built.thresholds_style(GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED))
    if has_limits:
        built = built.thresholds(thresholds(chart))
    built = built.title(chart.title).description(describe(chart.queries)).unit(chart.unit).datasource(PROMETHEUS)
    for number, (expression, legend) in enumerate(chart.queries):
        query = Dataquery().expr(of_the_run(expression)).legend_format(legend).ref_id(chr(ord("A") + number))
        built = built.with_target(query)
    return built


def dashboard(uid: str) -> str:
    """JSON."""
    title, rows = DASHBOARDS[uid]
    built = (
        Dashboard(f"asyncrl: {title}")
        .uid(f"asyncrl-{uid}")
        .tags(["asyncrl"])
        .refresh(REFRESH)
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(
            QueryVariable("run")
            .label("run")
            .query(RUNS)
            .datasource(PROMETHEUS)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
        )
    )
    for name, charts in rows.items():
        built = built.with_row(Row(name))
        for one in charts:
            built = built.with_panel(panel(one))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for uid in DASHBOARDS:
        (FOLDER / f"{uid}.json").write_text(dashboard(uid))
