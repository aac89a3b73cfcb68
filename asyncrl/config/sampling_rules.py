"""Refuses sampling that would make pi_learner / pi_behaviour something else than an importance ratio.

The learner computes log-probs of the full softmax at `rollout.temperature`. The engine's log-probs are those of the
distribution that it samples from, truncation included (*processed*). A truncated distribution gives a kept token
`1 / Z` of its probability, where `Z` is the mass of the kept tokens. Then:

- `pi_learner / pi_behaviour` is the importance ratio on the kept tokens, and `Z <= 1` even on-policy. Weighing each
  token by it is right there; what was cut off is never sampled, so its share of the gradient is missing (at most
  `1 - top_p` of the probability) and no weight can bring it back.
- Whatever asks of that ratio how far the policies have drifted apart is wrong: products over a sequence vanish
  like `Z^T`, geometric means leave any narrow band, and a clip around the behaviour policy cuts tokens whose policy
  has not moved.
- With log-probs before truncation (*raw*) the ratio is 1 on-policy, but it is not that of the sampled tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

ENGINE_SAMPLING_KEYS = {
    "temperature": "Set rollout.temperature, which the learner reads, too",
    "top_p": "Set rollout.top_p",
    "top_k": "Set rollout.top_k",
    "min_p": "Set rollout.min_p",
    "logprobs_mode": "Set rollout.logprobs",
    "logprobs": "Leave it out: the log-prob of each sampled token is always returned",
    "n": "Set batch.group_size",
    "seed": "Set trainer.seed",
    "max_tokens": "Set data.max_response_length",
    "max_new_tokens": "Set data.max_response_length",
    "stop_token_ids": "Stop tokens are those of the model folder's generation_config.json",
    "logit_bias": "Leave it out: the learner knows of no bias",
    "bad_words": "Leave it out: the learner knows of no banned words",
    "allowed_token_ids": "Leave it out: the learner knows of no restriction",
    "repetition_penalty": "Leave it out: the learner knows of no penalty. Use a reward instead",
    "presence_penalty": "Leave it out: the learner knows of no penalty. Use a reward instead",
    "frequency_penalty": "Leave it out: the learner knows of no penalty. Use a reward instead",
    "typical_p": "Leave it out, or set rollout.top_p",
    "do_sample": "Leave it out: training samples, and evaluation.temperature=0 is greedy",
    "num_beams": "Leave it out: beams are no samples of the policy",
    "min_tokens": "Leave it out: it bans the stop token, of which the learner knows nothing",
    "ignore_eos": "Leave it out: it bans the stop token, of which the learner knows nothing",
    "override_generation_config": "Set the keys of `rollout` instead",
    "sampling_params": "Set the keys of `rollout` instead",
}
"""Names in `rollout.engine_args` that change what is sampled behind the learner's back, and where they belong."""

WEIGHTS_OF_TRUNCATED_SAMPLES = ("none", "token_tis", "token_mis", "icepop")
"""Values of algorithm.correction.kind that weigh each token by its own ratio, or not at all."""
MASKS_OF_TRUNCATED_SAMPLES = ("veto",)
"""Masks whose bound is far below any kept mass."""
PROXIMAL_OF_TRUNCATED_SAMPLES = ("recompute", "target")
"""Values of algorithm.proximal that are policies over the whole vocabulary."""


UNTRUNCATED = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Keys of `rollout` that cut off a part of the distribution, and the values at which they do not."""


def sampling_problems(config: RunConfig) -> list[str]:
    """One line for each setting under which the learner's ratio would be wrong, with its fix."""
    rollout = config.rollout
    problems = [
        f"rollout.engine_args has {place}, which would change what is sampled without the learner knowing. {fix}"
        for place, fix in _hidden(rollout.engine_args)
    ]
    cut = [name for name, off in UNTRUNCATED.items() if getattr(rollout, name) != off]
    named = ", ".join(f"rollout.{name}={getattr(rollout, name):g}" for name in cut)
    untruncated = ", ".join(f"rollout.{name}={UNTRUNCATED[name]}" for name in cut)
    if cut and rollout.logprobs == "raw":
        problems.append(
            f"rollout.logprobs is raw and {named}: log-probs before truncation are not those of the sampled "
            "distribution, and every importance ratio would be wrong. Set rollout.logprobs=processed, or sample "
            f"untruncated ({untruncated})"
        )
    if rollout.logprobs == "raw" and rollout.temperature != 1:
        problems.append(
            f"rollout.logprobs is raw and rollout.temperature={rollout.temperature:g}: log-probs before the "
            "temperature are not those of the sampled distribution, and every importance ratio would be wrong. "
            "Set rollout.logprobs=processed or rollout.temperature=1"
        )
    problems += [
        f"{setting} and {named}: with truncated sampling pi_learner / pi_behaviour is below 1 by the mass that was cut "
        f"off, which this takes for a policy that has drifted. {fix}, or sample untruncated ({untruncated})"
        for setting, fix in (_takes_truncation_for_drift(config) if cut else ())
    ]
    return problems


def _takes_truncation_for_drift(config: RunConfig) -> list[tuple[str, str]]:
    """Settings that ask of the ratio how far the policies are apart, each with what to set instead."""
    found: list[tuple[str, str]] = []
    algorithm = config.algorithm
    kind, masks = algorithm.correction.kind, [mask.kind for mask in algorithm.correction.masks]
    if kind not in WEIGHTS_OF_TRUNCATED_SAMPLES:
        allowed = ", ".join(WEIGHTS_OF_TRUNCATED_SAMPLES)
        found.append((f"algorithm.correction.kind is {kind}", f"Set algorithm.correction.kind to one of {allowed}"))
    for mask in masks:
        if mask not in MASKS_OF_TRUNCATED_SAMPLES:
            found.append((f"algorithm.correction.masks has {mask}", "Leave that mask out"))
    if algorithm.proximal not in PROXIMAL_OF_TRUNCATED_SAMPLES:
        found.append((f"algorithm.proximal is {algorithm.proximal}", "Set algorithm.proximal=recompute"))
    if config.learner.max_staleness == "auto":
        found.append(("learner.max_staleness is auto", "Set learner.max_staleness to a number"))
    if algorithm.policy_loss == "dppo":
        found.append(("algorithm.policy_loss is dppo", "Set algorithm.policy_loss=ppo"))
    return found


def _hidden(engine_args: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Sampling keys at any depth of a mapping: where, and the fix."""
    if not isinstance(engine_args, dict):
        return []
    found: list[tuple[str, str]] = []
    for name, value in engine_args.items():
        if name in ENGINE_SAMPLING_KEYS:
            found.append((f"{prefix}{name}", ENGINE_SAMPLING_KEYS[name]))
        else:
            found += _hidden(value, f"{prefix}{name}.")
    return found
