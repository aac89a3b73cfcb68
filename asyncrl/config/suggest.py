"""Names that the user may have meant: of a key that does not exist, of a file that is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from asyncrl.config.keys import iter_keys

_FOREIGN_NAMES = {
    "batch.group_size": "rollout.n num_generations",
    "batch.prompts_per_step": "data.rollout_batch_size data.train_batch_size data.gen_batch_size generation_batch_size",
    "data.image_dir": "data.train_image_dir data.val_image_dir",
    "rollout.engine": "rollout.name",
    "data.max_prompt_length": "rollout.prompt_length",
    "data.max_response_length": "rollout.response_length max_completion_length max_new_tokens",
    "rollout.max_concurrent_sequences": "rollout.max_num_seqs",
    "evaluation.temperature": "rollout.val_override_config.temperature",
    "evaluation.group_size": "rollout.val_override_config.n",
    "model.path": "model_path tokenizer_path model_name_or_path",
    "learner.engine": "actor.strategy",
    "learner.optim.lr_scheduler_type": "optim.warmup_style",
    "learner.optim.max_grad_norm": "actor.grad_clip",
    "algorithm.clip_ratio_high": "actor.clip_ratio epsilon_high",
    "algorithm.clip_ratio_c": "actor.clip_ratio_dual delta",
    "algorithm.kl_loss_coef": "algorithm.kl_coef beta",
    "model.lora.rank": "model.lora_rank lora_r",
    "model.lora.alpha": "model.lora_alpha lora_alpha",
    "algorithm.policy_loss": "actor.policy_loss.loss_mode",
    "algorithm.updates_per_batch": "actor.ppo_epochs actor.ppo_mini_batch_size actor.global_batch_size num_iterations",
    "batch.tokens_per_microbatch": (
        "actor.ppo_micro_batch_size actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu "
        "per_device_train_batch_size"
    ),
    "algorithm.norm_adv_by_std": "algorithm.norm_adv_by_std_in_grpo scale_rewards",
    "reward.functions.N.function": "reward.reward_function reward_funcs",
    "reward.functions.N.kwargs": "reward.reward_function_kwargs",
    "reward.workers": "reward.num_cpus",
    "evaluation.every_steps": "trainer.val_freq trainer.test_freq eval_steps",
    "evaluation.before_training": "trainer.val_before_train",
    "trainer.samples_per_step": "trainer.val_generations_to_log",
    "trainer.max_steps": "trainer.total_training_steps",
    "trainer.save_limit": "trainer.max_ckpt_to_keep save_total_limit",
    "run_dir": "trainer.default_local_dir trainer.outputs_dir trainer.save_checkpoint_path output_dir",
    "telemetry.project": "trainer.project_name",
    "telemetry.trackers": "trainer.logger report_to",
    "model.dtype": "torch_dtype",
    "data.train_files": "dataset_name",
    "learner.optim.lr": "learning_rate",
    "learner.optim.lr_warmup_steps": "warmup_steps",
    "model.lora.target_modules": "lora_target_modules",
    "algorithm.clip_ratio_low": "epsilon",
    "algorithm.loss_agg_mode": "loss_type",
    "algorithm.correction.cap": (
        "vllm_importance_sampling_cap rollout_is_threshold tis_imp_ratio_cap behav_imp_weight_cap"
    ),
    "algorithm.correction.kind": "vllm_importance_sampling_mode rollout_is",
    "algorithm.correction.masks.N.threshold": "off_policy_mask_threshold",
    "algorithm.proximal": "prox_logp_method",
    "reward.functions.N.weight": "reward_weights",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.save_freq": "save_steps",
}
"""Our keys, and their names in RLLaVA, EasyR1, verl, TRL and Hugging Face where the last part differs."""
ALIASES = {theirs: ours for ours, names in _FOREIGN_NAMES.items() for theirs in names.split()}
"""Key of another framework -> ours. A longer unknown key matches by its end (`worker.rollout.n`)."""

ABSENT = {
    "trainer.n_gpus_per_node": "the learner uses the one device of learner.device, the server that of rollout.device",
    "trainer.nnodes": "the learner runs on one machine; rollout servers may run elsewhere (network.host)",
    "gradient_accumulation_steps": "it follows from batch.prompts_per_step and batch.tokens_per_microbatch",
    "trainer.experiment_name": "a run is named by its folder, run_dir",
}
"""Keys of other frameworks that have no counterpart here, and what to know instead."""


@cache
def known_paths() -> tuple[str, ...]:
    """Every key of the schema, dotted, in its order."""
    return tuple(key.path for key in iter_keys())


def suggestion(path: str) -> str:
    """A half sentence after `unknown key ...: `, or nothing. `path` is dotted, list items written `N`."""
    parts = path.split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        if ending in ABSENT:
            return f"there is no such setting here: {ABSENT[ending]}"
        same_name = [known for known in known_paths() if f".{known}".endswith(f".{ending}")]
        if ending in ALIASES or same_name:
            return f"did you mean {ALIASES.get(ending) or same_name[0]}?"
    close = difflib.get_close_matches(path, known_paths(), n=1, cutoff=0.65)
    return f"did you mean {close[0]}?" if close else ""


def file_hint(path: Path) -> str:
    """Half a sentence about a missing file: similar names in its folder, or where the path stops existing."""
    folder = path.parent
    if not folder.is_dir():
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        return f"the folder {path.parent} does not exist, only {folder.resolve()}."
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(str(folder / name) for name in close)}?"
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{folder.resolve()} has {listed or 'no files'}."


def close_names(name: str, choices: Iterable[str]) -> list[str]:
    """The most similar of the choices, best first; case does not count."""
    lower = {choice.lower(): choice for choice in choices}
    return [lower[close] for close in difflib.get_close_matches(name.lower(), lower, n=2, cutoff=0.6)]
