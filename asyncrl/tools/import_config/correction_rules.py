"""Rules of verl's section `algorithm.rollout_correction`: a weight by policy / rollout policy, and rejection by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.tools.import_config.derived_rules import (
    Outcome,
    Rule,
    Values,
    becomes,
    lost,
    no_setting,
    only_one,
    read_with,
)

SECTION = "algorithm.rollout_correction."
_WEIGHTS = {"token": "token_tis", "sequence": "sequence_tis"}
_MASKS = {"seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_CAP = 2.0
"""Default of verl's `rollout_is_threshold`."""
_BYPASSED = "in bypass_mode the ratio of the loss is that to the rollout policy, by which nothing else weighs here"


def weight(value: str, theirs: Values) -> Outcome:
    """`rollout_is`: a truncated weight."""
    if theirs.get(SECTION + "bypass_mode"):
        return no_setting(_BYPASSED)
    if value not in _WEIGHTS:
        return lost(f"there are {' and '.join(_WEIGHTS)}")
    if "token_k1" in _listed(theirs.get(SECTION + "rollout_rs")):
        return no_setting("read with rollout_rs")
    settings = {"algorithm.correction.kind": _WEIGHTS[value], "algorithm.correction.cap": _cap(theirs)}
    return becomes(settings, f"truncated importance sampling per {value}")


def rejection(value: Any, theirs: Values) -> Outcome:
    """`rollout_rs`: masks of trajectories, or bounds of a token's own weight. Their k1 is log rollout / policy: a bound
    of it is one of the inverse ratio."""
    kinds = _listed(value)
    bounds = _listed(theirs.get(SECTION + "rollout_rs_threshold"))
    if theirs.get(SECTION + "bypass_mode"):
        return lost(_BYPASSED)
    if len(bounds) not in (1, len(kinds)):
        return lost(f"rollout_rs_threshold has {len(bounds)} bounds for {len(kinds)} kinds")
    settings: dict[str, Any] = {} if theirs.get(SECTION + "rollout_is") else {"algorithm.correction.kind": "none"}
    masks: list[dict[str, Any]] = []
    for kind, text in zip(kinds, bounds if len(bounds) == len(kinds) else bounds * len(kinds), strict=True):
        lower, upper = _ratios(text)
        if kind in _MASKS:
            masks.append({"kind": _MASKS[kind], "lower": lower, "upper": upper})
        elif kind != "token_k1":
            return lost(f"there are token_k1, {', '.join(_MASKS)}")
        elif theirs.get(SECTION + "rollout_is") != "token" or upper > _cap(theirs):
            return lost(
                "a token is rejected by the bounds of its own weight: token_k1 goes with rollout_is token, and an "
                "upper bound that is not above rollout_is_threshold"
            )
        else:
            settings |= {"algorithm.correction.kind": "token_mis"}
            settings |= {"algorithm.correction.lower": lower, "algorithm.correction.upper": upper}
    settings |= {"algorithm.correction.masks": masks} if masks else {}
    return becomes(settings, "rejected tokens keep their place in the loss's denominators")


def bypass(value: bool, theirs: Values) -> Outcome:
    if not value:
        return no_setting("as here")
    if theirs.get(SECTION + "loss_type", "ppo_clip") != "ppo_clip":
        return lost("that policy gradient is algorithm.policy_loss=gpg with algorithm.correction.kind=token_tis")
    settings = {"algorithm.proximal": "behaviour", "algorithm.correction.kind": "none"}
    return becomes(settings, "the ratio is to the policy that sampled")


def other(value: Any, _: Values) -> Outcome:
    return lost("it is not among the corrections (algorithm.correction)") if value else no_setting("off there")


def _cap(theirs: Values) -> float:
    return float(theirs.get(SECTION + "rollout_is_threshold") or _CAP)


def _listed(value: Any) -> list[str]:
    """Names or bounds, which they separate by commas."""
    several = value if isinstance(value, list) else str(value).split(",")
    return [] if value is None else [str(one).strip() for one in several]


def _ratios(text: str) -> tuple[float, float]:
    """Bounds of policy / rollout policy, from `low_high` of the inverse; one number h is 1/h and h."""
    low, _, high = text.partition("_")
    return (1 / float(high), 1 / float(low)) if high else (1 / float(low), float(low))


RULES: Mapping[str, Rule] = {
    SECTION + "rollout_is": weight,
    SECTION + "rollout_is_threshold": read_with("rollout_is"),
    SECTION + "rollout_is_batch_normalize": only_one(False, "off", "weights are not divided by their mean"),
    SECTION + "rollout_rs": rejection,
    SECTION + "rollout_rs_threshold": read_with("rollout_rs"),
    SECTION + "bypass_mode": bypass,
    SECTION + "loss_type": read_with("bypass_mode"),
}
