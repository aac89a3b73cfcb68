"""Every metric of the rollout server: the table behind its Prometheus endpoint, docs/metrics.md and the dashboards."""

from __future__ import annotations

from asyncrl_plugins.prometheus.metric_set import Metric, ServiceMetrics

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TURNS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


_server = ServiceMetrics("asyncrl_rollout_")
_gauge, _read, _counter = _server.gauge, _server.gauge_set_on_scrape, _server.counter


def _seconds(name: str, help: str, healthy: str, *labels: str) -> Metric:
    return _server.histogram(f"{name}_seconds", "seconds", SECONDS, help, healthy, *labels)


PRODUCTION = (
    _counter("tokens", "tokens", "Tokens sampled.", "rises steadily"),
    _counter("groups", "groups", "Groups produced.", "rises steadily"),
    _counter("trajectories", "trajectories", "Trajectories by how they ended.", "finished dominates", "status"),
    _counter("reward_errors", "trajectories", "Trajectories whose reward failed, by kind.", "0", "kind"),
    _counter(
        "reward_output_dropped_bytes",
        "bytes",
        "Bytes that rewards printed beyond the 8 KiB per sample that go to the log.",
        "0",
    ),
    _counter(
        "reward_requests",
        "requests",
        "Requests of rewards to other services: answered, cached (answered before), retried, and failed for good.",
        "failed 0, retried few",
        "component",
        "outcome",
    ),
    _counter(
        "reward_tokens",
        "tokens",
        "Tokens of prompts and replies as the asked service counts them: the cost of the reward.",
        "as planned",
        "component",
        "kind",
    ),
    _gauge(
        "held_groups",
        "groups",
        "Groups held: queued, running in the engine, or sent and not yet acknowledged.",
        "running above 0 most of the time; unacknowledged near 0",
        "state",
    ),
    _gauge("sequences_running", "sequences", "Sequences that the engine decodes now.", "steady"),
    _seconds("generate", "Time from a group's admission to its last token.", "no long tail"),
    _seconds("reward", "Time to score one group.", "small against generate_seconds"),
    _server.histogram(
        "completion_tokens", "tokens", TOKENS, "Length of completions.", "well below data.max_response_length"
    ),
)

ENVIRONMENT = (
    _server.histogram("turns", "turns", TURNS, "Turns of a trajectory; 1 without an environment.", "no sudden change"),
    _counter(
        "limited_trajectories",
        "trajectories",
        "Trajectories that a limit ended before the environment did, by limit: turns, tokens, images, seconds.",
        "few, and fewer as the policy learns",
        "limit",
    ),
    _counter(
        "environment_errors",
        "errors",
        "Failures of the environment by kind, those included after which a new try went well.",
        "0; the run stops at more than 100 trajectories lost of the last 200",
        "kind",
    ),
    _counter(
        "environment_seconds",
        "seconds",
        "Waits for the environment, of all trajectories together.",
        "rises more slowly than the clock times the trajectories at work",
    ),
    _seconds("environment_answer", "Time of an environment's answer, by method: reset, step.", "no long tail", "do"),
    _gauge(
        "environment_trajectories",
        "trajectories",
        "Trajectories with an environment: live, and those of them suspended until it answers.",
        "suspended well below live",
        "state",
    ),
    _counter("environment_restarts", "processes", "Processes of the environment started in place of lost ones.", "0"),
)

TIME = (
    _counter("busy_seconds", "seconds", "Time in which the engine had work.", "rises nearly as fast as the clock"),
    _counter("waiting_seconds", "seconds", "Time in which the engine had no work, by reason.", "tickets least", "for"),
    _gauge(
        "idle_ratio",
        "ratio",
        "Share of the time since the start in which the engine had no work.",
        "below 0.2 when rollout is the slower side",
    ),
)

WEIGHTS = (
    _gauge(
        "policy_version",
        "versions",
        "Policy version that samples now.",
        "follows asyncrl_learner_policy_version within max_staleness",
    ),
    _seconds(
        "weight",
        "Time for one weight version by phase: transfer from the learner, and load into the engine.",
        "small against a learner step",
        "phase",
    ),
    _counter(
        "update_pause_seconds",
        "seconds",
        "Time in which running sequences stood still for weight updates.",
        "below 5 % of asyncrl_rollout_busy_seconds_total",
    ),
    _counter("weight_bytes", "bytes", "Bytes of weight versions received.", "rises with every version"),
)

MEMORY = (
    _read("rss_bytes", "bytes", "Resident memory of the server and its children.", "flat after the first steps"),
    _server.device_memory(),
    _gauge("kv_cache_ratio", "ratio", "Share of the key-value cache in use, where the engine says it.", "below 0.95"),
)

DEVICE_TURNS = (
    _gauge(
        "lease_fence",
        "turns",
        "Fence number of the server's newest device lease (trainer.mode=sync).",
        "rises with every step",
    ),
    _counter(
        "stale_fences",
        "messages",
        "Grants and recalls of the device that had been overtaken, and were refused.",
        "0; a few after a restart",
    ),
    _counter("asleep_seconds", "seconds", "Time without the device (trainer.mode=sync).", "the learner's steps"),
    _gauge("sleep_seconds", "seconds", "Duration of the newest falling asleep.", "small against a step"),
    _gauge(
        "wake_seconds",
        "seconds",
        "Duration of the newest waking up, parity check included; the first time: of loading the model.",
        "small against a step",
    ),
    _gauge("sleep_bytes", "bytes", "Bytes that left the device at the newest falling asleep.", "constant"),
)

HEALTH = (
    _gauge(
        "learner_silence_seconds",
        "seconds",
        "Time since the learner was heard of; before its welcome: since the first hello.",
        "below network.timeout_s; while the learner loads its model, some minutes",
    ),
    _gauge("pulse_age_seconds", "seconds", "Time since the event loop last told the learner that it lives.", "below 5"),
    _gauge("stopped", "runs", "1 once the server has stopped, by kind.", "finished", "kind"),
    _counter("errors", "errors", "Failed tickets and refused messages.", "0", "kind"),
)

METRICS = (*PRODUCTION, *ENVIRONMENT, *TIME, *WEIGHTS, *MEMORY, *DEVICE_TURNS, *HEALTH)
