"""Translation table of TRL's GRPOConfig, ModelConfig and ScriptArguments, as `trl grpo --config FILE` reads them.

Names and defaults are those of TRL 1.16; older names are read where they mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.tools.import_config import derived_rules as derived
from asyncrl.tools.import_config.derived_rules import (
    Outcome,
    Rule,
    Values,
    absent,
    becomes,
    lost,
    no_counterpart,
    no_setting,
    off_is_zero,
    one_value,
    only_one,
    other_values,
    read_with,
    same,
)

LOSS_TYPES: Mapping[str, tuple[str, str]] = {
    "grpo": ("ppo", "seq-mean-token-mean"),
    "bnpo": ("ppo", "token-mean"),
    "dapo": ("ppo", "token-mean"),
    "dr_grpo": ("ppo", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "luspo": ("luspo", "seq-mean-token-sum"),
    "vespo": ("vespo", "token-mean"),
}
"""`algorithm.policy_loss` and `algorithm.loss_agg_mode` of each `loss_type`."""
MODES = {"token_truncate": "token_tis", "token_mask": "token_mis"}
MODES |= {"sequence_truncate": "sequence_tis", "sequence_mask": "sequence_mis"}
NO_DUAL_CLIP = 1e9
"""`algorithm.clip_ratio_c` that cuts nothing: a ratio is at most e^20 here."""
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


# --- algorithm ---------------------------------------------------------------------------------------------


def loss_type(value: str, theirs: Values) -> Outcome:
    if value not in LOSS_TYPES:
        return lost(f"there are {', '.join(LOSS_TYPES)}")
    loss, aggregation = LOSS_TYPES[value]
    if loss == "ppo" and theirs["importance_sampling_level"] == "sequence":
        loss = "gspo"
    settings: dict[str, Any] = {"algorithm.policy_loss": loss, "algorithm.loss_agg_mode": aggregation}
    if loss in ("ppo", "gspo", "luspo") and theirs.get("delta") is None:
        settings["algorithm.clip_ratio_c"] = NO_DUAL_CLIP
        return becomes(settings, "a loss and an aggregation; without delta there is no dual clip")
    return becomes(settings, "a loss and an aggregation")


def scale_rewards(value: Any, theirs: Values) -> Outcome:
    if theirs.get("multi_objective_aggregation") == "normalize_then_sum":
        return becomes({"algorithm.adv_estimator": "gdpo"}, "with multi_objective_aggregation")
    if value == "batch":
        return becomes({"algorithm.adv_estimator": "lite_ppo"}, "the standard deviation of the batch")
    return becomes({"algorithm.norm_adv_by_std": value in (True, "group")})


def epsilon(value: float, theirs: Values) -> Outcome:
    if theirs["loss_type"] == "cispo":
        return no_setting("its loss has no lower bound there")
    high = theirs.get("epsilon_high")
    both = {"algorithm.clip_ratio_low": value}
    return becomes(both if high else both | {"algorithm.clip_ratio_high": value}, "" if high else "for both sides")


def epsilon_high(value: float, theirs: Values) -> Outcome:
    if theirs["loss_type"] == "cispo":
        return becomes({"algorithm.clip_ratio_low": 1.0, "algorithm.clip_ratio_high": value - 1}, "a ratio there")
    return becomes({"algorithm.clip_ratio_high": value})


def beta(value: float, theirs: Values) -> Outcome:
    if not value:
        return no_setting("off there")
    estimator = "k3_unbiased" if theirs["use_bias_correction_kl"] else "k3"
    return becomes({"algorithm.kl_loss_coef": value, "algorithm.kl_estimator": estimator}, "in the loss")


def adaptive_entropy(ours: str) -> Rule:
    off = no_setting("use_adaptive_entropy is off there")
    return lambda value, theirs: becomes({ours: value}) if theirs.get("use_adaptive_entropy") else off


def top_entropy(value: float, theirs: Values) -> Outcome:
    if value >= 1:
        return no_setting("off there")
    settings = {"algorithm.selections": _selections(theirs), "algorithm.top_entropy_fraction": value}
    return becomes(settings, "a selection")


def truncated(value: bool, theirs: Values) -> Outcome:
    return becomes({"algorithm.selections": _selections(theirs)}, "a selection") if value else no_setting("off there")


def _selections(theirs: Values) -> list[str]:
    chosen = ["overlong"] if theirs.get("mask_truncated_completions") else []
    return chosen + (["top_entropy"] if theirs.get("top_entropy_quantile", 1.0) < 1 else [])


def correction(value: str, theirs: Values) -> Outcome:
    """Mode of the correction, with its bounds and the off-policy mask: they are one section here."""
    masks = []
    if theirs.get("off_policy_mask_threshold"):
        masks = [{"kind": "opsm", "threshold": theirs["off_policy_mask_threshold"]}]
    settings: dict[str, Any] = {"algorithm.correction.masks": masks} if masks else {}
    if not theirs["use_vllm"] or not theirs["vllm_importance_sampling_correction"]:
        return becomes(settings | {"algorithm.correction.kind": "none"}, "off there, or without vLLM")
    if value not in MODES:
        return lost(f"there are {', '.join(MODES)}")
    low, high = theirs.get("vllm_importance_sampling_clip_min"), theirs.get("vllm_importance_sampling_clip_max")
    settings["algorithm.correction.kind"] = MODES[value]
    if MODES[value].endswith("tis"):
        return becomes(settings | {"algorithm.correction.cap": high}, "its lower bound is not there")
    return becomes(settings | {"algorithm.correction.lower": low or 0.0, "algorithm.correction.upper": high}, "bounds")


# --- batches, steps, data ------------------------------------------------------------------------------------


def prompts_per_step(_: Any, theirs: Values) -> Outcome:
    """Completions of one generation, on one device, over those of a prompt."""
    windows = theirs.get("steps_per_generation") or theirs["gradient_accumulation_steps"]
    completions = theirs.get("generation_batch_size") or theirs["per_device_train_batch_size"] * windows
    updates = max(windows // theirs["gradient_accumulation_steps"], 1)
    prompts = max(completions // theirs["num_generations"], 1)
    text = f"{completions} completions of one generation on one device, {theirs['num_generations']} for each prompt"
    return becomes({"batch.prompts_per_step": prompts, "algorithm.updates_per_batch": updates}, text)


def dataset(value: str, theirs: Values) -> Outcome:
    test = theirs.get("dataset_test_split")
    settings: dict[str, Any] = {"data.train_files": [f"{value}@{theirs['dataset_train_split']}"]}
    settings |= {"data.val_files": [f"{value}@{test}"]} if test else {}
    return becomes(settings, "of the hub; columns are named by data.prompt_key and its like")


def reward_functions(value: Any, theirs: Values) -> Outcome:
    names = [value] if isinstance(value, str) else list(value)
    weights = theirs.get("reward_weights") or [1.0] * len(names)
    unknown = [name for name in names if "." not in name]
    if unknown:
        missing = f"reward.functions: what {', '.join(unknown)} of TRL is here (docs/bring-your-own.md has built-ins)"
        return no_counterpart("TRL's own reward functions are not here", missing)
    places = (name.rpartition(".") for name in names)
    functions = [{"function": f"{m}:{f}", "weight": w} for (m, _, f), w in zip(places, weights, strict=True)]
    return becomes({"reward.functions": functions}, "called as there, with lists of one completion")


def lora(ours: str) -> Rule:
    off = no_setting("LoRA is off there (use_peft)")
    return lambda value, theirs: becomes({ours: value}) if theirs.get("use_peft") else off


def if_vllm(ours: str) -> Rule:
    off = no_setting("vLLM is off there (use_vllm)")
    return lambda value, theirs: becomes({ours: value}) if theirs["use_vllm"] else off


def vllm_mode(value: str, theirs: Values) -> Outcome:
    if not theirs["use_vllm"]:
        return no_setting("vLLM is off there (use_vllm)")
    return becomes({"trainer.mode": "sync" if value == "colocate" else "async"}, "sync: both take turns on one device")


def betas(_: Any, theirs: Values) -> Outcome:
    return becomes({"learner.optim.betas": [theirs["adam_beta1"], theirs["adam_beta2"]]}, "a pair here")


def steps(value: int, _: Values) -> Outcome:
    return becomes({"trainer.max_steps": value}) if value > 0 else no_setting("num_train_epochs decides")


_SAME = {
    "output_dir": "run_dir",
    "model_name_or_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "num_generations": "batch.group_size",
    "max_prompt_length": "data.max_prompt_length",
    "max_completion_length": "data.max_response_length",
    "shuffle_dataset": "data.shuffle",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "min_p": "rollout.min_p",
    "delta": "algorithm.clip_ratio_c",
    "entropy_coef": "algorithm.entropy_coeff",
    "sapo_temperature_pos": "algorithm.sapo.tau_positive",
    "sapo_temperature_neg": "algorithm.sapo.tau_negative",
    "learning_rate": "learner.optim.lr",
    "weight_decay": "learner.optim.weight_decay",
    "max_grad_norm": "learner.optim.max_grad_norm",
    "warmup_steps": "learner.optim.lr_warmup_steps",
    "gradient_checkpointing": "learner.gradient_checkpointing",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.save_limit",
    "eval_steps": "evaluation.every_steps",
    "seed": "trainer.seed",
}
_ABSENT = """
per_device_eval_batch_size | all held-out rows are scored, as many at a time as the server takes
logging_steps log_completions num_completions_to_print logging_strategy | every step is logged, and samples are kept
vllm_max_model_length | it is data.max_prompt_length + data.max_response_length
push_to_hub hub_model_id report_completions run_name | runs are folders: copy export/
vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port | a server dials the learner
lora_dropout lora_task_type | only adapters, no dropout
attn_implementation | packing decides
dataset_config dataset_streaming | rows are read from files, or as org/name@split
vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg | the paper's, as are TRL's defaults
"""
TRL_RULES: Mapping[str, Rule] = {
    **{key: same(ours) for key, ours in _SAME.items()},
    **{key: absent(why) for key, why in derived.by_line(_ABSENT).items()},
    "num_iterations": only_one(1, "a group is trained once", "a group is trained once, never again"),
    "loss_type": loss_type,
    "importance_sampling_level": read_with("loss_type"),
    "multi_objective_aggregation": read_with("scale_rewards"),
    "scale_rewards": scale_rewards,
    "beta": beta,
    "use_bias_correction_kl": read_with("beta"),
    "sync_ref_model": only_one(False, "off", "reference.reset_every_steps and reference.ema move it in other ways"),
    "use_adaptive_entropy": read_with("entropy_target"),
    **{
        f"entropy_{theirs}": adaptive_entropy(f"algorithm.entropy_control.{ours}")
        for theirs, ours in (("target", "target"), ("coef_delta", "delta"), ("coef_min", "min"), ("coef_max", "max"))
    },
    "epsilon": epsilon,
    "epsilon_high": epsilon_high,
    "top_entropy_quantile": top_entropy,
    "vllm_importance_sampling_mode": correction,
    "off_policy_mask_threshold": read_with("vllm_importance_sampling_mode"),
    **{
        f"vllm_importance_sampling_{key}": read_with("vllm_importance_sampling_mode")
        for key in ("correction", "clip_max", "clip_min", "cap")
    },
    "mask_truncated_completions": truncated,
    "repetition_penalty": one_value(1.0, "off", "the learner would not know of it"),
    "top_k": off_is_zero("rollout.top_k"),
    "dtype": other_values("model.dtype", DTYPES, "model.dtype is float32, bfloat16 or float16"),
    "torch_dtype": other_values("model.dtype", DTYPES, "model.dtype is float32, bfloat16 or float16"),
    "bf16": lambda value, _: becomes({"model.dtype": "bfloat16" if value else "float32"}, "of the weights, too"),
    "fp16": lambda value, _: becomes({"model.dtype": "float16"} if value else {}, "of the weights, too"),
    "per_device_train_batch_size": prompts_per_step,
    "generation_batch_size": read_with("per_device_train_batch_size"),
    "gradient_accumulation_steps": read_with("per_device_train_batch_size"),
    "steps_per_generation": read_with("per_device_train_batch_size"),
    "dataset_name": dataset,
    "dataset_train_split": read_with("dataset_name"),
    "dataset_test_split": read_with("dataset_name"),
    "reward_funcs": reward_functions,
    "reward_weights": read_with("reward_funcs"),
    "use_peft": read_with("lora_r"),
    "lora_r": lora("model.lora.rank"),
    "lora_alpha": lora("model.lora.alpha"),
    "lora_target_modules": lora("model.lora.target_modules"),
    "use_vllm": other_values("rollout.engine", {True: "vllm", False: "hf"}, "true or false"),
    "vllm_mode": vllm_mode,
    "vllm_gpu_memory_utilization": if_vllm("rollout.engine_args.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": if_vllm("rollout.tensor_parallel_size"),
    "adam_beta1": betas,
    "adam_beta2": read_with("adam_beta1"),
    "lr_scheduler_type": other_values(
        "learner.optim.lr_scheduler_type",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
        "there are constant, linear and cosine",
    ),
    "max_steps": steps,
    "num_train_epochs": lambda value, _: becomes({"trainer.total_epochs": max(round(value), 1)}),
    "save_strategy": read_with("save_steps"),
    "eval_strategy": read_with("eval_steps"),
    "report_to": lambda value, _: derived.trackers([value] if isinstance(value, str) else value, {}),
}
TRL_DEFAULTS: Mapping[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "dataset_train_split": "train",
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3,
}
"""TRL's defaults, where leaving the key out would mean something else here."""
