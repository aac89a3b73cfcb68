"""Names that the user may have meant: of a key that does not exist, of a file that is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from asyncrl.config.keys import iter_keys

ALIASES = {
    # RLLaVA, EasyR1, verl
    "rollout.n": "batch.group_size",
    "data.rollout_batch_size": "batch.prompts_per_step",
    "data.train_batch_size": "batch.prompts_per_step",
    "data.gen_batch_size": "batch.prompts_per_step",
    "data.train_image_dir": "data.image_dir",
    "data.val_image_dir": "data.image_dir",
    "rollout.name": "rollout.engine",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.max_num_seqs": "rollout.max_concurrent_sequences",
    "rollout.val_override_config.temperature": "evaluation.temperature",
    "rollout.val_override_config.n": "evaluation.group_size",
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "actor.strategy": "learner.engine",
    "optim.warmup_style": "learner.optim.lr_scheduler_type",
    "actor.grad_clip": "learner.optim.max_grad_norm",
    "actor.clip_ratio": "algorithm.clip_ratio_high",
    "actor.clip_ratio_dual": "algorithm.clip_ratio_c",
    "algorithm.kl_coef": "algorithm.kl_loss_coef",
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "actor.policy_loss.loss_mode": "algorithm.policy_loss",
    "actor.ppo_epochs": "algorithm.updates_per_batch",
    "actor.ppo_mini_batch_size": "algorithm.updates_per_batch",
    "actor.global_batch_size": "algorithm.updates_per_batch",
    "actor.ppo_micro_batch_size": "batch.tokens_per_microbatch",
    "actor.ppo_micro_batch_size_per_gpu": "batch.tokens_per_microbatch",
    "actor.ppo_max_token_len_per_gpu": "batch.tokens_per_microbatch",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "reward.reward_function": "reward.functions.N.function",
    "reward.reward_function_kwargs": "reward.functions.N.kwargs",
    "reward.num_cpus": "reward.workers",
    "trainer.val_freq": "evaluation.every_steps",
    "trainer.test_freq": "evaluation.every_steps",
    "trainer.val_before_train": "evaluation.before_training",
    "trainer.val_generations_to_log": "trainer.samples_per_step",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.max_ckpt_to_keep": "trainer.save_limit",
    "trainer.default_local_dir": "run_dir",
    "trainer.outputs_dir": "run_dir",
    "trainer.save_checkpoint_path": "run_dir",
    "trainer.project_name": "telemetry.project",
    "trainer.logger": "telemetry.trackers",
    # TRL and Hugging Face
    "output_dir": "run_dir",
    "report_to": "telemetry.trackers",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "dataset_name": "data.train_files",
    "num_generations": "batch.group_size",
    "generation_batch_size": "batch.prompts_per_step",
    "per_device_train_batch_size": "batch.tokens_per_microbatch",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "learning_rate": "learner.optim.lr",
    "warmup_steps": "learner.optim.lr_warmup_steps",
    "beta": "algorithm.kl_loss_coef",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "num_iterations": "algorithm.updates_per_batch",
    "epsilon": "algorithm.clip_ratio_low",
    "epsilon_high": "algorithm.clip_ratio_high",
    "delta": "algorithm.clip_ratio_c",
    "loss_type": "algorithm.loss_agg_mode",
    "scale_rewards": "algorithm.norm_adv_by_std",
    "vllm_importance_sampling_cap": "algorithm.correction.cap",
    "vllm_importance_sampling_mode": "algorithm.correction.kind",
    "off_policy_mask_threshold": "algorithm.correction.masks.N.threshold",
    "rollout_is": "algorithm.correction.kind",
    "rollout_is_threshold": "algorithm.correction.cap",
    "tis_imp_ratio_cap": "algorithm.correction.cap",
    "behav_imp_weight_cap": "algorithm.correction.cap",
    "prox_logp_method": "algorithm.proximal",
    "reward_funcs": "reward.functions.N.function",
    "reward_weights": "reward.functions.N.weight",
    "num_train_epochs": "trainer.total_epochs",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.save_limit",
    "eval_steps": "evaluation.every_steps",
}
"""Key of another framework -> ours, where the last name differs. A longer unknown key matches by its end."""

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
