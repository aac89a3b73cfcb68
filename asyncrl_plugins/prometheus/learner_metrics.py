"""Every metric of the learner: the table behind its Prometheus endpoint, docs/metrics.md and the dashboards."""

from __future__ import annotations

from asyncrl.algorithms.diagnostics import QUANTILES
from asyncrl_plugins.prometheus.metric_set import Metric, ServiceMetrics

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
STALENESS = (0, 1, 2, 3, 4, 6, 8, 16)

_BY_STALENESS = (
    ("tokens", "tokens", "tokens", "the bound is not always reached"),
    ("ess", "effective_sample_size", "ratio", "falls slowly with staleness"),
    ("mismatch_kl_k3", "mismatch_kl", "nats", "rises slowly with staleness"),
    ("ratio/p99", "ratio_p99", "ratio", "rises slowly with staleness"),
    ("clip_fraction", "clip_fraction", "ratio", "below 0.3"),
    ("mask_fraction", "mask_fraction", "ratio", "below 0.1"),
    ("truncation_fraction", "truncation_fraction", "ratio", "below 0.05"),
)
"""Diagnostics by token staleness: name in metrics.jsonl after `staleness_<bucket>/`, gauge, unit, healthy."""


_learner = ServiceMetrics("asyncrl_learner_")
_gauge, _read, _counter = _learner.gauge, _learner.gauge_set_on_scrape, _learner.counter


def _seconds(name: str, help: str, healthy: str, buckets: tuple[float, ...] = SECONDS) -> Metric:
    return _learner.histogram(f"{name}_seconds", "seconds", buckets, help, healthy)


def _versions(name: str, help: str, healthy: str) -> Metric:
    return _learner.histogram(f"{name}_versions", "versions", STALENESS, help, healthy)


METRICS = (
    # progress
    _gauge("policy_version", "versions", "Weight publications so far.", "rises with every step"),
    _gauge("total_steps", "steps", "Steps of the whole run; fewer where filters use the data up.", "constant"),
    _gauge("step", "steps", "Steps of the run so far, those before a restart included.", "rises steadily"),
    _counter("steps", "steps", "Learner steps made by this process.", "rises steadily"),
    _counter("tokens", "tokens", "Tokens of trajectories in finished steps, without observations.", "rises steadily"),
    _counter("trajectories", "trajectories", "Trajectories consumed, by status.", "finished dominates", "status"),
    _counter("groups_consumed", "groups", "Groups consumed by steps.", "rises steadily"),
    _gauge("model_flops", "FLOP/s", "Speed of the last step's learning: parameters x tokens x 6, or less.", "steady"),
    _gauge(
        "mfu",
        "ratio",
        "Model FLOPs utilisation: model_flops over the device's peak, where that is known.",
        "steady; 0.2 to 0.5",
    ),
    _gauge("bad_rows", "rows", "Rows of the data that the run leaves out (bad_rows.jsonl).", "0", "source"),
    # learning
    _gauge(
        "reward",
        "score",
        "Mean reward of the last batch, by component; `mean` is the weighted sum.",
        "rises",
        "component",
    ),
    _gauge("accuracy", "ratio", "Mean of the accuracy component in the last batch.", "rises"),
    _gauge("held_out_accuracy", "ratio", "Accuracy in the last evaluation.", "rises with accuracy"),
    _gauge("held_out_best", "ratio", "The best held-out accuracy of the run so far.", "held_out_accuracy"),
    _gauge("held_out_rows", "rows", "Rows with a score in the last evaluation.", "constant"),
    _gauge("held_out_reward", "score", "Mean reward of the last evaluation.", "rises with reward"),
    _gauge(
        "held_out_seconds",
        "seconds",
        "Wall-clock time of the last evaluation, beside training or not; waiting_seconds_total has what the learner "
        "waited for it.",
        "steady; below the time between two",
    ),
    _gauge("rows", "trajectories", "Trajectories of the last batch by status.", "finished dominates", "status"),
    _gauge("baseline_reward", "score", "Mean reward of the last batch's greedy completions (remax).", "rises"),
    _gauge("baselines_missing", "groups", "Groups not trained: their greedy completion has no score.", "0"),
    _gauge("zero_variance_groups", "groups", "Groups of the last batch that teach nothing.", "below half"),
    _gauge("filtered_ratio", "ratio", "Share of the last step's groups that filters dropped.", "steady, below 0.8"),
    _gauge("replayed_groups", "groups", "Groups of the last batch from the replay buffer.", "below half"),
    _gauge("completion_tokens", "tokens", "Mean completion length of the last batch.", "no sudden change"),
    _gauge("loss", "nats", "Loss of the last step.", "near 0; its sign means nothing"),
    _gauge("grad_norm", "norm", "Gradient norm before clipping.", "steady"),
    _gauge("loss_scale", "factor", "Factor of the loss in float16 (model.dtype).", "rises, or falls seldom"),
    _gauge("skipped_updates", "ratio", "Share of the last step's updates left out: float16 overflowed.", "0, seldom 1"),
    _gauge("learning_rate", "rate", "Learning rate of the last step.", "follows the schedule"),
    _gauge("entropy", "nats", "Mean entropy per trained token.", "falls slowly, never to 0"),
    _gauge("reference_kl", "nats", "KL(learner || reference) per token, by algorithm.kl_estimator.", "rises slowly"),
    _gauge("kl_coefficient", "", "Weight of that KL in the loss, or else in the reward.", "constant, or moving slowly"),
    _gauge("entropy_coefficient", "", "Weight of the entropy bonus.", "constant, or moving slowly"),
    _gauge("supervised_loss", "nats", "Part of the last step's loss that is of inserted tokens.", "falls"),
    _gauge("supervised_weight", "", "Weight of the inserted tokens' negative log-likelihood.", "follows the method"),
    _gauge("inserted_tokens", "tokens", "Inserted tokens in an update, such as hints.", "follows the method"),
    _gauge("inserted_logprob", "nats", "Mean log-prob of these tokens to the learner.", "rises"),
    _gauge("critic_loss", "", "Half the squared error of the critic's values, clipped.", "falls"),
    _gauge("critic_explained_variance", "ratio", "Variance of the returns that the critic's values explain.", "rises"),
    _gauge("microbatch_tokens", "tokens", "Token budget of micro-batches, where it is not as configured.", "constant"),
    _gauge("checkpointed_layers", "layers", "Layers that the backward pass computes again, by a budget.", "constant"),
    _gauge("memory_failures", "failures", "Passes of the last step that found no memory and began again.", "0"),
    _gauge("vision_images", "images", "Images that the passes of the last step have asked features of.", "steady"),
    _gauge("vision_reused", "ratio", "Share of them whose features were kept.", "above 0.5 with several passes"),
    # off-policyness
    _versions(
        "token_staleness",
        "Staleness of each trained token: the learner's version when consumed minus the version that sampled it.",
        "never above learner.max_staleness",
    ),
    _versions(
        "group_staleness", "Staleness of each trained group's oldest token.", "never above learner.max_staleness"
    ),
    _gauge("staleness_bound", "versions", "Bound that tickets are issued under.", "constant, or moving slowly"),
    _gauge(
        "effective_sample_size",
        "ratio",
        "Effective sample size of the raw token ratios learner/behaviour.",
        "above 0.9",
    ),
    _gauge("mismatch_kl", "nats", "k3 estimate of KL(behaviour || learner) per token.", "below 0.01"),
    _gauge(
        "mismatch_kl_k1",
        "nats",
        "k1 estimate of KL(behaviour || learner) per token; may be negative.",
        "close to mismatch_kl",
    ),
    _gauge("ratio", "ratio", "Quantiles of the raw token ratios learner/behaviour.", "near 1", "percentile"),
    _gauge("ratio_max", "ratio", "Largest raw token ratio learner/behaviour.", "below 10"),
    _gauge("logprob_diff_max", "nats", "Largest |log-prob of learner - engine|.", "small at staleness 0"),
    _gauge("clip_fraction", "ratio", "Tokens whose gradient the policy loss clips.", "below 0.3"),
    _gauge("mask_fraction", "ratio", "Tokens that the correction and its masks drop.", "below 0.1"),
    _gauge("truncation_fraction", "ratio", "Tokens whose correction weight is cut to its cap.", "below 0.05"),
    _gauge(
        "parity_max",
        "nats",
        "Largest |log-prob of learner - engine| in the newest check of a server.",
        "below 0.001",
        "server",
    ),
    _gauge(
        "parity_mean",
        "nats",
        "Mean |log-prob of learner - engine| in the newest check of a server.",
        "below 0.0001, or 0.03 in bfloat16",
        "server",
    ),
    *(
        _gauge(f"{gauge}_by_staleness", unit, f"{gauge} of the last batch by token staleness.", healthy, "staleness")
        for _, gauge, unit, healthy in _BY_STALENESS
    ),
    # time
    _seconds("step", "Duration of one step from the end of the last, waiting included.", "steady"),
    _seconds("wait", "Part of a step spent waiting for groups.", "small when rollout keeps up"),
    _seconds("learn", "Part of a step from the batch to the new weights.", "most of a step"),
    _counter("waiting_seconds", "seconds", "Time that the main thread stood still, by reason.", "groups least", "for"),
    _counter(
        "checkpoint_seconds",
        "seconds",
        "Time of checkpoints: `blocked`, in which training stood still, and `write`, most of it beside training.",
        "blocked far below write",
        "part",
    ),
    _read(
        "last_step_age_seconds",
        "seconds",
        "Time since the end of the last step; before the first, since this process was ready to make one.",
        "below a few steps, an evaluation and a checkpoint",
    ),
    _gauge("idle_ratio", "ratio", "Share of the last step spent waiting for groups.", "below 0.2"),
    # ranks of a learner of several processes
    _gauge(
        "rank_busy_seconds",
        "seconds",
        "Part of the last step in which a rank computed micro-batches of its own.",
        "as long on all ranks",
        "rank",
    ),
    _gauge("rank_tokens", "tokens", "Tokens that a rank packed for its passes in the last step.", "alike", "rank"),
    _gauge(
        "rank_peak_bytes",
        "bytes",
        "Peak of a rank's memory: of tensors on its GPU in the last step, or else resident so far.",
        "flat after the first steps, alike",
        "rank",
    ),
    # the ledger and the journal
    _gauge(
        "groups",
        "groups",
        "Training groups by state of the ledger: issued = trained + dropped + buffered + in_flight + waiting; dropped "
        "ones by reason, `dropped_stale` and those of algorithm.filters.",
        "buffered above 0",
        "state",
    ),
    _read("ledger_residual_groups", "groups", "Issued groups that are in no state.", "0, always"),
    _gauge("mean_length", "tokens", "Mean trajectory length of groups by state.", "equal", "state"),
    _gauge("length_bias", "ratio", "Mean trained length over that of all trained or dropped, minus 1.", "near 0"),
    _read("oldest_ticket_seconds", "seconds", "Age of the oldest group that a step waits for.", "below a step or two"),
    _read(
        "ticket_deadline_seconds",
        "seconds",
        "Time after which a training ticket goes to another server, too: 3 times what recent groups took, or more.",
        "a few times what a group takes",
    ),
    _counter(
        "tickets_returned",
        "tickets",
        "Tickets that a leaving server gave back with what it had sampled of them.",
        "0, or few",
    ),
    _counter("tokens_returned", "tokens", "Sampled tokens of such tickets, not sampled again.", "0, or few"),
    _counter("tickets_reissued", "tickets", "Tickets that another server got, too: the first was late.", "0, or few"),
    _counter(
        "duplicate_groups",
        "groups",
        "Groups of such tickets that came second and were put aside.",
        "at most tickets_reissued",
    ),
    _seconds(
        "journal_lag",
        "Time from the verification of a group until it is durable and acknowledged.",
        "below 0.1",
        SHORT_SECONDS,
    ),
    # weights
    _seconds("publish", "Time to write one policy version for the servers.", "small against a step"),
    _gauge("publish_bytes", "bytes", "Size of one published version.", "constant"),
    _counter(
        "weights_sent_bytes",
        "bytes",
        "Bytes of weights sent over ZeroMQ.",
        "at most one version for each server and published one",
    ),
    # memory and disks
    _read("rss_bytes", "bytes", "Resident memory of the learner process.", "flat after the first steps"),
    _learner.device_memory(),
    _read("shared_memory_bytes", "bytes", "Published versions in shared memory.", "two versions"),
    _read("shared_memory_free_bytes", "bytes", "Free bytes in /dev/shm.", "above one version"),
    _read(
        "journal_bytes",
        "bytes",
        "Size of the journal, its write-ahead log and its groups, kept samples included.",
        "bounded",
    ),
    _read("disk_free_bytes", "bytes", "Free bytes on the file system of the run directory.", "above a few checkpoints"),
    _read("disk_size_bytes", "bytes", "Size of the file system of the run directory.", "constant"),
    # turns on a shared device
    _gauge(
        "lease_fence",
        "turns",
        "Fence number of the learner's newest device lease (trainer.mode=sync).",
        "rises by two a step",
    ),
    _gauge("asleep_seconds", "seconds", "Part of the last step asleep.", "as long as the server's turns"),
    _gauge("sleep_seconds", "seconds", "Part of the last step spent falling asleep.", "small against a step"),
    _gauge("wake_seconds", "seconds", "Part of the last step spent waking up.", "small against a step"),
    _gauge("sleep_bytes", "bytes", "Bytes that left the device at the newest falling asleep.", "constant"),
    # health
    _read("servers", "servers", "Welcomed rollout servers.", "as many as were started"),
    _read("pulse_age_seconds", "seconds", "Time since the network thread last looked at its sockets.", "below 5"),
    _gauge("stopped", "runs", "1 once the run has stopped, by kind (finished, bad_state, ...).", "finished", "kind"),
    _counter(
        "not_finite",
        "numbers",
        "Losses, gradient norms and other numbers of a step that were not finite, by name; of the first two the run "
        "stops.",
        "0, always",
        "number",
    ),
    _counter("errors", "errors", "Unusable messages, refused groups, failed tickets, lost servers.", "0", "kind"),
)

GAUGE_OF_RECORD = {
    "response_length/mean": "completion_tokens",
    "lr": "learning_rate",
    "ess": "effective_sample_size",
    "filtered_share": "filtered_ratio",
    "baseline/reward": "baseline_reward",
    "baseline/missing": "baselines_missing",
    "kl_coef": "kl_coefficient",
    "entropy_coeff": "entropy_coefficient",
    "loss/supervised": "supervised_loss",
    "inserted/tokens": "inserted_tokens",
    "inserted/logprob": "inserted_logprob",
    "critic/loss": "critic_loss",
    "critic/explained_variance": "critic_explained_variance",
    "mismatch_kl_k3": "mismatch_kl",
    "memory/tokens_per_microbatch": "microbatch_tokens",
    "memory/checkpointed_layers": "checkpointed_layers",
    "memory/failures": "memory_failures",
    "vision/images": "vision_images",
    "vision/reused": "vision_reused",
    "idle/learner": "idle_ratio",
    "model_flops_per_s": "model_flops",
    "staleness/bound": "staleness_bound",
    "asleep_s/learner": "asleep_seconds",
    "sleep_s/learner": "sleep_seconds",
    "wake_s/learner": "wake_seconds",
    "sleep_bytes/learner": "sleep_bytes",
} | {
    name: name
    for name in (
        *("accuracy", "zero_variance_groups", "loss", "grad_norm", "entropy", "reference_kl", "mismatch_kl_k1"),
        *("ratio_max", "logprob_diff_max", "clip_fraction", "mask_fraction", "truncation_fraction"),
        *("length_bias", "lease_fence", "supervised_weight", "replayed_groups"),
    )
}
"""Name in metrics.jsonl -> gauge."""

GAUGE_OF_STALENESS_RECORD = {name: f"{gauge}_by_staleness" for name, gauge, *_ in _BY_STALENESS}
"""Name in metrics.jsonl after `staleness_<bucket>/` -> gauge with the label `staleness`."""

GAUGE_OF_RANK_RECORD = {
    "rank_busy_s": ("rank_busy_seconds", 1),
    "rank_tokens": ("rank_tokens", 1),
    "rank_peak_gib": ("rank_peak_bytes", 2**30),
}
"""Name in metrics.jsonl before `/<rank>` -> gauge with the label `rank`, and its unit's factor."""

PERCENTILE_OF_RECORD = {f"ratio/{name}": name for name in QUANTILES}
"""Name in metrics.jsonl -> label `percentile` of the gauge `ratio`. (`quantile` is reserved for summaries.)"""
