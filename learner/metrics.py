"""Every metric of the learner: the table behind its Prometheus endpoint and behind docs/metrics.md."""

from __future__ import annotations

from asyncrl.algorithms.diagnostics import QUANTILES
from asyncrl.telemetry.metrics import Metric

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
STALENESS = (0, 1, 2, 3, 4, 6, 8, 16)


def _gauge(name: str, unit: str, help: str, healthy: str, *labels: str) -> Metric:
    return Metric(name=f"asyncrl_learner_{name}", kind="gauge", unit=unit, help=help, healthy=healthy, labels=labels)


METRICS = (
    _gauge("policy_version", "versions", "Weight publications so far.", "rises with every step"),
    Metric(
        name="asyncrl_learner_steps_total",
        kind="counter",
        unit="steps",
        help="Learner steps made by this process.",
        healthy="rises steadily",
    ),
    Metric(
        name="asyncrl_learner_tokens_total",
        kind="counter",
        unit="tokens",
        help="Completion tokens trained on.",
        healthy="rises steadily",
    ),
    Metric(
        name="asyncrl_learner_token_staleness_versions",
        kind="histogram",
        unit="versions",
        buckets=STALENESS,
        help="Per trained token: the learner's version when consumed minus the version that sampled it.",
        healthy="never above learner.max_staleness",
    ),
    Metric(
        name="asyncrl_learner_group_staleness_versions",
        kind="histogram",
        unit="versions",
        buckets=STALENESS,
        help="Per trained group: staleness of its oldest token.",
        healthy="never above learner.max_staleness",
    ),
    Metric(
        name="asyncrl_learner_step_seconds",
        kind="histogram",
        unit="seconds",
        buckets=SECONDS,
        help="One step from the end of the last, waiting included.",
        healthy="steady",
    ),
    Metric(
        name="asyncrl_learner_wait_seconds",
        kind="histogram",
        unit="seconds",
        buckets=SECONDS,
        help="Part of a step spent waiting for groups.",
        healthy="small when rollout keeps up",
    ),
    Metric(
        name="asyncrl_learner_publish_seconds",
        kind="histogram",
        unit="seconds",
        buckets=SECONDS,
        help="Writing one policy version for the servers.",
        healthy="small against a step",
    ),
    _gauge("publish_bytes", "bytes", "Size of one published version.", "constant"),
    _gauge(
        "groups",
        "groups",
        "Training groups by state of the ledger: issued = trained + dropped + buffered + in_flight + waiting.",
        "buffered above 0",
        "state",
    ),
    _gauge("mean_length", "tokens", "Mean trajectory length of groups by state.", "equal", "state"),
    _gauge("staleness_bound", "versions", "Bound that tickets are issued under.", "constant, or moving slowly"),
    _gauge("length_bias", "ratio", "Mean trained length over that of all trained or dropped, minus 1.", "near 0"),
    _gauge("journal_bytes", "bytes", "Size of the journal, its write-ahead log and its groups.", "bounded"),
    _gauge("ledger_residual_groups", "groups", "Issued groups that are in no state.", "0, always"),
    _gauge("parity_max", "nats", "Largest |log-prob of learner - engine| as a server joined.", "below 0.001", "server"),
    _gauge("parity_mean", "nats", "Mean of the same.", "below 0.0001, or 0.03 in bfloat16", "server"),
    _gauge("servers", "servers", "Welcomed rollout servers.", "as many as were started"),
    _gauge("idle_ratio", "ratio", "Share of the last step spent waiting for groups.", "below 0.2"),
    _gauge(
        "reward", "score", "Mean of the last batch, by component; `mean` is the weighted sum.", "rises", "component"
    ),
    _gauge("accuracy", "ratio", "Mean of the accuracy component in the last batch.", "rises"),
    _gauge("held_out_accuracy", "ratio", "Of the last evaluation.", "rises with accuracy"),
    _gauge("rows", "trajectories", "Trajectories of the last batch by status.", "finished dominates", "status"),
    _gauge("zero_variance_groups", "groups", "Groups of the last batch that teach nothing.", "below half"),
    _gauge("completion_tokens", "tokens", "Mean completion length of the last batch.", "no sudden change"),
    _gauge("loss", "nats", "Loss of the last step.", "near 0; its sign means nothing"),
    _gauge("grad_norm", "norm", "Gradient norm before clipping.", "steady"),
    _gauge("learning_rate", "rate", "Of the last step.", "follows the schedule"),
    _gauge("entropy", "nats", "Mean entropy per trained token.", "falls slowly, never to 0"),
    _gauge("reference_kl", "nats", "k3 estimate of KL(learner || reference) per token.", "rises slowly"),
    _gauge("effective_sample_size", "ratio", "Of the raw token ratios learner/behaviour.", "above 0.9"),
    _gauge("mismatch_kl", "nats", "k3 estimate of KL(behaviour || learner) per token.", "below 0.01"),
    _gauge("mismatch_kl_k1", "nats", "k1 estimate of the same; may be negative.", "close to mismatch_kl"),
    _gauge("ratio", "ratio", "Quantiles of the raw token ratios learner/behaviour.", "near 1", "quantile"),
    _gauge("ratio_max", "ratio", "Largest raw token ratio learner/behaviour.", "below 10"),
    _gauge("logprob_diff_max", "nats", "Largest |log-prob of learner - engine|.", "small at staleness 0"),
    _gauge("clip_fraction", "ratio", "Tokens whose gradient the policy loss clips.", "below 0.3"),
    _gauge("mask_fraction", "ratio", "Tokens that the correction and its masks drop.", "below 0.1"),
    _gauge("truncation_fraction", "ratio", "Tokens whose correction weight is cut to its cap.", "below 0.05"),
    *(
        _gauge(f"{name}_by_staleness", unit, f"{name} of the last batch by token staleness.", healthy, "staleness")
        for name, unit, healthy in (
            ("tokens", "tokens", "the bound is not always reached"),
            ("effective_sample_size", "ratio", "falls slowly with staleness"),
            ("mismatch_kl", "nats", "rises slowly with staleness"),
            ("mismatch_kl_k1", "nats", "close to mismatch_kl"),
            ("ratio_p99", "ratio", "rises slowly with staleness"),
            ("ratio_max", "ratio", "below 10"),
            ("logprob_diff_max", "nats", "small at staleness 0"),
            ("clip_fraction", "ratio", "below 0.3"),
            ("mask_fraction", "ratio", "below 0.1"),
            ("truncation_fraction", "ratio", "below 0.05"),
        )
    ),
    _gauge("lease_fence", "turns", "Of its newest turn on the device (trainer.mode=sync).", "rises by two a step"),
    _gauge("asleep_seconds", "seconds", "Part of the last step asleep.", "as long as the server's turns"),
    _gauge("sleep_seconds", "seconds", "Part of the last step spent falling asleep.", "small against a step"),
    _gauge("wake_seconds", "seconds", "Part of the last step spent waking up.", "small against a step"),
    _gauge("sleep_bytes", "bytes", "What left the device at the newest falling asleep.", "constant"),
    _gauge("rss_bytes", "bytes", "Resident memory of the learner process.", "flat after the first steps"),
    _gauge("errors", "errors", "Unusable messages, refused groups, failed tickets.", "0", "kind"),
)

GAUGE_OF_RECORD = {
    "accuracy": "accuracy",
    "zero_variance_groups": "zero_variance_groups",
    "response_length/mean": "completion_tokens",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "entropy": "entropy",
    "reference_kl": "reference_kl",
    "ess": "effective_sample_size",
    "mismatch_kl_k3": "mismatch_kl",
    "mismatch_kl_k1": "mismatch_kl_k1",
    "ratio_max": "ratio_max",
    "logprob_diff_max": "logprob_diff_max",
    "clip_fraction": "clip_fraction",
    "mask_fraction": "mask_fraction",
    "truncation_fraction": "truncation_fraction",
    "idle/learner": "idle_ratio",
    "length_bias": "length_bias",
    "staleness/bound": "staleness_bound",
    "lease_fence": "lease_fence",
    "asleep_s/learner": "asleep_seconds",
    "sleep_s/learner": "sleep_seconds",
    "wake_s/learner": "wake_seconds",
    "sleep_bytes/learner": "sleep_bytes",
}
"""Name in metrics.jsonl -> gauge."""

GAUGE_OF_STALENESS_RECORD = {
    "tokens": "tokens_by_staleness",
    "ess": "effective_sample_size_by_staleness",
    "mismatch_kl_k3": "mismatch_kl_by_staleness",
    "mismatch_kl_k1": "mismatch_kl_k1_by_staleness",
    "ratio/p99": "ratio_p99_by_staleness",
    "ratio_max": "ratio_max_by_staleness",
    "logprob_diff_max": "logprob_diff_max_by_staleness",
    "clip_fraction": "clip_fraction_by_staleness",
    "mask_fraction": "mask_fraction_by_staleness",
    "truncation_fraction": "truncation_fraction_by_staleness",
}
"""Name in metrics.jsonl after `staleness_<bucket>/` -> gauge with the label `staleness`."""

QUANTILE_OF_RECORD = {f"ratio/{name}": str(quantile) for name, quantile in QUANTILES.items()}
"""Name in metrics.jsonl -> label `quantile` of the gauge `ratio`."""
