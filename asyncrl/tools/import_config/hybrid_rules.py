"""Rules of RLLaVA's losses that learn from demonstrations, and of the keys that go with them.

There a rollout processor puts a prefix in front of completions: a whole demonstration with a ratio of 1, a hint with a
smaller one. Here demonstrations are members of their group (`algorithm.demonstrations.rows`), hints its segments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.config.methods import methods
from asyncrl.tools.import_config.derived_rules import (
    Outcome,
    Rule,
    Values,
    absent,
    becomes,
    lost,
    no_counterpart,
    no_setting,
    other_values,
    same,
)
from asyncrl.tools.import_config.names import LOSSES

WHOLE, HYBRIDS = ("luffy", "srft"), ("luffy", "uft", "hpt", "srft")
"""Losses whose prefixes are whole demonstrations, and all that have any."""
PLUGIN = "no built-in: algorithm.policy_loss=file.py:function (docs/bring-your-own.md)"
_THEIR_DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "algorithm.norm_adv_by_std_in_grpo": ("norm_adv_by_std", True),
    "actor.loss_agg_mode": ("loss_agg_mode", "token-mean"),
    "actor.entropy_coeff": ("entropy_coeff", 0.0),
}
"""Foreign defaults of keys for which a loss of demonstrations has its own defaults here."""
_RESHAPE = re.compile(r"p_div_p_(0?\.\d+)")


def _loss(theirs: Values) -> str:
    return str(theirs.get("actor.policy_loss.loss_mode", ""))


def policy_loss(value: str, theirs: Values) -> Outcome:
    """One that learns from demonstrations brings its paper's defaults here, which theirs replace."""
    if value == "sft":
        return lost("supervised training is a stage of its own: asyncrl sft")
    if value not in HYBRIDS:
        return other_values("algorithm.policy_loss", LOSSES, PLUGIN)(value, theirs)
    own = methods("policy_loss")[value].defaults
    settings: dict[str, Any] = {"algorithm.policy_loss": value}
    if value == "uft":
        settings["algorithm.demonstrations.hints.segments"] = own["demonstrations"]["hints"]["segments"]
    settings |= {
        f"algorithm.{ours}": default
        for key, (ours, default) in _THEIR_DEFAULTS.items()
        if ours in own and key not in theirs
    }
    if value == "luffy" and "actor.off_policy_reshape" not in theirs:
        return becomes(settings, "with the paper's shape p / (p + 0.1), as no off_policy_reshape is given")
    return becomes(settings, "its own keys, and their defaults where the paper's are others")


def _of(losses: tuple[str, ...], rule: Rule) -> Rule:
    """Rule: read by these losses alone."""
    off = no_setting(f"read by {', '.join(losses)} alone")
    return lambda value, theirs: rule(value, theirs) if _loss(theirs) in losses else off


def _as_paper(value: Any, why: str) -> Rule:
    """Rule: one value is what is done here, any other one is another loss."""
    return lambda given, _: no_setting("as here") if given == value else lost(why)


def prefixes(value: int, theirs: Values) -> Outcome:
    """Completions of a group that begin with a prefix; -1 is all of them."""
    if _loss(theirs) == "uft":
        if value in (-1, theirs.get("rollout.n")):
            return no_setting("every completion of a group begins with a hint")
        return lost("every completion of a group begins with a hint here")
    if value < 1:
        return lost("all completions would be demonstrations; here some of a group are: algorithm.demonstrations.rows")
    return becomes({"algorithm.demonstrations.rows": value}, "completions of a group that are its demonstration")


def prefix_strategy(value: str, theirs: Values) -> Outcome:
    if value == "none":
        return lost(f"{_loss(theirs)} without demonstrations is another loss, such as algorithm.policy_loss=ppo")
    if _loss(theirs) == "uft":
        return no_counterpart("hints get shorter along half a cosine, by segments (algorithm.demonstrations.hints)")
    return no_setting("a demonstration is whole")


def prefix_ratio(value: float, theirs: Values) -> Outcome:
    """Share of a demonstration that is put in front of a completion."""
    if _loss(theirs) == "uft":
        return no_counterpart("a segment's first and last probability: algorithm.demonstrations.hints.high and low")
    if value == 1:
        return no_setting("a demonstration is whole")
    return lost("a demonstration is whole here; parts of one are the hints of algorithm.policy_loss=uft")


def shared_prefix(value: bool, theirs: Values) -> Outcome:
    if value and _loss(theirs) == "uft":
        return lost("each completion of a group draws its own hint")
    return no_setting("each completion draws its own hint; a whole demonstration is the same for all")


def switch(value: str, theirs: Values) -> Outcome:
    if _loss(theirs) != "hpt":
        return no_setting("off there") if value == "none" else lost("it is the switch of algorithm.policy_loss=hpt")
    if value == "switch":
        return becomes({"algorithm.demonstrations.rows": 1}, "one completion of each group is its demonstration")
    return lost("hpt has its hard gate here: groups learn from what they sampled or from their demonstration")


def gate(value: float, theirs: Values) -> Outcome:
    """Right completions up to which a group learns from its demonstration: a number there, a share of the sampled ones
    here, which lies between that number and the next one."""
    sampled = int(theirs.get("rollout.n", 1)) - 1
    if not value:
        return becomes({"algorithm.hpt.gate": 0.0})
    if value != int(value) or value >= sampled:
        return lost(f"a number of right completions below the {sampled} that are sampled is expected")
    return becomes({"algorithm.hpt.gate": (value + 0.5) / sampled}, f"more than {value} of {sampled} sampled rows")


def reshape(value: str, _: Values) -> Outcome:
    if found := _RESHAPE.fullmatch(value):
        return becomes({"algorithm.luffy_gamma": float(found[1])}, "the shape p / (p + gamma)")
    return lost("the shape of a demonstration's tokens is p / (p + algorithm.luffy_gamma)")


def supervised_weight(value: float, theirs: Values) -> Outcome:
    loss = _loss(theirs)
    if loss in ("uft", "hpt"):
        return becomes({"algorithm.uft_coef" if loss == "uft" else "algorithm.hpt.coef": value}, f"of {loss}")
    if loss == "srft" and value != 1:
        return lost("the weights are algorithm.srft.supervised_coef and right_coef, which are the paper's 0.5 and 0.1")
    return no_setting("read by uft and hpt alone" if loss != "srft" else "as here")


_TARGET: Mapping[str, Rule] = {
    "target_key": same("data.target_key"),
    "max_target_length": absent("a demonstration has at most data.max_response_length tokens"),
    "sample_target_ratio": _of(HYBRIDS, same("algorithm.demonstrations.share")),
}
RULES: Mapping[str, Rule] = {
    "actor.policy_loss.loss_mode": policy_loss,
    "algorithm.n_prefix": _of(("luffy", "uft", "srft"), prefixes),
    "algorithm.prefix_strategy": _of(("luffy", "uft", "srft"), prefix_strategy),
    "algorithm.min_prefix_ratio": _of(("luffy", "uft", "srft"), prefix_ratio),
    "algorithm.max_prefix_ratio": _of(("luffy", "uft", "srft"), prefix_ratio),
    "algorithm.prefix_share_across_samples": _of(("luffy", "uft", "srft"), shared_prefix),
    "algorithm.hint_steps": _of(("uft",), same("algorithm.demonstrations.hints.steps")),
    "algorithm.unify_strategy": switch,
    "algorithm.switch_gate": _of(("hpt",), gate),
    "algorithm.success_reward_threshold": _of(("hpt",), same("algorithm.success_score")),
    "actor.off_policy_reshape": _of(("luffy",), reshape),
    "actor.on_policy_reshape": _of(("luffy",), _as_paper("no_reshape", "sampled tokens keep their ratio")),
    "actor.loss_remove_clip": _of(WHOLE, _as_paper(True, "sampled tokens are not clipped, as in the paper")),
    "actor.srft_type": _of(("srft",), _as_paper("paper", "the loss of sampled rows is the paper's, of log p")),
    "actor.sft_loss_coef": supervised_weight,
    **{f"actor.{key}": absent("read nowhere there") for key in ("off_policy_cliprange", "off_policy_normalize")},
    "actor.hpt_hint_loss_coef": absent("read nowhere there"),
    **{f"data.{key}": rule for key, rule in _TARGET.items()},
    **{f"data.dataset_kwargs.{key}": rule for key, rule in _TARGET.items()},
}
