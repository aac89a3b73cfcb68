"""Keys of verl, under the names that RLLaVA and EasyR1 have for them: both descend from it.

From verl's ppo_trainer.yaml of 2026-01; hydra's overrides in a script that starts verl.trainer.main_ppo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROOT = "actor_rollout_ref."
"""verl keeps actor, rollout, reference and model below it."""
_OTHER_NAMES = """
model.path actor.model.model_path
model.enable_gradient_checkpointing actor.model.enable_gradient_checkpointing
model.trust_remote_code actor.model.trust_remote_code
model.lora_rank actor.model.lora.rank
model.lora_alpha actor.model.lora.alpha
model.target_modules actor.model.lora.target_modules
model.exclude_modules actor.model.lora.exclude_modules
model.use_remove_padding actor.padding_free
actor.use_kl_loss algorithm.use_kl_loss
actor.use_dynamic_bsz actor.dynamic_batching
actor.grad_clip actor.max_grad_norm
actor.ppo_micro_batch_size_per_gpu actor.ppo_micro_batch_size
rollout.tensor_model_parallel_size rollout.tensor_parallel_size
rollout.log_prob_micro_batch_size_per_gpu actor.log_prob_micro_batch_size
rollout.val_kwargs.temperature rollout.val_override_config.temperature
rollout.val_kwargs.n rollout.val_override_config.n
rollout.val_kwargs.top_p rollout.val_override_config.top_p
rollout.val_kwargs.top_k rollout.val_override_config.top_k
trainer.test_freq trainer.val_freq
trainer.total_training_steps trainer.max_steps
trainer.default_local_dir trainer.save_checkpoint_path
trainer.max_actor_ckpt_to_keep trainer.save_limit
reward_model.enable reward.model.enable
reward_model.overlong_buffer.enable reward.overlong_buffer.enable
reward_model.overlong_buffer.len reward.overlong_buffer.len
reward_model.overlong_buffer.penalty_factor reward.overlong_buffer.penalty_factor
reward_model.reward_kwargs.overlong_buffer_cfg.enable reward.overlong_buffer.enable
reward_model.reward_kwargs.overlong_buffer_cfg.len reward.overlong_buffer.len
reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward.overlong_buffer.penalty_factor
"""
OTHER_NAMES: Mapping[str, str] = {
    theirs: known for theirs, _, known in (line.partition(" ") for line in _OTHER_NAMES.strip().splitlines())
}


def with_known_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Foreign settings under known names, and verl's spelling of each of those."""
    known: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        below = key.removeprefix(ROOT)
        name = OTHER_NAMES.get(below, below.replace("fsdp_config.", "fsdp."))
        known[name], spelled[name] = value, key
    if path := known.pop("custom_reward_function.path", None):
        function = known.pop("custom_reward_function.name", "compute_score")
        known |= {"reward.reward_function": f"{path}:{function}", "reward.reward_type": "verl"}
        spelled["reward.reward_function"] = spelled["reward.reward_type"] = "custom_reward_function.path"
    return known, spelled


VERL_DEFAULTS: Mapping[str, Any] = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_loss": False,
    "algorithm.use_kl_in_reward": False,
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "low_var_kl",
    "actor.ppo_mini_batch_size": 256,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.loss_agg_mode": "token-mean",
    "actor.model.torch_dtype": "bf16",
    "actor.model.freeze_vision_tower": False,
    "rollout.n": 1,
    "rollout.name": "vllm",
    "trainer.total_epochs": 30,
    "trainer.experiment_name": "gsm8k",
}
