"""Rules of keys whose meaning here depends on others of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.tools.import_config.outcome import Outcome, Rule, Values, nothing_to_set

RewardCall = str
"""How their reward function is called: `batch`, `sequential`, `pair`, or empty where its file says it."""


def updates_per_batch(value: Any, theirs: Values) -> Outcome:
    """Their mini-batch is counted in prompts: both frameworks multiply it by rollout.n themselves."""
    prompts = theirs.get("data.rollout_batch_size", theirs.get("data.train_batch_size"))
    if not isinstance(value, int) or not isinstance(prompts, int) or value <= 0 or prompts % value:
        return Outcome(
            "no counterpart",
            text=f"a batch of {prompts} prompts cannot be cut into parts of {value}",
            missing=f"algorithm.updates_per_batch: optimiser steps per batch of {prompts} prompts",
        )
    updates = prompts // value
    return Outcome(
        "translated",
        {"algorithm.updates_per_batch": updates},
        f"{prompts} prompts in parts of {value}: {updates} updates",
    )


def tokens_per_microbatch(value: Any, theirs: Values) -> Outcome:
    """Samples of the longest length become packed tokens, as their dynamic batching does."""
    longest = theirs["data.max_prompt_length"] + theirs["data.max_response_length"]
    return Outcome(
        "translated",
        {"batch.tokens_per_microbatch": value * longest},
        f"{value} samples of at most {longest} tokens; it changes memory and speed only",
    )


def warmup_ratio(value: Any, theirs: Values) -> Outcome:
    if theirs.get("actor.optim.lr_warmup_steps") is not None:
        return nothing_to_set("lr_warmup_steps decides there, too")
    if not value:
        return Outcome("translated", {"learner.optim.lr_warmup_steps": 0}, "no warm-up")
    updates = _updates(theirs)
    steps = theirs.get("trainer.max_steps")
    if not steps:
        return Outcome(
            "no counterpart",
            text="a share of the steps, whose number depends on the data; here it is a number of optimiser steps",
            missing=f"learner.optim.lr_warmup_steps: {value} x learner steps x {updates} updates per batch",
        )
    warm = int(value * steps) * updates
    text = f"{value} of {steps} steps, with {updates} optimiser steps each"
    return Outcome("translated", {"learner.optim.lr_warmup_steps": warm}, text)


def warmup_steps(value: Any, theirs: Values) -> Outcome:
    updates = _updates(theirs)
    text = f"{value} batches, with {updates} optimiser steps each"
    return Outcome("translated", {"learner.optim.lr_warmup_steps": value * updates}, text)


def _updates(theirs: Values) -> int:
    key = "actor.global_batch_size" if "actor.global_batch_size" in theirs else "actor.ppo_mini_batch_size"
    return updates_per_batch(theirs.get(key), theirs).settings.get("algorithm.updates_per_batch", 1)


def kl_in_easyr1(value: Any, theirs: Values) -> Outcome:
    if theirs.get("algorithm.disable_kl") or not value:
        return nothing_to_set("off there")
    if not theirs.get("algorithm.use_kl_loss"):
        return Outcome("no counterpart", text=_IN_REWARD)
    return _kl_loss(value, theirs.get("algorithm.kl_penalty", ""), theirs)


def kl_in_rllava(value: Any, theirs: Values) -> Outcome:
    if not theirs.get("algorithm.use_kl_loss") or not value:
        return nothing_to_set("off there")
    return _kl_loss(value, theirs.get("actor.kl_loss_type", ""), theirs)


_IN_REWARD = "it is subtracted from the reward there; here a KL term is part of the loss (algorithm.kl_loss_coef)"


def kl_in_reward(value: Any, _: Values) -> Outcome:
    return Outcome("no counterpart", text=_IN_REWARD) if value else nothing_to_set("off there")


def _kl_loss(coefficient: float, estimate: str, theirs: Values) -> Outcome:
    if not (theirs.get("actor.model.lora.rank") or theirs.get("actor.model.use_peft")):
        return Outcome(
            "no counterpart",
            text="the reference policy here is the base model under its adapters: only with model.lora.rank above 0, "
            f"and then algorithm.kl_loss_coef={coefficient}",
        )
    text = "" if estimate == "low_var_kl" else f"their estimate is {estimate}, here it is always k3 (their low_var_kl)"
    return Outcome("translated" if text else "taken over", {"algorithm.kl_loss_coef": coefficient}, text)


def lora_only(ours: str) -> Rule:
    """RLLaVA keeps LoRA's numbers in its configuration where LoRA is off, too."""

    def rule(value: Any, theirs: Values) -> Outcome:
        if not theirs.get("actor.model.use_peft"):
            return nothing_to_set("LoRA is off there (use_peft)")
        return Outcome("taken over", {ours: value})

    return rule


def target_modules(value: Any, _: Values) -> Outcome:
    if isinstance(value, str) and "," in value:
        names = [name.strip() for name in value.split(",") if name.strip()]
        return Outcome("translated", {"model.lora.target_modules": names}, "a list here")
    return Outcome("taken over", {"model.lora.target_modules": value})


def excluded_modules(value: Any, _: Values) -> Outcome:
    if isinstance(value, str) and "visual" in value:
        return Outcome("translated", {"model.lora.vision_tower": False}, "no adapters in the vision tower")
    return Outcome("no counterpart", text="name what is to have adapters: model.lora.target_modules")


def run_dir(value: Any, theirs: Values) -> Outcome:
    folder = theirs.get("trainer.save_checkpoint_path")
    if folder is None:
        outputs, project = theirs.get("trainer.outputs_dir"), theirs.get("trainer.project_name")
        below = Path(str(project), str(value)) if outputs and project else Path(str(value))
        folder = Path(outputs or "runs") / below
    return Outcome("translated", {"run_dir": str(folder)}, "a run is its folder")


def model_path(value: Any, _: Values) -> Outcome:
    """Ours is a folder; theirs may be a name on the hub."""
    settings = {"model.path": value}
    if Path(value).is_dir():
        return Outcome("taken over", settings)
    missing = f"model.path: a folder here. {value} is none: hf download {value} --local-dir models/{Path(value).name}"
    return Outcome("taken over", settings, missing=missing)


def data_files(ours: str) -> Rule:
    def rule(value: Any, _: Values) -> Outcome:
        names = [value] if isinstance(value, str) else list(value)
        hub = [name for name in names if "@" not in name and name.count("/") == 1 and not Path(name).exists()]
        hub = [name for name in hub if not Path(name).suffix]
        files = [f"{name}@train" if name in hub else name for name in names]
        text = f"without a split it is {files[names.index(hub[0])]}" if hub else ""
        return Outcome("translated" if text else "taken over", {ours: files}, text)

    return rule


def trackers(value: Any, _: Values) -> Outcome:
    chosen = [name for name in value if name in ("tensorboard", "wandb")]
    text = "metrics.jsonl and Prometheus' endpoints are always there, and others are not"
    return Outcome("translated", {"telemetry.trackers": chosen}, text)


def kept_checkpoints(value: Any, _: Values) -> Outcome:
    if value > 0:
        return Outcome("taken over", {"trainer.save_limit": value})
    return Outcome("no counterpart", text="the newest trainer.save_limit checkpoints are kept, never all")


def validation_images(value: Any, theirs: Values) -> Outcome:
    if value == theirs.get("data.train_image_dir"):
        return nothing_to_set("data.image_dir serves both")
    why = "data.image_dir serves training and held-out rows: use absolute paths in one of the two files"
    return Outcome("no counterpart", text=why)


def importance_cap(value: Any, _: Values) -> Outcome:
    if value > 0:
        settings = {"algorithm.correction.kind": "token_tis", "algorithm.correction.cap": value}
        return Outcome("translated", settings, "truncated importance sampling per token")
    return Outcome("translated", {"algorithm.correction.kind": "none"}, "off there")


def named(ours: str, names: Mapping[str, str], otherwise: str) -> Rule:
    """A name of theirs that has another one here."""

    def rule(value: Any, _: Values) -> Outcome:
        if value not in names:
            return Outcome("no counterpart", text=otherwise)
        verdict = "taken over" if names[value] == value else "translated"
        return Outcome(verdict, {ours: names[value]}, "" if verdict == "taken over" else "another name")

    return rule


def loss_aggregation(value: Any, _: Values) -> Outcome:
    if value in ("token-mean", "seq-mean-token-mean"):
        text = "here over the whole update, not per micro-batch"
        return Outcome("translated", {"algorithm.loss_agg_mode": value}, text)
    if value == "seq-mean-token-sum-norm":
        text = "their sum over sequences is a mean here: AdamW divides the factor out again, clipping comes before it"
        return Outcome("translated", {"algorithm.loss_agg_mode": value}, text)
    return Outcome("no counterpart", text="the nearest is algorithm.loss_agg_mode=seq-mean-token-sum-norm (Dr. GRPO)")


def half_precision(value: Any, _: Values) -> Outcome:
    if value in ("bf16", "bfloat16"):
        return Outcome("translated", {"model.dtype": "bfloat16"}, "of the weights on both sides")
    if value in ("fp32", "float32"):
        return Outcome("translated", {"model.dtype": "float32"}, "of the weights on both sides")
    return Outcome("no counterpart", text="model.dtype is float32 or bfloat16")


def reward_call(theirs: Values) -> RewardCall:
    if theirs.get("reward.score_function") or theirs.get("reward.reward_type") == "function":
        return "pair"
    kind = theirs.get("reward.reward_type")
    return kind if kind in ("batch", "sequential") else ""


def reward_function(value: Any, theirs: Values) -> Outcome:
    """Their function is called in another way than ours: `importing` puts an adapter in between."""
    function = value if ":" in value else f"{value}:main"
    kwargs = {
        key.split("_kwargs.", 1)[1]: argument
        for key, argument in theirs.items()
        if key.startswith(("reward.reward_function_kwargs.", "reward.score_function_kwargs."))
    }
    entry = {"function": function, **({"kwargs": kwargs} if kwargs else {})}
    return Outcome("translated", {"reward.functions": [entry]}, "called through an adapter, which takes `overall`")


def reward_type(value: Any, _: Values) -> Outcome:
    if value in ("batch", "sequential", "function"):
        return nothing_to_set("the adapter calls the function that way; here it gets one completion at a time")
    return Outcome(
        "no counterpart",
        text="rewards of environments do not exist here",
        missing="reward.functions: a function that scores a completion (docs/bring-your-own.md)",
    )
