"""Translation table of RLLaVA and EasyR1 keys, without EasyR1's `worker.` prefix.

From their schemas (rllava/ppo/config.py, rllava/utils/config.py, rllava/data/config.py; verl/trainer/config.py and
verl/workers/*/config.py) and example files, older names included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.tools.import_config import correction_rules, environments, hybrid_rules
from asyncrl.tools.import_config import derived_rules as derived
from asyncrl.tools.import_config.derived_rules import (
    Rule,
    absent,
    lost,
    no_setting,
    off_is_zero,
    one_value,
    only_one,
    other_values,
    same,
)
from asyncrl.tools.import_config.foreign_config import Framework
from asyncrl.tools.import_config.hybrid_rules import PLUGIN
from asyncrl.tools.import_config.names import AGGREGATIONS, LOSSES
from asyncrl.tools.import_config.trl_rules import TRL_DEFAULTS, TRL_RULES
from asyncrl.tools.import_config.verl_keys import VERL_DEFAULTS

_DIVIDED = "learner.engine=fsdp2 learner.num_processes=N divides the model, without settings of how"
_ZERO = "learner.engine=deepspeed learner.zero_stage=2 learner.num_processes=N is ZeRO, without other settings of how"
_WHOLE_SEQUENCES = "a sequence is computed by one rank"
_PACKED = "always on: a group is packed behind its prompt, without padding"
_CRITIC = "the critic is as the policy in all else"
_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
_DTYPE = other_values("model.dtype", _DTYPES, "model.dtype is float32, bfloat16 or float16")

SAME_NAME = """
data.prompt_key data.answer_key data.image_key data.video_key data.image_dir data.video_fps data.max_prompt_length
data.max_response_length data.format_prompt data.system_prompt data.shuffle
rollout.temperature rollout.top_p rollout.tensor_parallel_size trainer.total_epochs trainer.max_steps
"""
"""Keys with our name and meaning."""
OTHER_NAME = {
    "data.train_image_dir": "data.image_dir",
    "data.rollout_batch_size": "batch.prompts_per_step",
    "data.train_batch_size": "batch.prompts_per_step",
    "data.format_prompt_path": "data.format_prompt",
    "data.seed": "trainer.seed",
    "data.min_pixels": "model.min_pixels",
    "data.max_pixels": "model.max_pixels",
    "algorithm.gamma": "algorithm.gamma",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "actor.policy_loss.clip_cov_lb": "algorithm.covariance.lower",
    "actor.policy_loss.clip_cov_ub": "algorithm.covariance.upper",
    "actor.policy_loss.ppo_kl_coef": "algorithm.covariance.kl_coef",
    "actor.max_grad_norm": "learner.optim.max_grad_norm",
    "actor.clip_ratio_low": "algorithm.clip_ratio_low",
    "actor.clip_ratio_high": "algorithm.clip_ratio_high",
    "actor.clip_ratio_dual": "algorithm.clip_ratio_c",
    "actor.clip_ratio_c": "algorithm.clip_ratio_c",
    "actor.entropy_coeff": "algorithm.entropy_coeff",
    "actor.model.enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "actor.model.trust_remote_code": "model.trust_remote_code",
    "actor.model.freeze_vision_tower": "model.freeze_vision_tower",
    "actor.model.lora.rank": "model.lora.rank",
    "actor.model.lora.alpha": "model.lora.alpha",
    "actor.optim.lr": "learner.optim.lr",
    "actor.optim.betas": "learner.optim.betas",
    "actor.optim.weight_decay": "learner.optim.weight_decay",
    "actor.optim.min_lr_ratio": "learner.optim.min_lr_ratio",
    "actor.optim.lr_scheduler_type": "learner.optim.lr_scheduler_type",
    "actor.optim.warmup_style": "learner.optim.lr_scheduler_type",
    "rollout.n": "batch.group_size",
    "rollout.max_num_seqs": "rollout.max_concurrent_sequences",
    "rollout.trust_remote_code": "model.trust_remote_code",
    "rollout.val_override_config.temperature": "evaluation.temperature",
    "rollout.val_override_config.n": "evaluation.group_size",
    "reward.num_cpus": "reward.workers",
    "trainer.total_episodes": "trainer.total_epochs",
    "trainer.project_name": "telemetry.project",
    "trainer.val_before_train": "evaluation.before_training",
    **{
        f"rollout.{section}{name}": f"rollout.engine_args.{name}"
        for section in ("", "vllm.")
        for name in ("gpu_memory_utilization", "enforce_eager", "enable_chunked_prefill", "max_num_batched_tokens")
    },
}
"""Keys with our meaning and unit under another name."""
NO_COUNTERPART = """
actor.strategy | learner.engine=fsdp2 (or deepspeed) learner.num_processes=N divides the model
data.mini_rollout_batch_size | groups are sampled one by one as they are needed
data.val_batch_size | all held-out rows are scored, as many at a time as the server takes
data.override_chat_template | put it into the model folder as chat_template.jinja
data.num_workers data.filter_overlong_prompts_workers | rows are measured once, by as many threads as there are cores
trainer.max_try_make_batch | a run stops where a pass over the data, and 20 batches, leave no group (algorithm.filters)
algorithm.filter_groups.max_num_gen_batches | a run stops where a pass over the data, and 20 batches, leave no group
actor.micro_batch_size_per_device_for_experience | batch.tokens_per_microbatch serves every pass
actor.log_prob_micro_batch_size | batch.tokens_per_microbatch serves every pass
actor.clip_ratio | algorithm.clip_ratio_low and clip_ratio_high are always both set
actor.model.tokenizer_path | that of model.path
actor.fsdp.mp_reduce_dtype actor.fsdp.mp_buffer_dtype | sums are float32
data.truncation | a longer prompt is never cut: data.on_bad_row says what becomes of its row
data.return_raw_chat data.return_raw_input_ids data.return_full_prompt | a reward gets the row, the text and its tokens
data.validation_shuffle data.dataloader_num_workers | held-out rows keep their order, and rows are read once
data.dataset_class | rows are read as docs/bring-your-own.md says: convert them first
rollout.discount | their loop does not use it; algorithm.gamma discounts the rewards of turns
actor.use_torch_compile actor.model.attn_implementation | the learner does not compile, and packing decides
actor.model.lora_dropout actor.model.lora_task_type actor.model.lora_modules_to_save | only adapters, no dropout
rollout.seed rollout.vllm.seed | trainer.seed decides, through the seed of each ticket
rollout.limit_images | a row's images are taken as they are
rollout.max_model_len rollout.vllm.max_model_len | it is data.max_prompt_length + data.max_response_length
rollout.load_format rollout.vllm.load_format | the engine starts with the learner's weights
rollout.disable_log_stats rollout.vllm.disable_log_stats rollout.disable_tqdm | the engine's statistics are metrics here
rollout.micro_batch_size | rollout.max_concurrent_sequences bounds what is decoded together
rollout.service_mode rollout.service_url rollout.service_timeout | a server dials the learner (network.host)
reward.compute_score | a built-in of theirs: name its file and function
trainer.load_checkpoint_path trainer.find_last_checkpoint | --resume goes on, a new run starts from model.path
trainer.nnodes trainer.n_gpus_per_node | one learner; servers may run elsewhere (docs/multi-node.md)
trainer.val_generations_to_log | samples of training are kept instead: trainer.samples_per_step
trainer.ray_timeline | there is no Ray
trainer.async_training | asynchronous is the rule: learner.max_staleness
"""
"""Keys without a counterpart, and why."""
READ_WITH = """
algorithm.disable_kl algorithm.use_kl_loss algorithm.kl_penalty | the KL coefficient
algorithm.kl_ctrl.kl_coef | algorithm.use_kl_in_reward
actor.kl_loss_type | actor.kl_loss_coef
actor.model.use_peft | actor.model.lora_r
algorithm.filter_key algorithm.filter_low algorithm.filter_high | algorithm.online_filtering
algorithm.filter_groups.metric | algorithm.filter_groups.enable
trainer.outputs_dir trainer.save_checkpoint_path | trainer.experiment_name
reward.reward_function_kwargs reward.score_function_kwargs | the reward function
"""
"""Keys that are read together with another one."""
OTHER_VALUE: dict[str, Rule] = {
    "data.filter_overlong_prompts": other_values(
        "data.on_bad_row", {True: "skip", False: "stop"}, "true or false", note="all rows that cannot be used"
    ),
    "actor.loss_avg_mode": other_values(
        "algorithm.loss_agg_mode", {"token": "token-mean", "seq": "seq-mean-token-mean"}, "token or seq there"
    ),
    "actor.loss_agg_mode": other_values(
        "algorithm.loss_agg_mode",
        {name: name for name in AGGREGATIONS},
        f"it is one of {', '.join(AGGREGATIONS)}",
        note="here over the whole update, not per micro-batch; a sum over sequences is a mean",
    ),
    "actor.loss_type": other_values("algorithm.policy_loss", LOSSES, PLUGIN),
    "actor.model.torch_dtype": _DTYPE,
    "actor.fsdp.torch_dtype": derived.computed_dtype(_DTYPE),
    "actor.fsdp.mp_param_dtype": _DTYPE,
    "rollout.dtype": derived.engine_dtype(_DTYPES),
    "rollout.vllm.dtype": derived.engine_dtype(_DTYPES),
    "algorithm.use_pf_ppo": only_one(False, "off", "rows are not drawn again by their scores (PF-PPO)"),
    "actor.ppo_epochs": only_one(1, "a group is trained once", "a group is trained once, never again"),
    "actor.padding_free": one_value(True, _PACKED, _PACKED),
    "actor.dynamic_batching": one_value(True, _PACKED, _PACKED),
    "actor.ulysses_size": one_value(1, _WHOLE_SEQUENCES, _WHOLE_SEQUENCES),
    "actor.ulysses_sequence_parallel_size": one_value(1, _WHOLE_SEQUENCES, _WHOLE_SEQUENCES),
    "actor.optim.strategy": one_value("adamw", "as here", "AdamW; bfloat16 weights are model.dtype=bfloat16"),
    "actor.optim.num_cycles": one_value(0.5, "cosine goes down once", "cosine goes down once"),
    "rollout.name": other_values(
        "rollout.engine", {name: name for name in ("vllm", "sglang", "hf")}, "engines are vllm, sglang and hf"
    ),
    "rollout.quantization": other_values(
        "rollout.quantization", {"fp8": "fp8"}, "weights of rollouts are fp8 or int8 (rollout.quantization)"
    ),
    "rollout.top_k": off_is_zero("rollout.top_k"),
    "rollout.ignore_eos": one_value(False, "off", "it bans the stop token, of which the learner knows nothing"),
    "rollout.val_override_config.top_p": one_value(1.0, "off", "evaluation samples from the whole distribution"),
    "rollout.val_override_config.top_k": one_value(-1, "off", "evaluation samples from the whole distribution"),
    "reward.skip_special_tokens": one_value(True, "as here", "completions reach a reward without special tokens"),
    "trainer.val_freq": off_is_zero("evaluation.every_steps"),
    "trainer.save_freq": off_is_zero("trainer.save_freq"),
    "trainer.val_only": one_value(False, "asyncrl eval does that", "asyncrl eval CONFIG --model FOLDER"),
    "trainer.save_model_only": one_value(False, "as here", "a checkpoint holds all that a restart needs"),
}
"""Keys of which some values have a counterpart, or ask for what is done here anyway."""
DERIVED: dict[str, Rule] = {
    "data.train_files": derived.data_files("data.train_files"),
    "data.val_files": derived.data_files("data.val_files"),
    "data.val_image_dir": derived.validation_images,
    "algorithm.adv_estimator": derived.estimator,
    "algorithm.kl_coef": derived.kl_loss,
    "algorithm.online_filtering": derived.online_filtering,
    "algorithm.filter_groups.enable": derived.filter_groups,
    "algorithm.lam": derived.both_lambdas,
    "actor.policy_loss.clip_cov_ratio": derived.marked_share("clip_cov"),
    "actor.policy_loss.kl_cov_ratio": derived.marked_share("kl_cov"),
    "critic.model.model_path": derived.critic_path,
    "critic.cliprange_value": derived.critic_only("critic.clip_range"),
    "critic.optim.lr": derived.critic_only("critic.optim.lr"),
    "critic.optim.weight_decay": derived.critic_only("critic.optim.weight_decay"),
    "critic.max_grad_norm": derived.critic_only("critic.optim.max_grad_norm"),
    "trainer.critic_warmup": derived.critic_only("critic.warmup_steps"),
    **{f"algorithm.{key}": derived.kl_controller("kind") for key in ("kl_type", "kl_ctrl.type")},
    **{f"algorithm.{key}": derived.kl_controller("target") for key in ("kl_target", "kl_ctrl.target_kl")},
    **{f"algorithm.{key}": derived.kl_controller("horizon") for key in ("kl_horizon", "kl_ctrl.horizon")},
    "algorithm.use_kl_in_reward": derived.kl_in_reward,
    "actor.global_batch_size": derived.updates_per_batch,
    "actor.ppo_mini_batch_size": derived.updates_per_batch,
    "actor.micro_batch_size_per_device_for_update": derived.tokens_per_microbatch,
    "actor.ppo_micro_batch_size": derived.tokens_per_microbatch,
    "actor.tis_imp_ratio_cap": derived.importance_cap,
    "actor.kl_loss_coef": derived.kl_loss,
    "actor.model.model_path": derived.model_path,
    "actor.model.lora.target_modules": derived.target_modules,
    "actor.model.lora.exclude_modules": derived.excluded_modules,
    "actor.model.lora_r": derived.lora_only("model.lora.rank"),
    "actor.model.lora_alpha": derived.lora_only("model.lora.alpha"),
    "actor.model.lora_target_modules": derived.lora_only("model.lora.target_modules"),
    "actor.optim.lr_warmup_ratio": derived.warmup_ratio,
    "actor.optim.lr_warmup_steps": derived.warmup_steps,
    "reward.reward_type": derived.reward_type,
    "reward.reward_function": derived.reward_function,
    "reward.score_function": derived.reward_function,
    "trainer.experiment_name": derived.run_dir,
    "trainer.logger": derived.trackers,
    "trainer.save_limit": derived.kept_checkpoints,
}


RULES: Mapping[str, Rule] = {
    **{key: same(key) for key in SAME_NAME.split()},
    **{key: same(ours) for key, ours in OTHER_NAME.items()},
    **{key: derived.read_with(whole) for key, whole in derived.by_line(READ_WITH).items()},
    **{key: absent(why) for key, why in derived.by_line(NO_COUNTERPART).items()},
    **OTHER_VALUE,
    **DERIVED,
    **correction_rules.RULES,
    **environments.RULES,
    **hybrid_rules.RULES,
    **TRL_RULES,
}
"""TRL's keys have no dots, and those of the others have: no key is in both."""
SECTIONS: Mapping[str, Rule] = {
    correction_rules.SECTION: correction_rules.other,
    "algorithm.pf_ppo.": derived.read_with("algorithm.use_pf_ppo"),
    "algorithm.": lambda value, _: (
        lost("nothing of this name is known, and it may be another algorithm") if value else no_setting("off there")
    ),
    "actor.fsdp.": absent(_DIVIDED),
    "actor.deepspeed.": absent(_ZERO),
    "actor.offload.": absent("in sync mode everything leaves the device in turn; otherwise it stays there"),
    "actor.checkpoint.": absent("a checkpoint holds all that a restart needs"),
    "actor.policy_loss.": absent(PLUGIN),
    "actor.model.override_config.": absent("the model is as its folder says: change its config.json"),
    "ref.": absent("the reference policy, where there is one, is the base model under its adapters"),
    "critic": absent(_CRITIC),
    "rollout.sglang.": absent("its arguments are rollout.engine_args"),
    "rollout.multi_turn.": lambda value, _: (
        derived.lost("a completion is one turn") if value else derived.no_setting("as here")
    ),
    "reward.model.": lambda value, _: (
        derived.lost("name it in reward.functions: {function: reward_model, kwargs: {path: ...}} (docs/rewards.md)")
        if value
        else derived.no_setting("off there")
    ),
    "reward.overlong_buffer.": derived.read_with("the reward function"),
    "reward.reward_function_kwargs.": derived.read_with("the reward function"),
    "reward.score_function_kwargs.": derived.read_with("the reward function"),
}
"""Rules of whole sections, for keys without a rule of their own."""

_DEFAULTS_OF_BOTH: Mapping[str, Any] = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": True,
    "actor.clip_ratio_low": 0.2,
    "actor.model.enable_gradient_checkpointing": True,
    "actor.model.freeze_vision_tower": False,
    "rollout.n": 1,
    "rollout.name": "vllm",
    "trainer.total_epochs": 15,
}
THEIR_DEFAULTS: Mapping[Framework, Mapping[str, Any]] = {
    "TRL": TRL_DEFAULTS,
    "verl": VERL_DEFAULTS,
    "EasyR1": {
        **_DEFAULTS_OF_BOTH,
        "data.rollout_batch_size": 512,
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": False,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_coef": 1e-3,
        "actor.global_batch_size": 256,
        "actor.micro_batch_size_per_device_for_update": 4,
        "actor.clip_ratio_high": 0.3,
        "actor.fsdp.mp_param_dtype": "bf16",
        "rollout.tensor_parallel_size": 2,
        "rollout.gpu_memory_utilization": 0.6,
        "trainer.experiment_name": "demo",
    },
    "RLLaVA": {
        **_DEFAULTS_OF_BOTH,
        "data.train_batch_size": 512,
        "algorithm.use_kl_loss": True,
        "actor.kl_loss_coef": 0.01,
        "actor.kl_loss_type": "low_var_kl",
        "actor.sft_loss_coef": 1.0,
        "actor.ppo_mini_batch_size": 256,
        "actor.ppo_micro_batch_size": 4,
        "actor.clip_ratio_high": 0.2,
        "actor.model.torch_dtype": "bf16",
        "reward.reward_type": "batch",
        "trainer.experiment_name": "agent",
    },
}
"""Defaults of their schemas, where leaving the key out would mean something else here."""
