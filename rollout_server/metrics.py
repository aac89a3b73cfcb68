"""Every metric of the rollout server: the table behind its Prometheus endpoint and behind docs/metrics.md."""

from __future__ import annotations

from asyncrl.telemetry.metrics import Metric

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

METRICS = (
    Metric(
        name="asyncrl_rollout_policy_version",
        kind="gauge",
        unit="versions",
        help="Policy version that samples now.",
        healthy="follows asyncrl_learner_policy_version within max_staleness",
    ),
    Metric(
        name="asyncrl_rollout_held_groups",
        kind="gauge",
        unit="groups",
        labels=("state",),
        help="Groups held: queued, running in the engine, or sent and not yet acknowledged.",
        healthy="running above 0 most of the time; unacknowledged near 0",
    ),
    Metric(
        name="asyncrl_rollout_groups_total",
        kind="counter",
        unit="groups",
        help="Groups produced.",
        healthy="rises steadily",
    ),
    Metric(
        name="asyncrl_rollout_trajectories_total",
        kind="counter",
        unit="trajectories",
        labels=("status",),
        help="Trajectories by how they ended.",
        healthy="finished dominates; error and timed_out near 0",
    ),
    Metric(
        name="asyncrl_rollout_reward_errors_total",
        kind="counter",
        unit="trajectories",
        labels=("kind",),
        help="Trajectories whose reward failed, by kind.",
        healthy="0",
    ),
    Metric(
        name="asyncrl_rollout_tokens_generated",
        kind="gauge",
        unit="tokens",
        help="Tokens sampled since the server started.",
        healthy="rises steadily",
    ),
    Metric(
        name="asyncrl_rollout_busy_seconds",
        kind="gauge",
        unit="seconds",
        help="Time since the start in which the engine had work.",
        healthy="rises nearly as fast as the clock",
    ),
    Metric(
        name="asyncrl_rollout_idle_ratio",
        kind="gauge",
        unit="ratio",
        help="Share of the time since the start in which the engine had no work.",
        healthy="below 0.2 when rollout is the slower side",
    ),
    Metric(
        name="asyncrl_rollout_generate_seconds",
        kind="histogram",
        unit="seconds",
        buckets=SECONDS,
        help="From a group's admission to its last token.",
        healthy="no long tail",
    ),
    Metric(
        name="asyncrl_rollout_completion_tokens",
        kind="histogram",
        unit="tokens",
        buckets=TOKENS,
        help="Length of completions.",
        healthy="well below data.max_response_length",
    ),
    Metric(
        name="asyncrl_rollout_weight_load_seconds",
        kind="histogram",
        unit="seconds",
        buckets=SECONDS,
        help="Transfer and load of one weight version, waiting for running sequences included.",
        healthy="small against a learner step",
    ),
    Metric(
        name="asyncrl_rollout_update_pause_seconds",
        kind="gauge",
        unit="seconds",
        help="Time since the start in which running sequences stood still for weight updates.",
        healthy="below 5 % of asyncrl_rollout_busy_seconds",
    ),
    Metric(
        name="asyncrl_rollout_lease_fence",
        kind="gauge",
        unit="turns",
        help="Fence of this server's newest turn on the device (trainer.mode=sync).",
        healthy="rises with every step",
    ),
    Metric(
        name="asyncrl_rollout_stale_fences_total",
        kind="counter",
        unit="messages",
        help="Grants and recalls of the device that had been overtaken, and were refused.",
        healthy="0; a few after a restart",
    ),
    Metric(
        name="asyncrl_rollout_asleep_seconds",
        kind="gauge",
        unit="seconds",
        help="Time since the start without the device (trainer.mode=sync).",
        healthy="as long as the learner's steps",
    ),
    Metric(
        name="asyncrl_rollout_sleep_seconds",
        kind="gauge",
        unit="seconds",
        help="The newest falling asleep.",
        healthy="small against a step",
    ),
    Metric(
        name="asyncrl_rollout_wake_seconds",
        kind="gauge",
        unit="seconds",
        help="The newest waking up, parity check included; the first time: loading the model.",
        healthy="small against a step",
    ),
    Metric(
        name="asyncrl_rollout_sleep_bytes",
        kind="gauge",
        unit="bytes",
        help="What left the device at the newest falling asleep.",
        healthy="constant",
    ),
    Metric(
        name="asyncrl_rollout_rss_bytes",
        kind="gauge",
        unit="bytes",
        help="Resident memory of the server process, reward workers not included.",
        healthy="flat after the first steps",
    ),
)
