"""Every metric of an `asyncrl pool`: the table behind its Prometheus endpoint and docs/metrics.md."""

from __future__ import annotations

from asyncrl.telemetry.metric_set import ServiceMetrics

_pool = ServiceMetrics("asyncrl_pool_")

METRICS = (
    _pool.gauge(
        "processes",
        "processes",
        "Processes by kind and state (running, waiting for a place).",
        "waiting 0",
        "kind",
        "state",
    ),
    _pool.gauge("places", "processes", "Most that may run at a time (--processes).", "above those that run"),
    _pool.gauge("servers", "servers", "Rollout servers that are connected.", "all of the run's"),
    _pool.counter("started", "processes", "Processes that were started, by kind.", "few: failures start more", "kind"),
    _pool.counter(
        "ended",
        "processes",
        "Processes that ended, by kind and how: stopped (by its server, or with it), by itself, without a place in "
        "time, not started.",
        "stopped",
        "kind",
        "how",
    ),
    _pool.counter("carried_bytes", "bytes", "Bytes carried to processes and from them.", "rises steadily", "direction"),
    _pool.counter("output_dropped_bytes", "bytes", "Bytes that processes printed beyond what goes to the log.", "0"),
    _pool.counter("refused", "messages", "Messages that could not be used, and peers that sent too much.", "0"),
    _pool.gauge("pulse_age_seconds", "seconds", "Time since the pool last looked at its socket.", "below 5"),
)
