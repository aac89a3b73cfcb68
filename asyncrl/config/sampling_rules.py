"""Refuses sampling that would make pi_learner / pi_behaviour something else than an importance ratio.

The learner computes log-probs of the full softmax at `rollout.temperature`. The engine's log-probs are those of the
distribution that it samples from, truncation included. A truncated distribution gives a kept token
`1 / Z` of its probability, where `Z` is the mass of the kept tokens. Then:

- `pi_learner / pi_behaviour` is the importance ratio on the kept tokens, and `Z <= 1` even on-policy. Weighing each
  token by it is right there; what was cut off is never sampled, so its share of the gradient is missing (at most
  `1 - top_p` of the probability) and no weight can bring it back.
- Whatever asks of that ratio how far the policies have drifted apart is wrong: products over a sequence vanish
  like `Z^T`, geometric means leave any narrow band, and a clip around the behaviour policy cuts tokens whose policy
  has not moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.config.installed_methods import method_of
from asyncrl.config.run_sections import RunSections

_FIXES = {
    "temperature": "Set rollout.temperature, which the learner reads, too",
    "top_p typical_p": "Set rollout.top_p",
    "top_k": "Set rollout.top_k",
    "min_p": "Set rollout.min_p",
    "logprobs_mode": "Leave it out: log-probs are those of the distribution that is sampled from",
    "logprobs": "Leave it out: the log-prob of each sampled token is always returned",
    "n": "Set batch.group_size",
    "seed": "Set trainer.seed",
    "max_tokens max_new_tokens": "Set data.max_response_length",
    "stop_token_ids": "Stop tokens are those of the model folder: change eos_token_id in its generation_config.json",
    "logit_bias bad_words allowed_token_ids": "Leave it out: the learner knows of no such restriction",
    "repetition_penalty presence_penalty frequency_penalty": (
        "Leave it out: the learner knows of no penalty. Use a reward instead"
    ),
    "do_sample": "Leave it out: training samples, and evaluation.temperature=0 is greedy",
    "num_beams": "Leave it out: beams are no samples of the policy",
    "min_tokens ignore_eos": "Leave it out: it bans the stop token, of which the learner knows nothing",
    "override_generation_config sampling_params": "Set the keys of `rollout` instead",
}
ENGINE_SAMPLING_KEYS = {name: fix for names, fix in _FIXES.items() for name in names.split()}
"""Names in `rollout.engine_args` that change what is sampled behind the learner's back, and where they belong."""

WEIGHTS_OF_TRUNCATED_SAMPLES = ("none", "token_tis", "token_mis", "icepop")
"""Values of algorithm.correction.kind that weigh each token by its own ratio, or not at all."""
MASKS_OF_TRUNCATED_SAMPLES = ("veto",)
"""Masks whose bound is far below any kept mass."""
PROXIMAL_OF_TRUNCATED_SAMPLES = ("recompute", "target")
"""Values of algorithm.proximal that are policies over the whole vocabulary."""
DRIFT_SELECTIONS = ("m2po",)
UNTRUNCATED = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Keys of `rollout` that cut off a part of the distribution, and the values at which they do not."""


def sampling_problems(config: RunSections) -> Iterator[str]:
    """Name each setting under which the learner's ratio would be wrong, with its fix."""
    rollout = config.rollout
    for place, fix in _sampling_arguments(rollout.engine_args):
        yield f"rollout.engine_args has {place}, which would change what is sampled without the learner knowing. {fix}"
    cut = [name for name, off in UNTRUNCATED.items() if getattr(rollout, name) != off]
    given = ", ".join(f"rollout.{name}={getattr(rollout, name):g}" for name in cut)
    untruncated = ", ".join(f"rollout.{name}={UNTRUNCATED[name]}" for name in cut)
    for setting, fix in _drift_measures(config) if cut else ():
        yield (
            f"{setting} and {given}: with truncated sampling pi_learner / pi_behaviour is below 1 by "
            f"the mass that was cut off, which this takes for a policy that has drifted. {fix}, or sample untruncated "
            f"({untruncated})"
        )


def _drift_measures(config: RunSections) -> Iterator[tuple[str, str]]:
    """Settings that ask of the ratio how far the policies are apart, each with what to set instead."""
    algorithm = config.algorithm
    kind = algorithm.correction.kind
    if kind not in WEIGHTS_OF_TRUNCATED_SAMPLES:
        allowed = ", ".join(WEIGHTS_OF_TRUNCATED_SAMPLES)
        yield f"algorithm.correction.kind is {kind}", f"Set algorithm.correction.kind to one of {allowed}"
    for mask in algorithm.correction.masks:
        if mask.kind not in MASKS_OF_TRUNCATED_SAMPLES:
            yield f"algorithm.correction.masks has {mask.kind}", "Leave that mask out"
    for selection in algorithm.selections:
        if selection in DRIFT_SELECTIONS:
            yield f"algorithm.selections has {selection}", "Leave that selection out"
    if algorithm.proximal not in PROXIMAL_OF_TRUNCATED_SAMPLES:
        yield f"algorithm.proximal is {algorithm.proximal}", "Set algorithm.proximal=recompute"
    if (loss := method_of("policy_loss", algorithm.policy_loss)) and loss.weighs_behaviour:
        yield f"algorithm.policy_loss is {loss.name}", "Set algorithm.policy_loss=ppo"


def _sampling_arguments(engine_args: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Find sampling keys at any depth of a mapping: each with its place and the fix."""
    for name, value in engine_args.items() if isinstance(engine_args, dict) else ():
        if name in ENGINE_SAMPLING_KEYS:
            yield f"{prefix}{name}", ENGINE_SAMPLING_KEYS[name]
        else:
            yield from _sampling_arguments(value, f"{prefix}{name}.")
