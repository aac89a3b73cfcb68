"""Kinds of rules, and the rules of keys whose meaning here depends on more than one of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.tools.import_config.names import ESTIMATORS

_HUB_NAME = re.compile(r"[^/@.]+/[^/@.]+")
Verdict = Literal["taken over", "translated", "lost", "no counterpart", "unknown"]
"""`lost`: an algorithm, a role or a precision, without which the run is another one."""


@dataclass(frozen=True)
class Outcome:
    """Translation result of one foreign key."""

    verdict: Verdict
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our keys, dotted, and their values."""
    text: str = ""
    """How it was translated, or why there is no counterpart."""
    missing: str = ""
    """Setting that the user still has to give, and how."""


Values = Mapping[str, Any]
"""All of their settings: those given, and their defaults for the others."""
Rule = Callable[[Any, Values], Outcome]
"""Takes a value that is not null and all of their settings."""


def becomes(settings: Mapping[str, Any], text: str = "", missing: str = "") -> Outcome:
    return Outcome("translated" if text else "taken over", settings, text, missing)


def no_setting(text: str) -> Outcome:
    """Outcome: no setting is needed."""
    return Outcome("translated", text=text)


def no_counterpart(text: str, missing: str = "") -> Outcome:
    return Outcome("no counterpart", text=text, missing=missing)


def lost(text: str, missing: str = "") -> Outcome:
    return Outcome("lost", text=text, missing=missing)


def by_line(table: str) -> dict[str, str]:
    """Map each key before a line's bar to the text behind it."""
    lines = (line.partition(" | ") for line in table.strip().splitlines())
    return {key: text for keys, _, text in lines for key in keys.split()}


# --- kinds of rules, for the table -----------------------------------------------------------------


def same(ours: str) -> Rule:
    """Rule: same meaning and unit under another key."""
    return lambda value, _: becomes({ours: value})


def absent(why: str) -> Rule:
    return lambda value, _: no_counterpart(why)


def read_with(whole: str) -> Rule:
    return lambda value, _: no_setting(f"read with {whole}")


def one_value(harmless: Any, text: str, why: str) -> Rule:
    """Rule: one supported value, which needs no setting; others have no counterpart."""
    return lambda value, _: no_setting(text) if value == harmless else no_counterpart(why)


def off_is_zero(ours: str) -> Rule:
    """Rule: -1 means off there, 0 here."""
    return lambda value, _: becomes({ours: 0}, "off is -1 there and 0 here") if value < 0 else becomes({ours: value})


def only_one(harmless: Any, text: str, why: str) -> Rule:
    """Rule: one supported value, which needs no setting; others are lost."""
    return lambda value, _: no_setting(text) if value == harmless else lost(why)


def other_values(ours: str, values: Mapping[Any, str], otherwise: str, note: str = "") -> Rule:
    """Rule: map values by table; `otherwise` says why others are lost."""

    def rule(value: Any, _: Values) -> Outcome:
        if value not in values:
            return lost(otherwise)
        return becomes({ours: values[value]}, note or ("" if values[value] == value else "another name"))

    return rule


# --- batches and warm-up -----------------------------------------------------------------------------


def updates_per_batch(value: Any, theirs: Values) -> Outcome:
    """Optimiser steps per batch = prompts / mini-batch, both in prompts: rollout.n is multiplied in later."""
    prompts = theirs.get("data.rollout_batch_size", theirs.get("data.train_batch_size"))
    if not isinstance(value, int) or not isinstance(prompts, int) or value <= 0 or prompts % value:
        missing = f"algorithm.updates_per_batch: optimiser steps per batch of {prompts} prompts"
        return no_counterpart(f"a batch of {prompts} prompts cannot be cut into parts of {value}", missing)
    updates = prompts // value
    return becomes(
        {"algorithm.updates_per_batch": updates}, f"{prompts} prompts in parts of {value}: {updates} updates"
    )


def tokens_per_microbatch(value: Any, theirs: Values) -> Outcome:
    """Packed tokens = samples x longest length, as in their dynamic batching."""
    longest = theirs["data.max_prompt_length"] + theirs["data.max_response_length"]
    text = f"{value} samples of at most {longest} tokens; it changes memory and speed only"
    return becomes({"batch.tokens_per_microbatch": value * longest}, text)


def warmup_ratio(value: Any, theirs: Values) -> Outcome:
    if theirs.get("actor.optim.lr_warmup_steps") is not None:
        return no_setting("lr_warmup_steps decides there, too")
    if not value:
        return becomes({"learner.optim.lr_warmup_steps": 0}, "no warm-up")
    updates = _updates(theirs)
    steps = theirs.get("trainer.max_steps")
    if not steps:
        return no_counterpart(
            "a share of the steps, whose number depends on the data; here it is a number of optimiser steps",
            f"learner.optim.lr_warmup_steps: {value} x learner steps x {updates} updates per batch",
        )
    text = f"{value} of {steps} steps, with {updates} optimiser steps each"
    return becomes({"learner.optim.lr_warmup_steps": int(value * steps) * updates}, text)


def warmup_steps(value: Any, theirs: Values) -> Outcome:
    updates = _updates(theirs)
    text = f"{value} batches, with {updates} optimiser steps each"
    return becomes({"learner.optim.lr_warmup_steps": value * updates}, text)


def _updates(theirs: Values) -> int:
    key = "actor.global_batch_size" if "actor.global_batch_size" in theirs else "actor.ppo_mini_batch_size"
    return updates_per_batch(theirs.get(key), theirs).settings.get("algorithm.updates_per_batch", 1)


# --- algorithm, critic ---------------------------------------------------------------------------------


_ESTIMATOR = "no built-in: algorithm.adv_estimator=file.py:function (docs/bring-your-own.md)"


def estimator(value: str, theirs: Values) -> Outcome:
    """Our name in the table of names. Their gpg scales by the rows with a score other than 0."""
    if value == "gpg":
        settings = {"algorithm.adv_estimator": value, "algorithm.gpg_valid": "nonzero_score"}
        return becomes(settings, "scaled by the rows of a score other than 0, as there; the paper has gpg_valid=spread")
    return other_values("algorithm.adv_estimator", ESTIMATORS, _ESTIMATOR)(value, theirs)


def both_lambdas(value: Any, _: Values) -> Outcome:
    return becomes({"algorithm.gae.lam": value, "algorithm.gae.critic_lam": value}, "one for policy and critic there")


def marked_share(loss: str) -> Rule:
    """Rule: of one covariance loss; both read the same key here."""

    def rule(value: Any, theirs: Values) -> Outcome:
        chosen = str(theirs.get("actor.policy_loss.loss_mode", "")).replace("-", "_")
        return becomes({"algorithm.covariance.fraction": value}) if chosen == loss else no_setting(f"of {loss} alone")

    return rule


def critic_only(ours: str) -> Rule:
    """Rule: used only where there is a critic: they keep its numbers for every estimator."""

    def rule(value: Any, theirs: Values) -> Outcome:
        if theirs.get("algorithm.adv_estimator") != "gae":
            return no_setting("only algorithm.adv_estimator=gae has a critic")
        return becomes({ours: value})

    return rule


def critic_path(value: Any, theirs: Values) -> Outcome:
    if value == theirs.get("actor.model.model_path"):
        return no_setting("it starts from model.path")
    return critic_only("critic.path")(value, theirs)


# --- KL, LoRA, correction -------------------------------------------------------------------------------


_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL_ESTIMATORS |= {"kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+", "full": "full"}


def kl_loss(value: float, theirs: Values) -> Outcome:
    """EasyR1's kl_coef is in the loss with use_kl_loss, else in the reward; RLLaVA's kl_loss_coef is in the loss."""
    if not value or theirs.get("algorithm.disable_kl"):
        return no_setting("off there")
    if not theirs.get("algorithm.use_kl_loss"):
        if "algorithm.kl_coef" not in theirs:
            return no_setting("off there")
        return _with_estimator("algorithm.kl_reward_coef", value, theirs.get("algorithm.kl_penalty"), usual="k1")
    estimate = theirs.get("actor.kl_loss_type") or theirs.get("algorithm.kl_penalty")
    return _with_estimator("algorithm.kl_loss_coef", value, estimate, usual="k3")


def kl_in_reward(value: Any, theirs: Values) -> Outcome:
    """RLLaVA's KL in the reward has the coefficient of its controller."""
    if not value:
        return no_setting("off there")
    coefficient = theirs.get("algorithm.kl_ctrl.kl_coef", 0.001)
    return _with_estimator("algorithm.kl_reward_coef", coefficient, theirs.get("algorithm.kl_penalty"), usual="k1")


def _with_estimator(key: str, coefficient: float, theirs: str | None, *, usual: str) -> Outcome:
    """A coefficient, and the estimator where it is not the `usual` one here. k1 is no loss: its gradient has mean 0."""
    ours = _KL_ESTIMATORS.get(theirs or "", usual)
    if theirs and theirs not in _KL_ESTIMATORS:
        return lost(f"the estimate {theirs} is not there: see algorithm.kl_estimator")
    if ours == "k1" and key == "algorithm.kl_loss_coef":
        text = f"their {theirs} has a gradient of mean 0 in a loss; k1+ has the same value and the gradient of the KL"
        return becomes({key: coefficient, "algorithm.kl_estimator": "k1+"}, text)
    if ours == usual:
        return becomes({key: coefficient}, f"their estimate {theirs} is {ours}" if theirs else "")
    return becomes({key: coefficient, "algorithm.kl_estimator": ours}, f"their estimate {theirs}")


def kl_controller(ours: str) -> Rule:
    """Rule: a key of the controller, which moves a KL in the reward there, and only that."""

    def rule(value: Any, theirs: Values) -> Outcome:
        kind = theirs.get("algorithm.kl_ctrl.type", theirs.get("algorithm.kl_type"))
        easy = not theirs.get("algorithm.disable_kl") and "algorithm.kl_coef" in theirs
        in_reward = theirs.get("algorithm.use_kl_in_reward") or (easy and not theirs.get("algorithm.use_kl_loss"))
        if kind != "adaptive" or not in_reward:
            return no_setting("the coefficient is fixed there")
        return becomes({f"algorithm.kl_control.{ours}": value})

    return rule


def lora_only(ours: str) -> Rule:
    """Rule: used only if LoRA is on there: RLLaVA keeps LoRA's numbers where it is off, too."""

    off = no_setting("LoRA is off there (use_peft)")
    return lambda value, theirs: becomes({ours: value}) if theirs.get("actor.model.use_peft") else off


def target_modules(value: Any, _: Values) -> Outcome:
    if isinstance(value, str) and "," in value:
        names = [name.strip() for name in value.split(",") if name.strip()]
        return becomes({"model.lora.target_modules": names}, "a list here")
    return becomes({"model.lora.target_modules": value})


def excluded_modules(value: Any, _: Values) -> Outcome:
    if isinstance(value, str) and "visual" in value:
        return becomes({"model.lora.vision_tower": False}, "no adapters in the vision tower")
    return no_counterpart("name what is to have adapters: model.lora.target_modules")


def importance_cap(value: Any, _: Values) -> Outcome:
    if value > 0:
        settings = {"algorithm.correction.kind": "token_tis", "algorithm.correction.cap": value}
        return becomes(settings, "truncated importance sampling per token")
    return becomes({"algorithm.correction.kind": "none"}, "off there")


def online_filtering(value: Any, theirs: Values) -> Outcome:
    """Translation of a filter that keeps a group whose mean of filter_key is between the bounds, for any spread."""
    if not value:
        return no_setting("off there")
    bounds = {"algorithm.filter_low": 0.01, "algorithm.filter_high": 0.99}
    settings = {"algorithm.filters": ["zero_variance"]} | {key: theirs.get(key, least) for key, least in bounds.items()}
    text = "groups without spread are dropped, too; a dropped group's place goes to the next prompt at once"
    return _filtered_by(theirs.get("algorithm.filter_key", "overall"), settings, text)


def filter_groups(value: Any, theirs: Values) -> Outcome:
    """verl's DAPO recipe: groups whose metric has spread are kept, and sampling goes on until a batch is full."""
    if not value:
        return no_setting("off there")
    text = "a dropped group's place goes to the next prompt at once, and what is left over to the next batch"
    return _filtered_by(theirs.get("algorithm.filter_groups.metric"), {"algorithm.filters": ["zero_variance"]}, text)


def _filtered_by(metric: str | None, settings: Mapping[str, Any], text: str) -> Outcome:
    """A filter by what is there the whole score, the accuracy, or a component of the user's."""
    if metric in (None, "overall", "seq_reward", "seq_final_reward", "score"):
        return becomes(settings, text)
    if metric in ("acc", "accuracy"):
        return becomes({**settings, "algorithm.filter_component": "accuracy"}, text)
    return becomes(settings, text, f"algorithm.filter_component: the name of the reward component {metric}")


# --- precision --------------------------------------------------------------------------------------------


def computed_dtype(ours: Rule) -> Rule:
    """Rule: EasyR1 computes in mp_param_dtype, whatever the type of the weights that its optimiser updates."""

    def rule(value: Any, theirs: Values) -> Outcome:
        if "actor.fsdp.mp_param_dtype" in theirs:
            return no_setting("mp_param_dtype decides; the weights that are updated are float32 here")
        return ours(value, theirs)

    return rule


def engine_dtype(dtypes: Mapping[str, str]) -> Rule:
    """Rule: the engine's dtype is the learner's here."""

    def rule(value: Any, theirs: Values) -> Outcome:
        keys = ("actor.fsdp.mp_param_dtype", "actor.model.torch_dtype", "actor.fsdp.torch_dtype")
        learner = next((dtypes.get(theirs[key]) for key in keys if theirs.get(key)), None)
        if value == "auto" or learner in (None, dtypes.get(value)):
            return no_setting("model.dtype serves both sides")
        return lost(f"model.dtype serves both sides, and it is {learner}")

    return rule


# --- files, folders and trackers --------------------------------------------------------------------------


def run_dir(value: Any, theirs: Values) -> Outcome:
    folder = theirs.get("trainer.save_checkpoint_path")
    if folder is None:
        outputs, project = theirs.get("trainer.outputs_dir"), theirs.get("trainer.project_name")
        below = Path(str(project), str(value)) if outputs and project else Path(str(value))
        folder = Path(outputs or "runs") / below
    return becomes({"run_dir": str(folder)}, "a run is its folder")


def model_path(value: Any, _: Values) -> Outcome:
    """Model path; one that is neither a folder here nor a hub name is reported as missing."""
    is_known = Path(value).is_dir() or _HUB_NAME.fullmatch(value.replace(".", ""))
    missing = f"model.path: a folder here, or a name of the hub, and {value} is neither"
    return becomes({"model.path": value}, missing="" if is_known else missing)


def data_files(ours: str) -> Rule:
    """Rule: hub names without a split get @train."""

    def rule(value: Any, _: Values) -> Outcome:
        names = [value] if isinstance(value, str) else value
        files = [f"{name}@train" if _HUB_NAME.fullmatch(name) and not Path(name).exists() else name for name in names]
        return becomes({ours: files}, "" if files == names else "without a split it is @train")

    return rule


def validation_images(value: Any, theirs: Values) -> Outcome:
    if value == theirs.get("data.train_image_dir"):
        return no_setting("data.image_dir serves both")
    return no_counterpart("data.image_dir serves both kinds of rows: use absolute paths in one of the two files")


def trackers(value: Any, _: Values) -> Outcome:
    chosen = [name for name in value if name in ("tensorboard", "wandb")]
    return becomes({"telemetry.trackers": chosen}, "metrics.jsonl and Prometheus' endpoints are always there")


def kept_checkpoints(value: Any, _: Values) -> Outcome:
    if value > 0:
        return becomes({"trainer.save_limit": value})
    return no_counterpart("the newest trainer.save_limit checkpoints are kept, never all")


# --- rewards -------------------------------------------------------------------------------------------------


def reward_function(value: Any, theirs: Values) -> Outcome:
    """Reward function; `write` puts an adapter before it, as it is called in another way than ours."""
    entry: dict[str, Any] = {"function": value if ":" in value else f"{value}:main"}
    arguments = ("reward.reward_function_kwargs.", "reward.score_function_kwargs.")
    kwargs = {key.split("_kwargs.", 1)[1]: given for key, given in theirs.items() if key.startswith(arguments)}
    if kwargs:
        entry["kwargs"] = kwargs
    entries, text = [entry], "called through an adapter, which takes `overall`"
    if theirs.get("reward.overlong_buffer.enable"):  # DAPO's soft penalty of length
        factor, buffer = (theirs.get(f"reward.overlong_buffer.{key}", 1.0) for key in ("penalty_factor", "len"))
        entries.append({"function": "soft_overlong", "weight": factor, "kwargs": {"buffer": buffer}})
        text += "; with soft_overlong"
    return becomes({"reward.functions": entries}, text)


def reward_type(value: Any, theirs: Values) -> Outcome:
    if value in ("batch", "sequential", "function", "verl"):
        return no_setting("the adapter calls the function that way; here it gets one completion at a time")
    if value != "env" or not theirs.get("rollout.env_config_path"):
        missing = "reward.functions: a function that scores a completion (docs/bring-your-own.md)"
        return lost("there is no environment that earns a reward", missing)
    return no_setting("what their environment earns at each step is the reward, through the adapter")
